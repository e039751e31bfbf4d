"""Writes the files of a checkpoint and publishes them, from one process or from all ranks together."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from erase_rec.checkpoint.plain_errors import plain_errors
from erase_rec.checkpoint.record import FORMAT, NAMED_BY, STATE_FILE, fingerprint, sealed
from erase_rec.distributed.beside import RanksBeside
from erase_rec.distributed.shards import Held, Shards, ShardsSavePlanner

PARTIAL = ".partial"
"""Suffix of what is being written: worthless if found later."""
REPLACED = ".replaced"
"""Suffix of a checkpoint while one of the same step takes its place: valid if that one is missing."""

_FILE = re.compile(r"__(\d+)_")


@dataclass(frozen=True)
class Content:
    """What goes into a checkpoint.

    Attributes:
        step: updates done.
        tensors: by name; nothing may write to them until they are on the disk.
        state: JSON's types only; the first rank's counts.
    """

    step: int
    tensors: Mapping[str, Held]
    state: Mapping[str, Any]


def write_and_publish(target: Path, content: Content, pointers: Sequence[Path], ranks: RanksBeside | None) -> None:
    """Writes a checkpoint under another name, and gives it that of ``target`` once it is whole and on the disk.

    Args:
        target: where it is to be; one that is there is replaced.
        content: what is in it.
        pointers: text files that name the checkpoint from then on.
        ranks: those that hold parts of the tensors, every one of which calls this; None: this process writes alone.

    Raises:
        OSError: the disk refuses, on any rank; nothing of the checkpoint is left.
    """
    partial = target.with_name(f"{target.name}{PARTIAL}")
    is_first = ranks is None or ranks.is_first
    try:
        with _together("begin", ranks):
            if is_first:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(partial, ignore_errors=True)
        files = _write_alone(partial, content.tensors) if ranks is None else _write_part(partial, content, ranks)
        with _together("publish", ranks):
            if is_first:
                head = {"format": FORMAT, "step": content.step, NAMED_BY: [pointer.name for pointer in pointers]}
                record = sealed(head | {"files": files, "state": content.state})
                _write(partial / STATE_FILE, json.dumps(record))
                _publish(partial, target, pointers)
    except OSError:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_alone(partial: Path, tensors: Mapping[str, Held]) -> dict[str, dict[str, int]]:
    """Writes all tensors from one process; size and checksum of every file."""
    with plain_errors():
        dcp_save(dict(tensors), checkpoint_id=partial, planner=ShardsSavePlanner(), no_dist=True)
    return {file.name: fingerprint(file) for file in sorted(partial.iterdir())}


def _write_part(partial: Path, content: Content, ranks: RanksBeside) -> dict[str, dict[str, int]]:
    """Writes this rank's tensors beside those of the others; size and checksum of every file. Collective."""
    own = {name: value for name, value in content.tensors.items() if ranks.is_first or isinstance(value, Shards)}
    with plain_errors(), ranks.named("checkpoint"):
        dcp_save(own, checkpoint_id=partial, planner=ShardsSavePlanner(), process_group=ranks.group)
    files: dict[str, dict[str, int]] = {}
    with _together("files", ranks):
        # A rank's files are named by its number; the index is the first rank's.
        mine = [file for file in sorted(partial.iterdir()) if _writer(file.name) == ranks.rank]
        files = {file.name: fingerprint(file) for file in mine}
    every = ranks.gather_objects("checkpoint.files", files)
    return {name: found for of_rank in every for name, found in of_rank.items()}


@contextmanager
def _together(stage: str, ranks: RanksBeside | None) -> Iterator[None]:
    """A block that fails on every rank where it fails on one; collective.

    Raises:
        OSError: of the first rank that had one.
    """
    own: OSError | None = None
    try:
        yield
    except OSError as error:
        own = error
    found = [_numbered(own)] if ranks is None else ranks.gather_objects(f"checkpoint.{stage}", _numbered(own))
    if own is not None:
        raise own
    if others := [entry for entry in found if entry is not None]:
        raise OSError(*others[0])


def _numbered(error: OSError | None) -> tuple[int | None, str] | None:
    """What another rank makes the same error of."""
    return None if error is None else (error.errno, error.strerror or str(error))


def _writer(file: str) -> int:
    """The rank that wrote a file of a checkpoint."""
    match = _FILE.match(file)
    return int(match[1]) if match else 0


def _publish(partial: Path, target: Path, pointers: Sequence[Path]) -> None:
    """Renames ``partial`` to ``target``, then lets the pointers name it."""
    _sync_folder(partial)
    _rename(partial, target)
    for pointer in pointers:
        point(pointer, target)
    _sync_folder(target.parent)


def point(pointer: Path, target: Path) -> None:
    """Lets a text file name the checkpoint ``target``; a kill leaves the old name or the new one."""
    written = pointer.with_name(f"{pointer.name}{PARTIAL}")
    _write(written, target.name)
    written.replace(pointer)


def _rename(partial: Path, target: Path) -> None:
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
