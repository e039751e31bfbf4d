"""Starts a command that ends when its parent does, however that ended: ``python leash.py PARENT_PID COMMAND ...``.

A script by itself, not a module, so that it starts in milliseconds. Linux only, as ``prctl`` is.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    # SIGTERM, and not SIGKILL: torchrun ends its ranks on it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit(128 + signal.SIGTERM)
    # A sweep that a script put into the background ignores SIGINT, and so would its runs, which are to end on it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(command[0], command)


if __name__ == "__main__":
    _main()
