"""One preparation at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError

FILE = "lock"


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Holds the lock of a work folder, which is made, until the block ends.

    The system lets go of it when the process ends, however it ends: a lock is never left behind.

    Raises:
        DataError: another process holds it.
    """
    work.mkdir(parents=True, exist_ok=True)
    path = work / FILE
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise DataError(
                f"{work.parent}: process {stream.read().strip() or 'unknown'} is preparing data in this folder; wait "
                "for it, or name another folder with --out"
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        try:
            yield
        finally:
            _leave_no_trace(work)


def _leave_no_trace(work: Path) -> None:
    """Removes a work folder that holds nothing but the lock."""
    if work.is_dir() and [entry.name for entry in work.iterdir()] == [FILE]:
        (work / FILE).unlink()
        work.rmdir()
