"""The order of rows in an epoch, and which rows are held out: functions of the seed alone.

An epoch draws the blocks of a split in random order, joins consecutive ones into windows of at least so many rows, and
permutes the rows inside each window. So two rows of one block are never further apart than a window, every row can be
next to rows of any other block, and a split that fits one window is permuted as a whole. What has to be known of the
data is the number of rows of each block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.features.encoding import BoolArray, IntArray


@dataclass(frozen=True)
class Window:
    """Consecutive rows of an epoch's order, out of whole blocks.

    Attributes:
        epoch: from 0.
        number: position among the epoch's windows.
        blocks: int64, positions in the store, in the order in which their rows are joined.
        start: position in the epoch's order of its first row.
        stop: position after its last.
        seed: of the order; None: file order.
    """

    epoch: int
    number: int
    blocks: IntArray
    start: int
    stop: int
    seed: int | None

    def order(self) -> IntArray | None:
        """Permutation of the joined rows, int64 [rows]; None: as they are."""
        if self.seed is None:
            return None
        return _permutation(self.stop - self.start, self.seed, self.epoch, 1 + self.number)


def windows(block_rows: IntArray, window_rows: int, *, seed: int | None, epoch: int) -> Iterator[Window]:
    """The windows of an epoch in order: each row is in exactly one.

    Args:
        block_rows: int64 [blocks], rows of each block of the store.
        window_rows: a window ends with the block that reaches so many rows; the last holds what is left.
        seed: another order for each seed and each epoch; None: blocks and rows in file order.
        epoch: from 0.
    """
    order = np.arange(len(block_rows)) if seed is None else _permutation(len(block_rows), seed, epoch)
    first = number = start = rows = 0
    for last, block in enumerate(order.tolist()):
        rows += int(block_rows[block])
        if rows >= window_rows or last == len(order) - 1:
            yield Window(epoch, number, order[first : last + 1], start, start + rows, seed)
            first, number, start, rows = last + 1, number + 1, start + rows, 0


def held_out(keys: IntArray, *, seed: int, fraction: float) -> BoolArray:
    """Whether the row of each key is held out, bool [n]; about ``fraction`` of them are.

    A row's fate depends on its key and the seed only, not on how many rows there are or how they are cut into blocks.
    """
    start = _mixed(np.array([seed], dtype=np.uint64))
    # 53 bits: the share of a float64 in [0, 1).
    return (_mixed(start + keys.astype(np.uint64)) >> np.uint64(11)) * 2.0**-53 < fraction


def sampled(keys: IntArray, *, seed: int, fraction: float) -> BoolArray:
    """Whether the row of each key is drawn, bool [n]; about ``fraction`` of them are, whether held out or not."""
    return held_out(keys, seed=int(_mixed(np.array([seed], dtype=np.uint64))[0]), fraction=fraction)


def _permutation(num: int, *key: int) -> IntArray:
    """Keys that differ only in zeros at their end are the same to NumPy."""
    return np.random.default_rng(np.random.SeedSequence(key)).permutation(num)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), on a Weyl sequence; wraps around like it."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
