"""Reads tensors of a checkpoint into those of a model, in place, whatever ranks and plans either has."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from erase_rec.checkpoint.plain_errors import ignore_remark, plain_errors
from erase_rec.checkpoint.record import CheckpointError, stored_layout, unusable, verify
from erase_rec.distributed.shards import Held, ShardsLoadPlanner
from erase_rec.distributed.world import World
from erase_rec.tensor_index import IndexReader

_DAMAGE = (
    *(EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError),
    pickle.UnpicklingError,
)
"""What torch raises where a file does not hold what the index says, though its checksum is right."""
_SHOWN_NAMES = 8


def load(path: Path, into: Mapping[str, Held], *, subset: bool = False, world: World | None = None) -> None:
    """Reads the tensors of the checkpoint at ``path`` into ``into``, in place; of parts of tensors these alone.

    Args:
        path: a checkpoint.
        into: tensors, or parts of them, of the same names, whole shapes and dtypes, on any device.
        subset: names that only the checkpoint has are left there.
        world: ranks that load together, see :func:`verify`; None: this process alone.

    Raises:
        CheckpointError: the checkpoint is not whole, or does not fit; ``into`` is as it was.
    """
    verify(path, world)
    stored = stored_layout(path)
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in into.items()}
    problems = []
    if missing := wanted.keys() - stored.keys():
        problems.append(f"it lacks {_listed(missing)}")
    if not subset and (unexpected := stored.keys() - wanted.keys()):
        problems.append(f"it also holds {_listed(unexpected)}")
    if differing := [name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]]:
        differences = [f"{name} ({_layout(*stored[name])} there, {_layout(*wanted[name])} here)" for name in differing]
        problems.append(f"other shape or dtype: {_listed(differences)}")
    if problems:
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(problems)}; "
            "use the configuration and the data that it was made with"
        )
    read_into(path, into)


def read_into(path: Path, into: Mapping[str, Held]) -> None:
    """As :func:`load`, of a checkpoint that was verified and of names, shapes and dtypes that it has.

    Raises:
        CheckpointError: the files are not what they were.
    """
    ignore_remark()
    try:
        with plain_errors():
            # Ranks read what they need by themselves.
            dcp_load(dict(into), storage_reader=IndexReader(path), planner=ShardsLoadPlanner(), no_dist=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise unusable(path, f"its tensors are not what its index says ({error})") from error


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"
