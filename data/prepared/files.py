"""Files that are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError

PARTIAL = "*.partial-*"
"""What unfinished files are called."""


def partial_of(path: Path) -> Path:
    """Name of a file while it is written, another one in each process."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def publish_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Writes beside the place and renames; with ``sync`` it waits for the disk before that."""
    partial = partial_of(path)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if sync:
            os.fsync(stream.fileno())
    partial.replace(path)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or the names of a folder's files, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into a user's error. What is read inside has errors of its own."""
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        way_out = "make room" if full else "make it a folder that you may write to, or name another one with --out,"
        raise DataError(
            f"{folder}: cannot be written: {cause}; {way_out} and run the same command again: what is finished is kept"
        ) from error
