"""Where operations run: on CUDA streams, nowhere in particular (CPU), or in a log that tests read."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from erase_rec.schedule.plan import MAIN
from erase_rec.schedule.program import Op, guaranteed_order


class Streams(Protocol):
    """Runs operations on named streams, from any thread."""

    def begin(self, *, measure: bool = False) -> None:
        """Starts a step; the calling thread's current stream is ``main`` until the next.

        Args:
            measure: time its operations, where these streams can.
        """
        ...

    def run(self, op: Op) -> AbstractContextManager[None]:
        """Makes ``op``'s stream current after the waits of ``op``; on exit records the event of its key."""
        ...

    def current(self, name: str) -> AbstractContextManager[None]:
        """Makes the stream of that name current, without any wait or event."""
        ...


class NullStreams:
    """One in-order device, such as the CPU: launch order is execution order and nothing has to wait."""

    def begin(self, *, measure: bool = False) -> None:
        """Nothing to do."""

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Runs in place."""
        yield

    @contextmanager
    def current(self, name: str) -> Iterator[None]:
        """Runs in place."""
        yield


class CudaStreams:
    """CUDA streams and events, created once and reused in every step.

    Tensors that cross streams stay referenced by the step until ``main`` has waited for every side stream; the next
    step's side streams wait for its lookup, which ``main`` launches after that. So no block is reused while a stream
    may still read it, and ``record_stream`` (which strands memory) is not needed.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device, preferred: Collection[str] = ()) -> None:
        """Creates one stream a name on ``device``; kernels on those of ``preferred`` are started before others."""
        self._device = device
        self._main = torch.cuda.current_stream(device)
        self._side = {
            name: torch.cuda.Stream(device, priority=-1 if name in preferred else 0)  # type: ignore[no-untyped-call]
            for name in names
        }
        self._events: dict[str, torch.cuda.Event] = {}
        self._recorded_on: dict[str, str] = {}

    def begin(self, *, measure: bool = False) -> None:
        """The current stream of this thread is ``main``; a worker has another."""
        self._main = torch.cuda.current_stream(self._device)

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Waits on the device only; the host never blocks."""
        stream = self._stream(op.stream)
        for key in op.waits:
            if self._recorded_on[key] != op.stream:
                stream.wait_event(self._events[key])
        with torch.cuda.stream(stream):
            yield
        event = self._events.get(op.key)
        if event is None:
            event = self._events[op.key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._recorded_on[op.key] = op.stream

    @contextmanager
    def current(self, name: str) -> Iterator[None]:
        """On the stream of that name."""
        with torch.cuda.stream(self._stream(name)):
            yield

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._main if name == MAIN else self._side[name]


@dataclass(frozen=True)
class Launch:
    """An operation and the thread that launched it."""

    op: Op
    thread: str


class RecordingStreams:
    """Logs launches, refuses waits for what is not launched yet, and answers which order a program guarantees.

    Attributes:
        launched: of the running or last step, in the order in which threads came to launch.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        """Takes the program that will be run."""
        self.launched: list[Launch] = []
        self._before = guaranteed_order(ops)
        self._lock = threading.Lock()

    def begin(self, *, measure: bool = False) -> None:
        """Clears the log."""
        self.launched.clear()

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Runs in place and logs ``op``.

        Raises:
            RuntimeError: an operation that ``op`` waits for is not launched: on a device the wait would be void.
        """
        with self._lock:
            known = {launch.op.key for launch in self.launched}
            if missing := set(op.waits) - known:
                raise RuntimeError(f"{op.key} waits for {', '.join(sorted(missing))}, which nobody has launched")
        yield
        with self._lock:
            self.launched.append(Launch(op, threading.current_thread().name))

    @contextmanager
    def current(self, name: str) -> Iterator[None]:
        """Runs in place."""
        yield

    def happens_before(self, first: str, second: str) -> bool:
        """Whether the operation of key ``first`` must have finished when that of key ``second`` starts."""
        return first in self._before[second]


@contextmanager
def accumulators_elsewhere() -> Iterator[None]:
    """For a backward whose gradient accumulators are meant to be on other streams than its work; torch would warn."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def make_streams(names: tuple[str, ...], device: torch.device, preferred: Collection[str] = ()) -> Streams:
    """CUDA streams on a CUDA device, null streams elsewhere."""
    return CudaStreams(names, device, preferred) if device.type == "cuda" else NullStreams()
