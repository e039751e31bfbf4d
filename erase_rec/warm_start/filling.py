"""Reads what a plan takes into the tensors of a model, whole or spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from erase_rec.checkpoint.reading import read_into
from erase_rec.checkpoint.record import stored_layout, verify
from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.distributed.world import World
from erase_rec.warm_start.plan import Taken


@torch.no_grad()
def fill(path: Path, into: Mapping[str, Held], taken: Mapping[str, Taken], world: World) -> None:
    """Reads, in place, what is ``taken`` of the checkpoint at ``path``; all else in ``into`` stays as it is.

    A table whose rows go by key is read as a whole, one after the other, as far as this rank holds its columns: that
    takes host memory for the largest of them.

    Args:
        path: a checkpoint.
        into: tensors of the model, or a rank's parts of them, by name.
        taken: of which of them, see :func:`erase_rec.warm_start.plan.warm_plan`.
        world: ranks that fill together; collective.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    verify(path, world)
    shapes = {name: shape for name, (shape, _) in stored_layout(path).items()}
    direct = {}
    for name, entry in taken.items():
        parts = _parts(into[name])
        if entry.rows is None or entry.rows.source is None:
            direct[entry.stored] = _common(parts, shapes[entry.stored], into[name].dtype)
        else:
            for part in parts:
                _fill_by_key(path, entry.stored, shapes[entry.stored], part, entry.rows.source)
    read_into(path, direct)


def _parts(held: Held) -> tuple[Shard, ...]:
    return held.parts if isinstance(held, Shards) else (Shard((0,) * held.dim(), held.detach()),)


def _common(parts: tuple[Shard, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Shards:
    """The rows of ``parts`` that a tensor of ``shape`` has, too."""
    cut = [
        Shard(part.offsets, part.tensor[: max(shape[0] - part.offsets[0], 0)] if shape else part.tensor)
        for part in parts
    ]
    return Shards(shape, dtype, cut)


def _fill_by_key(path: Path, stored: str, shape: tuple[int, ...], part: Shard, source: Tensor) -> None:
    wanted = source[part.offsets[0] : part.offsets[0] + part.tensor.shape[0]]
    rows = torch.nonzero(wanted >= 0).flatten()
    whole = torch.empty((shape[0], *part.tensor.shape[1:]), dtype=part.tensor.dtype)
    read_into(path, {stored: Shards(shape, whole.dtype, [Shard((0, *part.offsets[1:]), whole)])})
    device = part.tensor.device
    part.tensor.index_copy_(0, rows.to(device), whole[wanted[rows]].to(device))
