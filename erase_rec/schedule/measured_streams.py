"""Times the operations of a step, on their streams and on the threads that launch them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
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
        launch_ms: when the host began to launch it; of a replayed graph when it launched that, all at once.
        launched_ms: when the host had launched it; likewise.
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


@dataclass
class Measurement:
    """Marks of one step, or of a part of it; a replay sets those of its capture anew.

    Attributes:
        start: of the step.
        start_s: of the step, on the host's clock.
        marks: of its operations.
    """

    start: Any = None
    start_s: float = 0.0
    marks: list[_Marks] = field(default_factory=list)

    def then(self, captured: Measurement, launch_s: float) -> Measurement:
        """This part of a step, and one that was captured and is replayed after it.

        Args:
            captured: the marks of the capture.
            launch_s: when the host launches the replay.
        """
        marks = [replace(marks, launch_s=launch_s, launched_s=launch_s) for marks in captured.marks]
        if not self.marks:
            return Measurement(captured.start, launch_s, marks)
        return Measurement(self.start, self.start_s, [*self.marks, *marks])


class MeasuredStreams:
    """Streams whose operations are timed in the steps that ask for it; no host synchronisation until :meth:`intervals`.

    Attributes:
        measured: the last step that was measured.
    """

    def __init__(self, inner: Streams, device: torch.device) -> None:
        """Times ``inner``, whose work is on ``device``."""
        self.measured = Measurement()
        self._measuring = False
        self._inner = inner
        self._clock, self._host = clock_for(device), HostClock()
        self._lock = threading.Lock()

    def begin(self, *, measure: bool = False) -> None:
        """See :class:`erase_rec.schedule.streams.Streams`; a measured step takes the place of the one before."""
        self._inner.begin()
        self._measuring = measure
        if measure:
            self.measured = Measurement(self._clock.mark(), self._host.mark())

    def resume(self, measured: Measurement | None) -> None:
        """Goes on with a step on the current stream; ``measured``: so far, None where it is not measured."""
        self._inner.begin()
        self._measuring = measured is not None
        if measured is not None:
            self.measured = measured

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """See :class:`erase_rec.schedule.streams.Streams`."""
        with self._inner.run(op):
            if not self._measuring:
                yield
                return
            launch_s, start = self._host.mark(), self._clock.mark()
            yield
            end, launched_s = self._clock.mark(), self._host.mark()
        with self._lock:
            self.measured.marks.append(_Marks(op, threading.current_thread().name, start, end, launch_s, launched_s))

    def current(self, name: str) -> AbstractContextManager[None]:
        """See :class:`erase_rec.schedule.streams.Streams`."""
        return self._inner.current(name)

    def intervals(self) -> tuple[Interval, ...]:
        """The measured step's operations in launch order. Synchronises the host on CUDA."""
        step = self.measured
        found = [
            Interval(
                marks.op,
                marks.thread,
                start_ms=1e3 * self._clock.seconds(step.start, marks.start),
                end_ms=1e3 * self._clock.seconds(step.start, marks.end),
                launch_ms=1e3 * (marks.launch_s - step.start_s),
                launched_ms=1e3 * (marks.launched_s - step.start_s),
            )
            for marks in step.marks
        ]
        return tuple(sorted(found, key=lambda interval: interval.launch_ms))
