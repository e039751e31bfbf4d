"""Where a batch's way to the step runs ahead of the step: a stream of its own, or nowhere in particular (CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Crossing(Protocol):
    """What is made on one stream and used on another, such as a tensor or a KeyedJaggedTensor."""

    def record_stream(self, stream: Any) -> None:
        """Its memory is used again only after what ``stream`` was given by the time it is freed."""
        ...


class DataStream(Protocol):
    """Work on batches to come, in order among itself and beside the main stream's."""

    def run(self, after: Any) -> AbstractContextManager[None]:
        """Makes this stream current, after that event; None: after what the current stream was given so far."""
        ...

    def mark(self) -> Any:
        """An event after all that this stream was given; None where nothing has to wait."""
        ...

    def use(self, *made: Crossing) -> None:
        """The current stream goes on after all that this one was given, and uses what was made here."""
        ...


class InPlace:
    """Implements :class:`DataStream` where launch order is execution order: on the CPU, and on the current stream."""

    @contextmanager
    def run(self, after: Any) -> Iterator[None]:
        """Runs in place."""
        yield

    def mark(self) -> None:
        """Nothing has to wait."""

    def use(self, *made: Crossing) -> None:
        """Nothing to do."""


class CudaDataStream:
    """Implements :class:`DataStream` by a CUDA stream.

    It never waits for the main stream, unlike the stream of the copies (:mod:`erase_rec.prefetch`): the host waits for
    it in the middle of a step. So what it makes is kept from reuse by ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def run(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """See :class:`DataStream`."""
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """See :class:`DataStream`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def use(self, *made: Crossing) -> None:
        """See :class:`DataStream`."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in made:
            each.record_stream(current)


def make_data_stream(device: torch.device) -> DataStream:
    """A CUDA stream on a CUDA device, nothing elsewhere."""
    return CudaDataStream(device) if device.type == "cuda" else InPlace()
