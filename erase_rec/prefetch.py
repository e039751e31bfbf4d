"""Copies the next batches to the device while the step runs.

The loader puts the tensors of many batches one after the other into common page-locked buffers. A copy takes a piece of
such a buffer, the following batches with it, so that at small batches the host does not spend on copies what a step
takes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from erase_rec.batch import Batch

PIECE_BYTES = 8 * 1024**2
"""Of a buffer that are copied at once."""


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
    that a step may still read, and ``record_stream`` (which strands memory) is not needed. That holds for a step that
    reads its batch on another stream too, as soon as the batch has arrived, if it makes the main stream wait for that
    before it returns: the host frees a batch after its step was issued, so that a later copy waits for that reader.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = Pieces(device)
        self._newest: torch.cuda.Event | None = None

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """See :meth:`Copies.begin`. From page-locked memory, which stays reserved until the copy is done."""
        if self._pieces.hold(batch):  # copies are done in order: after the newest, all pieces are there
            return replace(self._pieces.batch(batch), arrived=self._newest), None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._pieces.batch(batch).arriving(self._stream)
        self._newest = moved.arrived
        return moved, moved.arrived

    def use(self, copied: torch.cuda.Event | None) -> None:
        """See :meth:`Copies.use`."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


@dataclass(frozen=True)
class _Piece:
    """Bytes ``start`` to ``start + len(there)`` of the buffer ``here``, on the device."""

    here: torch.UntypedStorage
    start: int
    there: Tensor

    def holds(self, tensor: Tensor) -> bool:
        begin, end = _extent(tensor)
        same = tensor.untyped_storage().data_ptr() == self.here.data_ptr()
        return same and self.start <= begin and end <= self.start + self.there.numel()

    def view(self, tensor: Tensor) -> Tensor:
        begin, end = _extent(tensor)
        return self.there[begin - self.start : end - self.start].view(tensor.dtype).view(tensor.shape)


class Pieces:
    """The newest piece of each of a batch's buffers."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        """Pieces of ``piece_bytes``, or of what one tensor needs, go to ``device``."""
        self._device, self._piece_bytes = device, piece_bytes
        self._newest: dict[str, _Piece] = {}

    def hold(self, batch: Batch) -> bool:
        """Whether all of ``batch`` is on the device, or on its way."""
        return all(name in self._newest and self._newest[name].holds(part) for name, part in _parts(batch).items())

    def batch(self, batch: Batch) -> Batch:
        """``batch`` on the device; what is missing is copied on the current stream."""
        found = {name: self._on_device(name, part) for name, part in _parts(batch).items()}
        sparse = replace(batch.sparse, values=found["values"], lengths=found["lengths"], weights=found.get("weights"))
        return Batch(found["dense"], sparse, found["label"], batch.row_ids)

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        piece = self._newest.get(name)
        if piece is None or not piece.holds(tensor):
            piece = self._newest[name] = self._copied(tensor)
        return piece.view(tensor)

    def _copied(self, tensor: Tensor) -> _Piece:
        assert tensor.is_contiguous()
        here = tensor.untyped_storage()
        begin, end = _extent(tensor)
        end = min(here.nbytes(), max(end, begin + self._piece_bytes))
        every = torch.empty(0, dtype=torch.uint8).set_(here)
        there = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        there.copy_(every[begin:end], non_blocking=True)
        return _Piece(here, begin, there)


def _parts(batch: Batch) -> dict[str, Tensor]:
    sparse = batch.sparse
    parts = {"dense": batch.dense, "label": batch.label, "values": sparse.values, "lengths": sparse.lengths}
    return parts if sparse.weights is None else parts | {"weights": sparse.weights}


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a contiguous tensor in its buffer, and the one after its last."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + tensor.numel() * tensor.element_size()


def prefetch(
    batches: Iterator[Batch],
    device: torch.device,
    copies: Copies | None = None,
    *,
    expect: Callable[[Batch], None] | None = None,
    count: int | None = None,
) -> Generator[Batch, None, None]:
    """The batches on ``device``; on CUDA the next one is on its way while the caller works on this one.

    The copy of batch k + 1 begins when batch k is handed out, after the main stream's work up to there: the end of step
    k - 1. It runs beside step k, whose work is to be joined on the main stream before batch k + 1 is asked for. On the
    CPU batches pass through as they are.

    With ``expect`` copies are a batch further ahead, so that what step k does with batch k + 1 waits for no step: its
    copy has begun after step k - 2.

    Args:
        batches: in host memory, pinned for CUDA; closed with this iterator.
        device: where they go.
        copies: who copies; None: what the device needs.
        expect: is told of each batch but the first before the batch that precedes it is handed out; whoever is told may
            ask the host how many ids the batch has.
        count: of batches that are wanted at most; none after them is taken or told of.
    """
    if copies is None and device.type == "cuda":
        copies = CudaCopies(device)
    upcoming = itertools.islice(batches, count)
    ahead = (copies is not None) + (expect is not None)
    begun: deque[tuple[Batch, Any]] = deque()

    def begin(number: int) -> None:
        for batch in itertools.islice(upcoming, number):
            known = batch if expect is None else replace(batch, sparse=batch.sparse.counted())
            begun.append((known, None) if copies is None else copies.begin(known))

    try:
        begin(1)
        while begun:
            batch, copied = begun.popleft()
            if copies is not None:
                copies.use(copied)
            begin(ahead - len(begun))
            if expect is not None and begun:
                expect(begun[0][0])
            yield batch
            if not begun:
                begin(1)
    finally:
        batches.close()  # type: ignore[attr-defined]  # stops the loader's threads
