"""The order of rows in an epoch, and which rows are held out: functions of the seed alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data.features.encoding import BoolArray, IntArray


def epoch_order(num_rows: int, *, seed: int, epoch: int) -> IntArray:
    """Permutation of 0 .. ``num_rows`` - 1, int64: another for each seed and for each epoch."""
    return np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(num_rows)


def held_out(first_row: int, num_rows: int, *, seed: int, fraction: float) -> BoolArray:
    """Whether each of ``num_rows`` rows from ``first_row`` on is held out, bool [num_rows].

    A row's fate depends on its number and the seed only, not on how many rows there are or how they are cut into
    blocks. About ``fraction`` of the rows are held out.
    """
    start = _mixed(np.array([seed], dtype=np.uint64))
    numbers = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
    # 53 bits: the share of a float64 in [0, 1).
    return (_mixed(start + numbers) >> np.uint64(11)) * 2.0**-53 < fraction


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), on a Weyl sequence; wraps around like it."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
