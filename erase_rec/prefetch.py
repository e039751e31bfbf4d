"""Copies the next batch to the device while the step runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Protocol

import torch

from erase_rec.batch import Batch


class Copies(Protocol):
    """Copies batches to a device, in an order of its own."""

    def begin(self, batch: Batch) -> tuple[Batch, Any]:
        """Begins a copy that runs after all work that the main stream was given so far.

        Returns:
            The batch on the device, whose content is not there yet, and what :meth:`use` takes.
        """
        ...

    def use(self, copied: Any) -> None:
        """What the main stream is given from now on runs after that copy. The host does not wait."""
        ...


class CudaCopies:
    """Copies on a stream of its own, ordered by events.

    The batches lie in memory that the allocator keeps for the copy stream: freed by the host, it is used again only by
    a later copy, and that one waits for all that the main stream was given before it. So no copy overwrites a batch
    that a step may still read, and ``record_stream`` (which strands memory) is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """See :meth:`Copies.begin`. From page-locked memory, which stays reserved until the copy is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device, non_blocking=True)
        return moved, self._stream.record_event()

    def use(self, copied: torch.cuda.Event) -> None:
        """See :meth:`Copies.use`."""
        torch.cuda.current_stream(self._device).wait_event(copied)


def prefetch(
    batches: Iterator[Batch], device: torch.device, copies: Copies | None = None
) -> Generator[Batch, None, None]:
    """The batches on ``device``; on CUDA the next one is on its way while the caller works on this one.

    The copy of batch k + 1 begins when batch k is handed out, after the main stream's work up to there: the end of step
    k - 1. It runs beside step k, whose work is to be joined on the main stream before batch k + 1 is asked for. On the
    CPU batches pass through as they are.

    Args:
        batches: in host memory, pinned for CUDA; closed with this iterator.
        device: where they go.
        copies: who copies; None: what the device needs.
    """
    if copies is None and device.type == "cuda":
        copies = CudaCopies(device)
    try:
        if copies is None:
            yield from batches
            return
        following = _begun(batches, copies)
        while following is not None:
            batch, copied = following
            copies.use(copied)
            following = _begun(batches, copies)
            yield batch
    finally:
        batches.close()  # type: ignore[attr-defined]  # stops the loader's threads


def _begun(batches: Iterator[Batch], copies: Copies) -> tuple[Batch, Any] | None:
    batch = next(batches, None)
    return None if batch is None else copies.begin(batch)
