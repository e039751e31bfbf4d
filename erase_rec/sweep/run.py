"""Runs the points of a sweep, some at a time, until all have ended or the sweep is told to stop."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from erase_rec.sweep.process import Launch, Running, interrupt_all
from erase_rec.sweep.record import PointRecord, SweepRecord, has_finished

POLL_S = 0.1
GRACE_S = 40.0
"""Time that interrupted runs have to end by themselves; torchrun gives its ranks 30 s."""


class View(Protocol):
    """Is told of every change of a sweep."""

    def update(self, record: SweepRecord) -> None:
        """Shows ``record`` as it is now."""
        ...


@dataclass
class Stop:
    """Signals that told the sweep to stop, in the order of their coming."""

    signals: list[int] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.signals.append(number)


@contextmanager
def noted_signals() -> Iterator[Stop]:
    """Notes SIGINT and SIGTERM, instead of what they do, until the block ends."""
    stop = Stop()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_sweep(record: SweepRecord, launch: Launch, *, jobs: int, view: View, stop: Stop) -> None:
    """Runs what is not finished of ``record``; ``sweep.json`` says at all times how far it is.

    Failed points of an earlier call are tried again, after those that never ran.

    Args:
        record: as :meth:`SweepRecord.of` gives it; brought up to date in place.
        launch: its folder exists and is locked.
        jobs: runs at a time.
        view: is told of every change.
        stop: ends the runs when it has a signal; their points are pending again.
    """
    sweep = _Sweep(record, launch, view)
    sweep.save()
    try:
        sweep.run(jobs, stop)
    finally:
        sweep.end_all(stop)


class _Sweep:
    def __init__(self, record: SweepRecord, launch: Launch, view: View) -> None:
        self._record, self._launch, self._view = record, launch, view
        self._running: list[Running] = []

    def save(self) -> None:
        self._record.write(self._launch.folder)
        self._view.update(self._record)

    def run(self, jobs: int, stop: Stop) -> None:
        todo = sorted((p for p in self._record.points if p.status != "finished"), key=lambda p: p.status == "failed")
        waiting = deque(todo)
        while (waiting or self._running) and not stop.signals:
            while waiting and len(self._running) < jobs:
                self._start(waiting.popleft())
            self._collect()
            time.sleep(POLL_S)

    def end_all(self, stop: Stop) -> None:
        """Interrupts what is running, and kills what does not end; a second signal kills at once."""
        interrupt_all(self._running)
        deadline = time.monotonic() + GRACE_S
        while self._running:
            if time.monotonic() > deadline or len(stop.signals) > 1:
                for each in self._running:
                    each.kill()
            self._collect(interrupted=True)
            time.sleep(POLL_S)

    def _start(self, point: PointRecord) -> None:
        point.status, point.reason = "running", None
        self.save()
        self._running.append(Running.start(point, self._launch))

    def _collect(self, *, interrupted: bool = False) -> None:
        """Takes in the runs that have ended."""
        for each in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(each)
            point = each.point
            point.seconds = round((point.seconds or 0.0) + time.monotonic() - each.started_s, 3)
            finished = has_finished(self._launch.folder / point.folder)
            if finished and each.process.returncode == 0:
                point.status = "finished"
            elif interrupted:
                point.status = "pending"
            else:
                point.status, point.reason = "failed", each.reason()
            self.save()
