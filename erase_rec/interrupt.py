"""Ctrl-C that is not lost. Python raises it wherever the main thread is; inside a finalizer it is dropped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], None]]:
    """Notes SIGINT besides raising :class:`KeyboardInterrupt`, until the block ends; in the main thread only.

    Yields:
        A check that raises :class:`KeyboardInterrupt` where one was noted; call it where work can stop.
    """
    noted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        noted.set()
        raise KeyboardInterrupt

    def check() -> None:
        if noted.is_set():
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
