"""What a checkpoint says of itself: its record, the checksums of its files, its index of tensors.

``state.json`` holds format version, step, the text files that were to name the checkpoint, the loop's state, and size
and CRC-32 of every other file.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.tensor_index import IndexReader

FORMAT = 3
STATE_FILE = "state.json"
NAMED_BY = "named_by"
"""Entry of the record; not in those of older runs."""

_CHUNK_BYTES = 16 * 2**20


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged, of another format, or does not fit what it is loaded into."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint is of another format. Not damage, which going back to an older checkpoint makes up for."""


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
        raise unusable(path, problems[0])
    stored_layout(path)


def _file_problem(file: Path, expected: Mapping[str, int]) -> str | None:
    """What is wrong with a file that was written with these size and checksum; None where nothing is."""
    try:
        found = fingerprint(file)
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


def named_by(path: Path) -> list[str]:
    """The text files that name the checkpoint at ``path`` once its save has come to its end; reads no tensor.

    Raises:
        CheckpointError: the record is missing, damaged or of another format.
    """
    found = _record(path).get(NAMED_BY)
    return found if isinstance(found, list) else []


def stored_layout(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor in the checkpoint at ``path``; reads no tensor.

    Raises:
        CheckpointError: its index cannot be read.
    """
    try:
        entries = IndexReader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError) as error:
        raise unusable(path, f"torch {torch.__version__} cannot read its tensor index ({error})") from error
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise unusable(path, f"{STATE_FILE} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise unusable(path, f"{STATE_FILE} is not JSON ({error})") from error
    if not isinstance(record, dict) or not {"format", "files", "state"} <= record.keys():
        raise unusable(path, f"{STATE_FILE} is not the record of a checkpoint")
    if record["format"] != FORMAT:
        raise CheckpointFormatError(
            f"checkpoint {path} cannot be used: its format is {record['format']!r}, this version reads {FORMAT}; "
            "continue with the version of erase-rec that wrote it, or start a new run"
        )
    if record != sealed(record):
        raise unusable(path, f"{STATE_FILE} was changed after it was written (its checksum differs)")
    return record


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's record with the checksum of all else in it: nothing else would tell that a number was changed."""
    rest = {key: value for key, value in record.items() if key != "crc32"}
    return rest | {"crc32": zlib.crc32(json.dumps(rest, sort_keys=True).encode())}


def unusable(path: Path, reason: str) -> CheckpointError:
    """What is raised of a checkpoint that is not whole."""
    return CheckpointError(f"checkpoint {path} cannot be used: {reason}")


def fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file's content."""
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": file.stat().st_size, "crc32": crc}
