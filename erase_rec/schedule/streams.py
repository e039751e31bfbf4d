"""Where operations run: on CUDA streams, nowhere in particular (CPU), or in a log that tests read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from erase_rec.schedule.plan import MAIN, Op


class Streams(Protocol):
    """Runs operations on named streams."""

    def run(self, op: Op) -> AbstractContextManager[None]:
        """Makes ``op``'s stream current after the waits of ``op``; on exit records the event of its key."""
        ...


class NullStreams:
    """One in-order device, such as the CPU: launch order is execution order and nothing has to wait."""

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Runs in place."""
        yield


class CudaStreams:
    """CUDA streams and events, created once and reused in every step.

    ``main`` is the stream that is current when :meth:`run` is called. Tensors that cross streams stay referenced
    by the step until ``main`` has waited for every side stream; the next step's side streams wait for its
    lookup, which ``main`` launches after that. So no block is reused while a stream may still read it, and
    ``record_stream`` (which strands memory) is not needed.
    """

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        """Creates one stream a name on ``device``."""
        self._device = device
        self._side = {name: torch.cuda.Stream(device) for name in names}  # type: ignore[no-untyped-call]
        self._events: dict[str, torch.cuda.Event] = {}
        self._recorded_on: dict[str, str] = {}

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Waits on the device only; the host never blocks."""
        main = torch.cuda.current_stream(self._device)
        stream = main if op.stream == MAIN else self._side[op.stream]
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


class RecordingStreams:
    """Logs launches and waits; answers whether one operation is guaranteed to finish before another starts.

    The guarantee is that of CUDA streams: order within a stream, and events between streams. Nothing else, and
    in particular not the order in which the host launched work on different streams.
    """

    def __init__(self) -> None:
        self.launched: list[Op] = []
        self._before: dict[str, frozenset[str]] = {}

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        """Runs in place and logs ``op``; an operation seen again starts a new step's log."""
        if op.key in self._before:
            self.launched.clear()
            self._before.clear()
        predecessors: set[str] = set()
        same_stream = [earlier.key for earlier in self.launched if earlier.stream == op.stream]
        for key in (*same_stream[-1:], *op.waits):
            predecessors |= {key} | self._before[key]
        self._before[op.key] = frozenset(predecessors)
        self.launched.append(op)
        yield

    def happens_before(self, first: str, second: str) -> bool:
        """Whether the operation of key ``first`` must have finished when that of key ``second`` starts."""
        return first in self._before[second]


def make_streams(names: tuple[str, ...], device: torch.device) -> Streams:
    """CUDA streams on a CUDA device, null streams elsewhere."""
    return CudaStreams(names, device) if device.type == "cuda" else NullStreams()
