"""Step times and what follows from them: rows a second (QPS) by percentile, and the share spent waiting for data."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

MOST_SPEEDS = 1 << 17
"""Steps whose speeds are kept for percentiles: 1 MiB."""
PERCENTILES = (10, 50, 90)


class Clock(Protocol):
    """Marks points of the program and tells the time between two of them."""

    def mark(self) -> Any:
        """A point in time, taken without waiting."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; may wait until the device reached ``end``."""
        ...


class HostClock:
    """The host's clock: right where the host runs the work itself."""

    def mark(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Their difference."""
        return end - start


class DeviceClock:
    """CUDA events on the stream that is current at the mark, which is to be the main stream at a step's end."""

    def mark(self) -> torch.cuda.Event:
        """An event recorded now; the host does not wait for it."""
        # Of a capture, a plain event would be a dependence and no point in time.
        external = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Device time between the events. Synchronises the host with ``end``."""
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


@dataclass(frozen=True)
class Throughput:
    """Speed over measured steps; nan where none was measured.

    Attributes:
        qps_p10: 10th percentile over steps of the step's global rows over its time (the slow end), rows a second.
        qps_p50: median.
        qps_p90: 90th percentile (the fast end).
        qps_mean: all rows over all time of these steps: the primary figure.
        steps: measured steps.
        step_ms: mean step time.
        data_wait_ms: mean time that a step waited for its batch, on the same clock. On CUDA the device stood still: a
            host that runs ahead of it asks for batches long before they are needed.
    """

    qps_p10: float
    qps_p50: float
    qps_p90: float
    qps_mean: float
    steps: int
    step_ms: float
    data_wait_ms: float

    @property
    def data_wait_share(self) -> float:
        """Waiting time over step time."""
        return self.data_wait_ms / self.step_ms

    def scalars(self) -> dict[str, float]:
        """Run log tags; empty when no step was measured."""
        if not self.steps:
            return {}
        return {
            "throughput/qps_p10": self.qps_p10,
            "throughput/qps_p50": self.qps_p50,
            "throughput/qps_p90": self.qps_p90,
            "throughput/qps_mean": self.qps_mean,
            "time/step_ms": self.step_ms,
            "time/data_wait_ms": self.data_wait_ms,
            "time/data_wait_share": self.data_wait_share,
        }


@dataclass(frozen=True)
class _Step:
    start: Any
    end: Any
    rows: int
    waits: list[tuple[Any, Any]]


_Measured = tuple[int, float, float]
"""Rows, seconds of the step, seconds of it waiting for data."""


class _Total:
    """Sums over steps, and speeds for percentiles: of every step at first, then of every second, fourth ... one.

    So a run takes the same memory however long it is.
    """

    def __init__(self) -> None:
        self._steps = self._rows = 0
        self._seconds = self._wait_s = 0.0
        self._speeds = array("d")
        self._stride = 1

    def add(self, rows: int, seconds: float, wait_s: float) -> None:
        if self._steps % self._stride == 0:
            self._speeds.append(rows / seconds)
            if len(self._speeds) == MOST_SPEEDS:
                self._speeds = self._speeds[::2]
                self._stride *= 2
        self._steps += 1
        self._rows += rows
        self._seconds += seconds
        self._wait_s += wait_s

    def throughput(self) -> Throughput:
        if not self._steps:
            return Throughput(*(math.nan,) * 4, steps=0, step_ms=math.nan, data_wait_ms=math.nan)
        p10, p50, p90 = np.percentile(np.array(self._speeds), PERCENTILES).tolist()
        return Throughput(
            qps_p10=p10,
            qps_p50=p50,
            qps_p90=p90,
            qps_mean=self._rows / self._seconds,
            steps=self._steps,
            step_ms=self._seconds / self._steps * 1e3,
            data_wait_ms=self._wait_s / self._steps * 1e3,
        )


class StepTimer:
    """Times consecutive steps, each from the end of the one before it to its own end.

    Nothing waits for the device until :meth:`window` or :meth:`total` asks for numbers. Before the first step and
    after a :meth:`pause` (evaluation, checkpoint) call :meth:`resume`.
    """

    def __init__(self, clock: Clock, warmup_steps: int = 0) -> None:
        """Starts paused.

        Args:
            clock: see :func:`clock_for`.
            warmup_steps: first steps of this process that no number includes.
        """
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._seen_steps = 0
        self._last_end: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._pending: list[_Step] = []
        self._window: list[_Measured] = []
        self._total = _Total()

    def resume(self) -> None:
        """The next step starts now."""
        self._last_end = self._clock.mark()
        self._waits = []

    def pause(self) -> None:
        """What follows belongs to no step, until :meth:`resume`."""
        self._last_end = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside counts as waiting for data: on CUDA once the device is done with what it was given."""
        start = self._clock.mark()
        try:
            yield
        finally:
            self._waits.append((start, self._clock.mark()))

    def step(self, rows: int) -> None:
        """Ends a step; call it on the main stream after the step's last launch.

        Args:
            rows: rows of this step over all ranks; a short last batch counts what it holds.
        """
        assert self._last_end is not None, "resume() comes before a step"
        end = self._clock.mark()
        self._seen_steps += 1
        if self._seen_steps > self._warmup_steps:
            self._pending.append(_Step(self._last_end, end, rows, self._waits))
        self._last_end, self._waits = end, []

    def window(self) -> Throughput:
        """Speed of the steps measured since the last call. Synchronises the host on CUDA."""
        self._resolve()
        window = _Total()
        for measured in self._window:
            window.add(*measured)
        self._window.clear()
        return window.throughput()

    def total(self) -> Throughput:
        """Speed of all steps; percentiles are of a sample once there are many. Synchronises the host on CUDA."""
        self._resolve()
        return self._total.throughput()

    def _resolve(self) -> None:
        for step in self._pending:
            wait_s = sum(self._clock.seconds(*wait) for wait in step.waits)
            measured = (step.rows, self._clock.seconds(step.start, step.end), wait_s)
            self._window.append(measured)
            self._total.add(*measured)
        self._pending.clear()


def clock_for(device: torch.device) -> Clock:
    """The clock that tells when work on ``device`` is done."""
    return DeviceClock() if device.type == "cuda" else HostClock()
