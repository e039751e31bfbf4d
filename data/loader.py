"""Deterministic batches of an encoded table, on each rank its own share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.features.encoding import IntArray
from data.shuffle import epoch_order
from data.table import EncodedTable
from erase_rec.batch import Batch, SparseBatch


class Loader:
    """Implements :class:`erase_rec.protocols.BatchLoader` over rows of a table.

    Step s of an epoch takes the next ``local_batch_size * world_size`` rows of the epoch's order; rank r takes the r-th
    part of them. The last step has what is left, cut as evenly as can be: every row once an epoch, and as many steps
    on every rank, though with fewer rows left than ranks a rank's last batch is empty. Or it is cut into ``equal``
    parts, as training needs, where a mean over ranks is to be the mean over rows: the few rows over are dropped.

    Attributes:
        num_rows: rows over all ranks.
        dropped_rows: how many of them no rank takes in an epoch; fewer than ranks.
        global_batch_size: rows of a full step over all ranks.
        base_rate: share of positive labels over all ranks; nan without rows.
    """

    def __init__(
        self,
        table: EncodedTable,
        rows: IntArray,
        *,
        local_batch_size: int,
        shuffle_seed: int | None = None,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        equal: bool = False,
        pin: bool = False,
    ) -> None:
        """Makes no batch yet.

        Args:
            table: all rows there are.
            rows: int64 [num_rows], which rows of ``table``, in file order.
            local_batch_size: rows a batch on this rank.
            shuffle_seed: each epoch in an order of its own; None: every epoch in the order of ``rows``.
            workers: threads that assemble batches ahead; the batches do not depend on it. 0: none.
            rank: this process's rank.
            world_size: number of ranks.
            equal: give every rank as many rows in the last step, too.
            pin: put batches into page-locked memory; needs CUDA.
        """
        assert 0 <= rank < world_size
        self._table, self._rows = table, rows
        self._shuffle_seed, self._workers, self._pin = shuffle_seed, workers, pin
        self._rank, self._world_size = rank, world_size
        self.num_rows = len(rows)
        self.global_batch_size = local_batch_size * world_size
        self.dropped_rows = self.num_rows % self.global_batch_size % world_size if equal else 0
        self.base_rate = float(table.label[rows].mean()) if len(rows) else float("nan")

    def steps_per_epoch(self) -> int:
        """Batches an epoch on each rank; the last may be short."""
        return -(-(self.num_rows - self.dropped_rows) // self.global_batch_size)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``start_step`` on. An abandoned iterator stops its threads when closed."""
        order = self._rows
        if self._shuffle_seed is not None:
            order = order[epoch_order(self.num_rows, seed=self._shuffle_seed, epoch=epoch)]
        steps = iter(range(start_step, self.steps_per_epoch()))
        if self._workers == 0:
            for step in steps:
                yield self._assemble(order, step)
            return
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="loader")
        ahead: deque[Future[Batch]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(self._assemble, order, step))
                if len(ahead) > 2 * self._workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def locate(self, row_ids: Tensor) -> list[str]:
        """``file:line`` (or ``file row n``) of each row id."""
        return [self._table.locate(row) for row in row_ids.tolist()]

    def count_unseen(self) -> tuple[IntArray, IntArray]:
        """Unseen values and all values of each sparse feature over all ranks, int64 [F] each."""
        return self._table.count_unseen(self._rows)

    def _assemble(self, order: IntArray, step: int) -> Batch:
        end = min((step + 1) * self.global_batch_size, self.num_rows - self.dropped_rows)
        rows = order[step * self.global_batch_size : end]
        start, stop = (len(rows) * rank // self._world_size for rank in (self._rank, self._rank + 1))
        batch = gather(self._table, rows[start:stop])
        return batch.pin_memory() if self._pin else batch


def gather(table: EncodedTable, rows: IntArray) -> Batch:
    """The batch of ``rows`` [B] of ``table``."""
    return Batch(
        dense=torch.from_numpy(table.dense.take(rows, axis=0)),
        sparse=_gather_sparse(table, rows),
        label=torch.from_numpy(table.label[rows].astype(np.float32)),
        row_ids=torch.from_numpy(rows.copy()),
    )


def _gather_sparse(table: EncodedTable, rows: IntArray) -> SparseBatch:
    num_features, size = table.num_sparse, len(rows)
    ids = np.ascontiguousarray(table.ids.take(rows, axis=0).T, dtype=np.int64)  # [S, B]
    if not table.bags:
        lengths = torch.ones(num_features * size, dtype=torch.int32)
        return SparseBatch(torch.from_numpy(ids.reshape(-1)), lengths, None, num_features, single_valued=True)
    bags = {position: column.take(rows) for position, column in table.bags.items()}
    single = dict(zip(table.single_positions, ids, strict=True))
    values = [bags[position][0] if position in bags else single[position] for position in range(num_features)]
    lengths_FB = np.ones((num_features, size), dtype=np.int32)
    for position, (_, length, _) in bags.items():
        lengths_FB[position] = length
    weights = None
    if any(column.weights is not None for column in table.bags.values()):
        given = {position: weight for position, (_, _, weight) in bags.items() if weight is not None}
        ones = [np.ones(len(of_feature), dtype=np.float32) for of_feature in values]
        weights = torch.from_numpy(np.concatenate([given.get(at, ones[at]) for at in range(num_features)]))
    return SparseBatch(
        torch.from_numpy(np.concatenate(values, dtype=np.int64)),
        torch.from_numpy(lengths_FB.reshape(-1)),
        weights,
        num_features,
    )
