"""Checkpoints: named tensors through torch.distributed.checkpoint, numbers and strings as JSON, published atomically.

``checkpoints/step_00000010/`` holds the tensors' files and ``state.json`` (format version, the loop's state, and
the size of every file). A checkpoint is written under another name and renamed when complete, so a killed save
leaves nothing that looks like one. ``best`` is a text file naming the best one.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from erase_rec.errors import UserError

FORMAT = 1
STATE_FILE = "state.json"
BEST_FILE = "best"
PREFIX = "step_"
PARTIAL = ".partial"


class CheckpointManager:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Opens ``folder`` (made at the first save).

        Args:
            folder: ``runs/<id>/checkpoints``.
            keep: how many of the newest are retained besides the best.
        """
        self._folder = folder
        self._keep = keep

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, is_best: bool) -> Path:
        """Writes and publishes the checkpoint of ``step``, then removes what is no longer retained.

        Synchronises the host. A checkpoint of the same step is replaced.

        Raises:
            UserError: the disk refuses; earlier checkpoints are kept.
        """
        target = self._folder / f"{PREFIX}{step:08d}"
        partial = self._folder / f"{target.name}{PARTIAL}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            with _one_process():
                dcp_save(dict(tensors), checkpoint_id=partial, no_dist=True)
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            _write(partial / STATE_FILE, json.dumps({"format": FORMAT, "step": step, "files": files, "state": state}))
            _sync_folder(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            if is_best:
                _write(self._folder / f"{BEST_FILE}{PARTIAL}", target.name)
                (self._folder / f"{BEST_FILE}{PARTIAL}").replace(self._folder / BEST_FILE)
            _sync_folder(self._folder)
        except (OSError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(f"cannot write checkpoint {target}: {error}; earlier checkpoints are kept") from error
        self._remove_old()
        return target

    def latest(self) -> tuple[Path | None, list[str]]:
        """The newest complete checkpoint, and a sentence on each newer one that is damaged."""
        messages: list[str] = []
        for path in reversed(self._published()):
            problem = damage(path)
            if problem is None:
                return path, messages
            messages.append(f"checkpoint {path} is skipped: {problem}")
        return None, messages

    def best(self) -> Path | None:
        """The best checkpoint, or None when none was marked."""
        marker = self._folder / BEST_FILE
        if not marker.is_file():
            return None
        path = self._folder / marker.read_text(encoding="utf-8")
        return path if path.is_dir() else None

    def remove_partial(self) -> None:
        """Removes what killed saves left."""
        for path in self._folder.glob(f"*{PARTIAL}"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _published(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"{PREFIX}*") if path.suffix != PARTIAL and path.is_dir())

    def _remove_old(self) -> None:
        best = self.best()
        for path in self._published()[: -self._keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``; None when it is complete."""
    try:
        record = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {STATE_FILE}"
    except (OSError, ValueError) as error:
        return f"{STATE_FILE} cannot be read ({error})"
    if record.get("format") != FORMAT:
        return f"its format is {record.get('format')!r}, this version reads {FORMAT}"
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The loop's state in the checkpoint at ``path``.

    Raises:
        UserError: the checkpoint is damaged.
    """
    problem = damage(path)
    if problem is not None:
        raise UserError(f"checkpoint {path} cannot be used: {problem}")
    state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["state"]
    return state


def load(path: Path, into: Mapping[str, Tensor], *, subset: bool = False) -> None:
    """Reads the tensors of the checkpoint at ``path`` into ``into``, in place.

    Args:
        path: a checkpoint.
        into: tensors of the same names and shapes.
        subset: names that only the checkpoint has are left there.

    Raises:
        UserError: the checkpoint is damaged, or names or shapes differ.
    """
    read_state(path)
    try:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        stored = {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in into.items()}
        unexpected = set() if subset else stored.keys() - wanted.keys()
        missing = wanted.keys() - stored.keys()
        differing = {name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]}
        if missing or unexpected or differing:
            raise UserError(
                f"checkpoint {path} does not fit this model: missing {sorted(missing)}, unexpected "
                f"{sorted(unexpected)}, other shape {[(n, stored[n], wanted[n]) for n in sorted(differing)]}"
            )
        with _one_process():
            dcp_load(dict(into), checkpoint_id=path, no_dist=True)
    except (OSError, pickle.UnpicklingError, CheckpointException) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error}") from error


def rng_state() -> dict[str, Tensor]:
    """State of torch's random generators, for the checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Takes over what :func:`rng_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _one_process() -> Iterator[None]:
    """Silences the remark that there is no process group: ``no_dist=True`` says that on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
