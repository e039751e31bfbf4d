"""Where captured steps are replayed: a main stream, and beside it a stream that copies the next batch.

Apart from the steps themselves, so that the order of what both streams are given can be tested without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

Result = TypeVar("Result")


class Replays(Protocol):
    """Captures steps, or parts of them, replays them one after the other on the main stream, and copies beside them."""

    def copy(self, work: Callable[[], None], after: Iterable[Any]) -> None:
        """Runs ``work`` on the copy stream; what the main stream is given from now on runs after it.

        Args:
            work: launches copies, and allocates nothing.
            after: events that it waits for; None among them: all that the main stream was given so far.
        """
        ...

    def on_main(self, work: Callable[[], None]) -> None:
        """Gives ``work``, which launches copies, to the main stream."""
        ...

    def mark(self) -> Any:
        """An event after all that the main stream was given so far."""
        ...

    def capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Captures what ``work`` launches, and runs nothing.

        Returns:
            What gives it to the main stream, and what ``work`` returned. Intermediates of all captures lie in the same
            memory: outputs of a replay are valid until the next replay of any capture.
        """
        ...

    def forget(self) -> None:
        """Captures from now on share no memory with those before."""
        ...


class CudaReplays:
    """CUDA graphs and streams. The main stream is the one that is current at each call."""

    def __init__(self, device: torch.device) -> None:
        """Makes the streams."""
        self._device = device
        self._capturing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default stream cannot capture
        # Before the kernels of the step beside it: the next step cannot start without these few copies.
        self._copying = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def copy(self, work: Callable[[], None], after: Iterable[torch.cuda.Event | None]) -> None:
        """See :meth:`Replays.copy`. The host does not wait."""
        main = torch.cuda.current_stream(self._device)
        for event in after:
            if event is None:
                self._copying.wait_stream(main)
            else:
                self._copying.wait_event(event)
        with torch.cuda.stream(self._copying):
            work()
        self._copied.record(self._copying)
        main.wait_event(self._copied)

    def on_main(self, work: Callable[[], None]) -> None:
        """See :meth:`Replays.on_main`."""
        work()

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Replays.mark`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """See :meth:`Replays.capture`. Synchronises the host."""
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # thread_local: the loader's threads go on to use the device's allocator meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        return graph.replay, result

    def forget(self) -> None:
        """See :meth:`Replays.forget`; memory is free once the captures are dropped."""
        self._pool = None

    def release(self) -> None:
        """See :class:`erase_rec.distributed.world.Captures`."""
        for graph in list(self._graphs):
            graph.reset()
