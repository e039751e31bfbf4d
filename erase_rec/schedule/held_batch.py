"""What captured steps read: batches at fixed addresses, which each batch is copied into."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from erase_rec.batch import Batch, SparseBatch

DENSE_ALIGNMENT = 8
"""Dense columns come with zero columns up to a multiple of it, which towers would have to add by themselves."""


def aligned(batch: Batch) -> Batch:
    """``batch`` with as many dense columns as a capture of it has: what was compiled for one step fits the other."""
    missing = -batch.dense.shape[1] % DENSE_ALIGNMENT
    return replace(batch, dense=pad(batch.dense, (0, missing)), arrived=None) if missing else batch


class HeldBatch:
    """A batch at fixed addresses, or all but its ids and in their place what their lookup gave.

    Bags have room for more ids than they hold: what lies past the last bag changes nothing, as
    :class:`erase_rec.batch.SparseBatch` says.

    Attributes:
        batch: what a capture reads; without ids where ``pooled`` is there.
        pooled: [B, E], what a capture reads; None: it looks the ids up.
    """

    def __init__(self, like: Batch, room: int, pooled: Tensor | None) -> None:
        """Buffers for batches with as many rows as ``like``, and for ``room`` ids, or for lookups like ``pooled``."""
        rows, self._columns = like.dense.shape
        self.pooled = None if pooled is None else torch.empty_like(pooled, requires_grad=False)
        self.batch = Batch(
            like.dense.new_zeros(rows, self._columns + -self._columns % DENSE_ALIGNMENT),
            _room_for(like.sparse, room) if pooled is None else _no_ids(like.sparse),
            torch.empty_like(like.label),
            like.row_ids,
        )

    def takes(self, batch: Batch) -> bool:
        """Whether ``batch``, with as many rows, fits."""
        held, sparse = self.batch.sparse, batch.sparse
        if self.pooled is not None:
            return True
        if sparse.values.numel() > held.values.numel() or (sparse.weights is None) != (held.weights is None):
            return False
        return sparse.single_valued or not held.single_valued

    def fill(self, batch: Batch) -> None:
        """Copies ``batch``, on the current stream."""
        held, sparse = self.batch, batch.sparse
        held.dense[:, : self._columns].copy_(batch.dense)
        held.label.copy_(batch.label)
        if self.pooled is not None:
            return
        held.sparse.values[: sparse.values.numel()].copy_(sparse.values)
        if not held.sparse.single_valued:
            held.sparse.lengths.copy_(sparse.lengths)
        if held.sparse.weights is not None and sparse.weights is not None:
            held.sparse.weights[: sparse.weights.numel()].copy_(sparse.weights)

    def take(self, pooled: Tensor) -> None:
        """Copies what a lookup gave, on the current stream."""
        assert self.pooled is not None
        self.pooled.copy_(pooled.detach())


def _room_for(like: SparseBatch, room: int) -> SparseBatch:
    """Bags as many as those of ``like``, with room for ids."""
    weights = None if like.weights is None else like.weights.new_zeros(room)
    lengths = like.lengths.clone()
    return replace(like, values=like.values.new_zeros(room), lengths=lengths, weights=weights, counts=None)


def _no_ids(like: SparseBatch) -> SparseBatch:
    return replace(like, values=like.values.new_empty(0), lengths=like.lengths.new_empty(0), weights=None, counts=None)
