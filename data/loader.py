"""Deterministic batches of a block store, on each rank its own share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from data.ahead import in_order
from data.block import BlockStore
from data.features.bags import ragged_positions
from data.features.encoding import IntArray
from data.gather import Picked, gather, join
from data.shuffle import Window, windows
from erase_rec.batch import Batch

THREAD_NAME = "loader"
_SPARE_WINDOWS = 1
"""Made besides those that the threads are at: else every window that takes longer than others is waited for."""


class Loader:
    """Implements :class:`erase_rec.protocols.BatchLoader` over a block store.

    An epoch is an order of all rows (see :mod:`data.shuffle`) that depends on seed and epoch alone. A step takes the
    next ``local_batch_size * world_size`` rows of it; rank r takes the r-th part of them. The last step has what is
    left, cut as evenly as can be: every row once an epoch, and as many steps on every rank, though with fewer rows left
    than ranks a rank's last batch is empty. Or it is cut into ``equal`` parts, as training needs, where a mean over
    ranks is to be the mean over rows: the few rows over are dropped. As the order knows nothing of batches and ranks,
    an epoch can go on at any row with another number of ranks.

    With ``workers`` = n, while the batches of a window are handed out, the next n + 1 windows are made in n threads. So
    n + 3 windows of rows are in memory at most: one more whose last batches are still in use.

    Attributes:
        num_rows: rows over all ranks.
        global_batch_size: rows of a full step over all ranks.
        base_rate: share of positive labels over all ranks; nan without rows.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        local_batch_size: int,
        shuffle_seed: int | None = None,
        window_rows: int = 262_144,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        equal: bool = False,
        pin: bool = False,
    ) -> None:
        """Reads nothing yet.

        Args:
            store: all rows of the split.
            local_batch_size: rows a batch on this rank.
            shuffle_seed: each epoch in an order of its own; None: every epoch in the order of the store.
            window_rows: rows that are shuffled among each other, at least.
            workers: threads that make batches ahead; the batches do not depend on it. 0: none.
            rank: this process's rank.
            world_size: number of ranks.
            equal: give every rank as many rows in the last step, too.
            pin: put batches into page-locked memory; needs CUDA.
        """
        assert 0 <= rank < world_size
        self.store = store
        self._starts = np.concatenate([[0], np.cumsum(store.block_rows)])
        self._shuffle_seed, self._workers, self._pin = shuffle_seed, workers, pin
        self._rank, self._world_size, self._equal = rank, world_size, equal
        self.num_rows = int(self._starts[-1])
        self.global_batch_size = local_batch_size * world_size
        # In file order larger windows would only take memory.
        self._window_rows = self.global_batch_size if shuffle_seed is None else window_rows
        self.base_rate = store.num_positive / self.num_rows if self.num_rows else float("nan")

    def dropped_rows(self, start_row: int = 0) -> int:
        """Rows that no rank takes in an epoch that goes on at ``start_row``; fewer than ranks."""
        return (self.num_rows - start_row) % self.global_batch_size % self._world_size if self._equal else 0

    def steps_left(self, start_row: int = 0) -> int:
        """Batches on each rank from ``start_row`` to the end of an epoch; the last may be short."""
        return -(-(self.num_rows - start_row - self.dropped_rows(start_row)) // self.global_batch_size)

    def batches(self, epoch: int, start_row: int = 0, *, endless: bool = False) -> Iterator[Batch]:
        """This rank's batches. An abandoned iterator stops its threads when closed.

        Args:
            epoch: from 0.
            start_row: rows of the epoch's order, over all ranks, that were handed out before.
            endless: all later epochs follow, without a gap.
        """
        shares = self._shares(epoch, start_row, endless)
        begun: list[Batch] = []
        for parts, finished in in_order(self._make, shares, self._workers, THREAD_NAME, spare=_SPARE_WINDOWS):
            for number, part in enumerate(parts, start=1):
                begun.append(part)
                if number < len(parts) or finished:
                    yield part if len(begun) == 1 else join(begun, pin=self._pin)
                    begun = []

    def locate(self, row_ids: Tensor) -> list[str]:
        """``file:line`` (or ``file row n``) of each row id. Reads their blocks."""
        blocks = np.searchsorted(self._starts, row_ids.numpy(), side="right") - 1
        rows = row_ids.numpy() - self._starts[blocks]
        found = {block: self.store.read(block).rows for block in set(blocks.tolist())}
        return [found[block].place(row) for block, row in zip(blocks.tolist(), rows.tolist(), strict=True)]

    def _shares(self, epoch: int, start_row: int, endless: bool) -> Iterator[_Share]:
        """What this rank takes of each window."""
        assert self.num_rows or not endless
        for number in itertools.count(epoch) if endless else (epoch,):
            stop = self.num_rows - self.dropped_rows(start_row)
            for window in windows(self.store.block_rows, self._window_rows, seed=self._shuffle_seed, epoch=number):
                if max(window.start, start_row) < min(window.stop, stop):
                    yield self._share(window, start_row, stop)
            start_row = 0

    def _share(self, window: Window, start_row: int, stop_row: int) -> _Share:
        """This rank's rows of ``window``, where the epoch's steps go from ``start_row`` to ``stop_row``."""
        size = self.global_batch_size
        low, high = max(window.start, start_row), min(window.stop, stop_row)
        begin = np.arange(low - (low - start_row) % size, high, size)  # of the steps that have rows in the window
        rows = np.minimum(begin + size, stop_row) - begin
        start, stop = (begin + rows * rank // self._world_size for rank in (self._rank, self._rank + 1))
        start, stop = (np.clip(bound, low, high) - window.start for bound in (start, stop))
        return _Share(window, start, stop - start, finished=int(begin[-1] + rows[-1]) <= high)

    def _make(self, share: _Share) -> tuple[list[Batch], bool]:
        """The batches of a share, and whether the last is whole."""
        window = share.window
        # In file order: a part of a Parquet row group is decoded from where the part before it ended.
        read = {block: self.store.read(block) for block in sorted(window.blocks.tolist())}
        blocks = [read[block] for block in window.blocks.tolist()]
        rows = ragged_positions(share.starts, share.sizes)
        order = window.order()
        rows = rows if order is None else order[rows]
        row_ids = ragged_positions(self._starts[window.blocks], self.store.block_rows[window.blocks])[rows]
        return gather(Picked(blocks, rows, share.sizes.tolist(), self._pin), row_ids), share.finished


@dataclass(frozen=True)
class _Share:
    """A rank's rows of a window.

    Attributes:
        window: what they are part of.
        starts: int64 [steps], where in the window's order the rank's rows of each step begin.
        sizes: int64 [steps], how many they are; 0 where they are all in another window, or there are none.
        finished: whether no window that follows has rows of the last of these steps.
    """

    window: Window
    starts: IntArray
    sizes: IntArray
    finished: bool
