"""Plain exceptions of torch.distributed.checkpoint, which wraps whatever it meets."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

_WRITER_FAILED = "inline_container"
"""In what torch's archive writer says where a file cannot be written; all that comes from another rank."""


def ignore_remark() -> None:
    """No remark, from here on, that torch.distributed.checkpoint works for one process alone.

    To be called by the main thread: the list of what is ignored is the whole process's, so that a thread which put it
    back after its own call could undo what the main thread has changed meanwhile.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Calls torch.distributed.checkpoint with plain exceptions.

    It wraps whatever was raised, Ctrl-C too, in a CheckpointException; a full disk is there the OSError in whose
    handling the archive writer failed once more. Of another rank's failure only the last exception is there.
    """
    try:
        yield
    except CheckpointException as wrapper:
        rank, (cause, _) = next(iter(wrapper.failures.items()))
        error: BaseException | None = cause
        while error is not None and not isinstance(error, OSError):
            error = error.__cause__ or error.__context__
        if error is None and _WRITER_FAILED in str(cause):
            error = OSError(errno.EIO, f"rank {rank}: {str(cause).splitlines()[0]}")
        raise error or cause from None
