"""Checkpoints: named tensors through torch.distributed.checkpoint, numbers and strings as JSON, published atomically.

``checkpoints/step_00000010/`` holds the tensors' files and ``state.json``: format version, step, the loop's state,
and size and CRC-32 of every tensor file. A checkpoint is written under another name and renamed when it is complete
and on the disk, so a save that is killed leaves nothing that looks like a checkpoint. ``last`` and ``best`` are text
files that name a checkpoint.

What several ranks hold parts of (:class:`erase_rec.distributed.shards.Shards`) is one tensor in a checkpoint, of which
each rank writes its parts into files of its own; everything else the first rank writes. So nothing in a checkpoint
depends on how tables were spread, or over how many ranks. The ranks must see one folder.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from erase_rec.distributed.shards import Held, Shards, ShardsLoadPlanner, ShardsSavePlanner
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.tensor_index import IndexReader

FORMAT = 3
STATE_FILE = "state.json"
BEST_FILE = "best"
LAST_FILE = "last"
PARTIAL = ".partial"
"""Suffix of what is being written: worthless if found later."""
REPLACED = ".replaced"
"""Suffix of a checkpoint while one of the same step takes its place: valid if that one is missing."""

_FILE = re.compile(r"__(\d+)_")
_WRITER_FAILED = "inline_container"
"""In what torch's archive writer says where a file cannot be written; all that comes from another rank."""
_NAME = re.compile(r"step_(\d{8,18})", re.ASCII)
_CHUNK_BYTES = 16 * 2**20
_DAMAGE = (
    *(EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError),
    pickle.UnpicklingError,
)
"""What torch raises where a file does not hold what the index says, though its checksum is right."""
_SHOWN_NAMES = 8


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged, of another format, or does not fit what it is loaded into."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint is of another format. Not damage, which going back to an older checkpoint makes up for."""


class CheckpointManager:
    """The checkpoints of one run. One process saves at a time, or all ranks of a run together."""

    def __init__(self, folder: Path, keep: int, world: World | None = None) -> None:
        """Opens ``folder`` (made at the first save) and changes nothing in it.

        Args:
            folder: ``runs/<id>/checkpoints``.
            keep: how many of the newest are retained besides the best; at least 1.
            world: the ranks that save; None: this process alone.
        """
        assert keep >= 1
        self._folder = folder
        self._keep = keep
        self._world = world or World()

    def save(self, step: int, tensors: Mapping[str, Held], state: Mapping[str, Any], *, is_best: bool) -> Path:
        """Writes and publishes the checkpoint of ``step``, then removes what is no longer retained.

        Every rank calls it; collective where ranks hold parts of tensors, and elsewhere only the first rank works.
        Synchronises the host. A checkpoint of the same step is replaced. Retention never looks at newer steps, which
        a run that was resumed from an older one may find here.

        Args:
            step: updates done so far.
            tensors: on any device; the same names on every rank.
            state: JSON's types only; the first rank's counts.
            is_best: mark it as the best so far.

        Raises:
            UserError: the disk refuses, on any rank; the checkpoints saved before are kept.
        """
        target = self._folder / f"step_{step:08d}"
        partial = self._folder / f"{target.name}{PARTIAL}"
        spread = self._world.size > 1 and any(isinstance(tensor, Shards) for tensor in tensors.values())
        if not (spread or self._world.is_first):
            return target
        try:
            with self._together("begin", spread):
                if self._world.is_first:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(partial, ignore_errors=True)
            files = self._write_tensors(partial, tensors) if spread else _write_alone(partial, tensors)
            with self._together("publish", spread):
                if self._world.is_first:
                    record = sealed({"format": FORMAT, "step": step, "files": files, "state": state})
                    _write(partial / STATE_FILE, json.dumps(record))
                    self._publish(partial, target, is_best=is_best)
        except OSError as error:
            if self._world.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot write checkpoint {target}: {error.strerror or error}; the checkpoints saved before are kept: "
                "free some space or make the folder writable, then resume"
            ) from error
        if self._world.is_first:
            self._remove_old(step)
        return target

    def _write_tensors(self, partial: Path, tensors: Mapping[str, Held]) -> dict[str, dict[str, int]]:
        """Writes this rank's tensors beside those of the others; size and checksum of every file. Collective."""
        own = {name: value for name, value in tensors.items() if self._world.is_first or isinstance(value, Shards)}
        with _plain_errors(), self._world.lent("checkpoint"):
            dcp_save(own, checkpoint_id=partial, planner=ShardsSavePlanner())
        files: dict[str, dict[str, int]] = {}
        with self._together("files", True):
            # A rank's files are named by its number; the index is the first rank's.
            mine = [file for file in sorted(partial.iterdir()) if _writer(file.name) == self._world.rank]
            files = {file.name: _fingerprint(file) for file in mine}
        return {
            name: found
            for of_rank in self._world.gather_objects("checkpoint.files", files)
            for name, found in of_rank.items()
        }

    @contextmanager
    def _together(self, stage: str, spread: bool) -> Iterator[None]:
        """A block that fails on every rank where it fails on one; collective where tensors are ``spread``.

        Raises:
            OSError: of the first rank that had one.
        """
        own: OSError | None = None
        try:
            yield
        except OSError as error:
            own = error
        found = self._world.gather_objects(f"checkpoint.{stage}", _numbered(own)) if spread else [_numbered(own)]
        if own is not None:
            raise own
        if others := [entry for entry in found if entry is not None]:
            raise OSError(*others[0])

    def _publish(self, partial: Path, target: Path, *, is_best: bool) -> None:
        _sync_folder(partial)
        _publish(partial, target)
        for pointer in (LAST_FILE, BEST_FILE) if is_best else (LAST_FILE,):
            _write(self._folder / f"{pointer}{PARTIAL}", target.name)
            (self._folder / f"{pointer}{PARTIAL}").replace(self._folder / pointer)
        _sync_folder(self._folder)

    def latest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence on each newer one that is not.

        Reads the files of what it returns to compare their checksums.

        Raises:
            CheckpointFormatError: a checkpoint is of another format.
        """
        messages: list[str] = []
        for _, path in reversed(self._published()):
            try:
                verify(path)
            except CheckpointFormatError:
                raise
            except CheckpointError as error:
                messages.append(f"{error}; skipped")
            else:
                return path, messages
        return None, messages

    def best(self) -> Path | None:
        """The checkpoint marked as best, or None when there is none.

        Raises:
            CheckpointError: the mark names no checkpoint.
        """
        mark = self._folder / BEST_FILE
        try:
            name = mark.read_bytes()
        except FileNotFoundError:
            return None
        if _NAME.fullmatch(found := name.decode(errors="replace")) is None:
            raise CheckpointError(
                f"{mark} names no checkpoint: found {found[:80]!r}, expected step_ and digits; remove it"
            )
        path = self._folder / found
        return path if path.is_dir() else None

    def recover(self) -> None:
        """Clears what a killed save left, and restores the checkpoint that it was about to replace.

        Call it when a run is continued, before :meth:`latest`.
        """
        for path in self._folder.glob(f"*{REPLACED}"):
            target = path.with_name(path.name.removesuffix(REPLACED))
            if target.exists():
                shutil.rmtree(path)
            else:
                path.rename(target)
        for path in self._folder.glob(f"*{PARTIAL}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _published(self) -> list[tuple[int, Path]]:
        """Step and folder of each published checkpoint, oldest first."""
        named = ((_NAME.fullmatch(path.name), path) for path in self._folder.glob("step_*"))
        return sorted((int(match[1]), path) for match, path in named if match)

    def _remove_old(self, step: int) -> None:
        best = self.best()
        for _, path in [entry for entry in self._published() if entry[0] <= step][: -self._keep]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)  # what stays is tried again after the next save


def verify(path: Path, world: World | None = None) -> None:
    """Checks that the checkpoint at ``path`` is whole: its record, its files' sizes and checksums, its tensor index.

    Args:
        path: a checkpoint.
        world: ranks that share the reading of the files, of which each is read once; collective. None: this process.

    Raises:
        CheckpointError: it is not, on every rank.
    """
    world = world or World()
    files = sorted(_record(path)["files"].items())[world.rank :: world.size]
    problem = next(filter(None, (_file_problem(path / name, expected) for name, expected in files)), None)
    if problems := [found for found in world.gather_objects("checkpoint.verify", problem) if found is not None]:
        raise _unusable(path, problems[0])
    stored_layout(path)


def _file_problem(file: Path, expected: Mapping[str, int]) -> str | None:
    """What is wrong with a file that was written with these size and checksum; None where nothing is."""
    try:
        found = _fingerprint(file)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if found["bytes"] != expected["bytes"]:
        return f"{file.name} has {found['bytes']} bytes, {expected['bytes']} were written"
    return None if found == expected else f"{file.name} is not what was written (its checksum differs)"


def read_state(path: Path) -> dict[str, Any]:
    """The loop's state in the checkpoint at ``path``; reads no tensor.

    Raises:
        CheckpointError: the record is missing, damaged or of another format.
    """
    state: dict[str, Any] = _record(path)["state"]
    return state


def stored_layout(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor in the checkpoint at ``path``; reads no tensor.

    Raises:
        CheckpointError: its index cannot be read.
    """
    try:
        entries = IndexReader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError) as error:
        raise _unusable(path, f"torch {torch.__version__} cannot read its tensor index ({error})") from error
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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
    try:
        with _plain_errors():
            # Ranks read what they need by themselves.
            dcp_load(dict(into), storage_reader=IndexReader(path), planner=ShardsLoadPlanner(), no_dist=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise _unusable(path, f"its tensors are not what its index says ({error})") from error


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's generators that training on ``device`` draws from: ``cpu``, and ``cuda`` there; uint8 each."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Takes over what :func:`rng_state` gave for ``device``."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(path, f"{STATE_FILE} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"{STATE_FILE} is not JSON ({error})") from error
    if not isinstance(record, dict) or not {"format", "files", "state"} <= record.keys():
        raise _unusable(path, f"{STATE_FILE} is not the record of a checkpoint")
    if record["format"] != FORMAT:
        raise CheckpointFormatError(
            f"checkpoint {path} cannot be used: its format is {record['format']!r}, this version reads {FORMAT}; "
            "continue with the version of erase-rec that wrote it, or start a new run"
        )
    if record != sealed(record):
        raise _unusable(path, f"{STATE_FILE} was changed after it was written (its checksum differs)")
    return record


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's record with the checksum of all else in it: nothing else would tell that a number was changed."""
    rest = {key: value for key, value in record.items() if key != "crc32"}
    return rest | {"crc32": zlib.crc32(json.dumps(rest, sort_keys=True).encode())}


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} cannot be used: {reason}")


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def _write_alone(partial: Path, tensors: Mapping[str, Held]) -> dict[str, dict[str, int]]:
    """Writes all tensors from one process; size and checksum of every file."""
    with _plain_errors():
        dcp_save(dict(tensors), checkpoint_id=partial, planner=ShardsSavePlanner(), no_dist=True)
    return {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}


def _writer(file: str) -> int:
    """The rank that wrote a file of a checkpoint."""
    match = _FILE.match(file)
    return int(match[1]) if match else 0


def _numbered(error: OSError | None) -> tuple[int | None, str] | None:
    """What another rank makes the same error of."""
    return None if error is None else (error.errno, error.strerror or str(error))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Calls torch.distributed.checkpoint without its remark on a missing process group, and with plain exceptions.

    It wraps whatever was raised, Ctrl-C too, in a CheckpointException; a full disk is there the OSError in whose
    handling the archive writer failed once more. Of another rank's failure only the last exception is there.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as wrapper:
        rank, (cause, _) = next(iter(wrapper.failures.items()))
        error: BaseException | None = cause
        while error is not None and not isinstance(error, OSError):
            error = error.__cause__ or error.__context__
        if error is None and _WRITER_FAILED in str(cause):
            error = OSError(errno.EIO, f"rank {rank}: {str(cause).splitlines()[0]}")
        raise error or cause from None


def _fingerprint(file: Path) -> dict[str, int]:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": file.stat().st_size, "crc32": crc}


def _publish(partial: Path, target: Path) -> None:
    """Renames ``partial`` to ``target``; one that is there is removed last, and can be restored until then."""
    replaced = target.with_name(f"{target.name}{REPLACED}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


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
