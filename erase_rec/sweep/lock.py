"""One sweep at a time in a folder, and none before the runs of a killed one have ended."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from erase_rec.errors import UserError

WAIT_S = 60.0
"""Longest wait for the runs of a sweep that is gone; torchrun gives its ranks 30 s to end."""
_POLL_S = 0.1


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds ``folder`` until the block ends and every process has ended that was given the lock's descriptor.

    Yields:
        The descriptor, for ``pass_fds`` of the runs: so the lock outlives a sweep that is killed, until its runs are
        gone.

    Raises:
        UserError: a sweep is at work there.
    """
    file = (folder / "sweep.lock").open("a+", encoding="utf-8")
    with file:
        deadline = time.monotonic() + WAIT_S
        while not _take(file.fileno()):
            file.seek(0)
            holder = file.read().strip()
            if holder.isdecimal() and _lives(int(holder)):
                raise UserError(f"{folder}: process {holder} runs this sweep; wait for it, or choose another --out")
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: runs of an earlier call are still alive; end them (ps ax | grep {folder})")
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
