"""Intervals for paired comparisons: over seeds, over rows, and over both.

Two models that were scored on the same rows differ by far less than each differs from itself under another seed or on
other rows; so everything here works on paired differences. All intervals are two-sided at 95 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

FloatArray = npt.NDArray[np.float64]

LEVEL = 0.95
BOOTSTRAP_SAMPLES = 10_000
MOST_BLOCKS = 200
CHUNK = 1000


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; bounds are nan where the data do not allow one."""

    low: float
    mid: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside; false where there are no bounds."""
        return self.low > 0 or self.high < 0


def t_interval(values: FloatArray) -> Interval:
    """Mean of independent values [n] with Student's interval; exact for normal values. No bounds for n < 2."""
    mid = float(values.mean())
    if len(values) < 2:
        return Interval(math.nan, mid, math.nan)
    half = float(student.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return Interval(mid - half, mid, mid + half)


def studentized_bootstrap(values: FloatArray, *, seed: int = 0) -> Interval:
    """Mean of independent values [n], resampled, each draw over its own standard error.

    The percentile bootstrap is too narrow for a dozen values; this one is not (Efron and Tibshirani, An Introduction to
    the Bootstrap, 1993, section 12.5). No bounds for n < 2, and the mean alone where all values are equal.
    """
    mid = float(values.mean())
    if len(values) < 2:
        return Interval(math.nan, mid, math.nan)
    spread = float(values.std(ddof=1))
    if spread == 0:
        return Interval(mid, mid, mid)
    draws = np.random.default_rng(seed).choice(values, (BOOTSTRAP_SAMPLES, len(values)))
    spreads = draws.std(axis=1, ddof=1)
    pivots = (draws.mean(axis=1) - mid)[spreads > 0] / spreads[spreads > 0]
    low, high = np.quantile(pivots, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mid - float(high) * spread, mid, mid - float(low) * spread)


def block_sums(values: FloatArray, num_blocks: int = MOST_BLOCKS) -> FloatArray:
    """Sums over consecutive rows, [..., K] of values [..., n]; K is ``num_blocks``, or n where there are fewer rows.

    Rows of a click log depend on their neighbours (a user's next request), so they are resampled in blocks (Künsch,
    "The Jackknife and the Bootstrap for General Stationary Observations", 1989).
    """
    num_rows = values.shape[-1]
    num_blocks = min(num_blocks, num_rows)
    starts = np.arange(num_blocks) * num_rows // num_blocks
    return np.add.reduceat(values, starts, axis=-1)


def ratio_over_blocks(numerator: FloatArray, denominator: FloatArray, *, same_rows: bool, seed: int = 0) -> Interval:
    """Ratio of sums with its block bootstrap interval.

    A block's weight in a draw is Poisson distributed, which for a ratio stands for drawing as many blocks as there are
    (Chamandy, Muralidharan, Najmi and Naidu, "Estimating Uncertainty for Massive Data Streams", 2012).

    Args:
        numerator: block sums [S, K] of S pairs.
        denominator: those of the references, likewise.
        same_rows: block k is of the same rows in every pair, so it is drawn for all of them at once.
        seed: of the draws.
    """
    pairs, num_blocks = numerator.shape
    generator = np.random.default_rng(seed)
    ratios = np.empty(BOOTSTRAP_SAMPLES)
    if same_rows:
        numerator, denominator, pairs = numerator.sum(0, keepdims=True), denominator.sum(0, keepdims=True), 1
    for start in range(0, BOOTSTRAP_SAMPLES, CHUNK):  # bounds the memory of the weights
        top, bottom = np.zeros(CHUNK), np.zeros(CHUNK)
        for pair in range(pairs):
            weights = generator.poisson(1.0, size=(CHUNK, num_blocks)).astype(np.float64)
            top += weights @ numerator[pair]
            bottom += weights @ denominator[pair]
        ratios[start : start + CHUNK] = top / bottom
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(numerator.sum() / denominator.sum()), float(high))


def joined(first: Interval, second: Interval) -> Interval:
    """Interval of one estimate under two independent sources of chance: the half-widths add in squares."""
    mid = first.mid
    low = math.hypot(first.mid - first.low, second.mid - second.low)
    high = math.hypot(first.high - first.mid, second.high - second.mid)
    return Interval(mid - low, mid, mid + high)
