"""Times the operations of a step, on their streams and on the threads that launch them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from erase_rec.schedule.program import Op
from erase_rec.schedule.streams import Streams
from erase_rec.throughput import HostClock, clock_for


@dataclass(frozen=True)
class Interval:
    """One operation of a measured step; milliseconds from the step's start.

    Attributes:
        op: what ran.
        thread: name of the thread that launched it.
        start_ms: when its stream came to it: a device event on CUDA, the host's clock on the CPU.
        end_ms: when its stream was done with it; pauses between its kernels are included.
        launch_ms: when the host began to launch it.
        launched_ms: when the host had launched it.
    """

    op: Op
    thread: str
    start_ms: float
    end_ms: float
    launch_ms: float
    launched_ms: float

    @property
    def duration_ms(self) -> float:
        """Time on its stream."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class _Marks:
    op: Op
    thread: str
    start: Any
    end: Any
    launch_s: float
    launched_s: float


class MeasuredStreams:
    """Streams whose operations are timed. Keeps the last step; no host synchronisation until :meth:`intervals`.

    Attributes:
        measuring: false lets steps pass untimed.
    """

    def __init__(self, inner: Streams, device: torch.device) -> None:
        """Times ``inner``, whose work is on ``device``."""
        self.measuring = True
        self._inner = inner
        self._clock, self._host = clock_for(device), HostClock()
        self._lock = threading.Lock()
        self._marks: list[_Marks] = []
        self._start: Any = None
        self._start_s = 0.0

    def begin(self) -> None:
        """See :class:`erase_rec.schedule.streams.Streams`; forgets the step before."""
        self._inner.begin()
        self._marks = []
        self._start, self._start_s = (self._clock.mark() if self.measuring else None), self._host.mark()

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """See :class:`erase_rec.schedule.streams.Streams`."""
        with self._inner.run(op):
            if not self.measuring:
                yield
                return
            launch_s, start = self._host.mark(), self._clock.mark()
            yield
            end, launched_s = self._clock.mark(), self._host.mark()
        with self._lock:
            self._marks.append(_Marks(op, threading.current_thread().name, start, end, launch_s, launched_s))

    def current(self, name: str) -> AbstractContextManager[None]:
        """See :class:`erase_rec.schedule.streams.Streams`."""
        return self._inner.current(name)

    def intervals(self) -> tuple[Interval, ...]:
        """The last step's operations in launch order. Synchronises the host on CUDA."""
        found = [
            Interval(
                marks.op,
                marks.thread,
                start_ms=1e3 * self._clock.seconds(self._start, marks.start),
                end_ms=1e3 * self._clock.seconds(self._start, marks.end),
                launch_ms=1e3 * (marks.launch_s - self._start_s),
                launched_ms=1e3 * (marks.launched_s - self._start_s),
            )
            for marks in self._marks
        ]
        return tuple(sorted(found, key=lambda interval: interval.launch_ms))
