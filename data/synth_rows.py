"""Rows of a made-up log in Criteo's shape, in any number: the rows behind ``erase-rec synth``.

Cardinalities and missing shares are those of Criteo's Kaggle log, column by column, with the five largest cardinalities
cut to a million. Categories are drawn by a power law, so most of a large feature's are rare; I2 goes down to -2; a
hidden teacher (see :mod:`data.sources.teacher`) decides the clicks. A block of rows depends on (seed, split, its index)
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from data.sources.source import Split
from data.sources.teacher import CALIBRATION_ROWS, INTERACTING, Rows, Teacher

BLOCK_ROWS = 65536
LAYOUT = 1
"""To be raised when the same seed gives other rows."""

MILLION = 1_000_000
NUM_CATEGORIES = (
    *(1460, 583, MILLION, MILLION, 305, 24, 12517, 633, 4, 93145, 5683, MILLION, 3194),
    *(27, 14992, MILLION, 10, 5652, 2173, 4, MILLION, 18, 15, 286181, 105, 142572),
)
"""C1 to C26."""
DENSE_MISSING = (0.45, 0.0, 0.21, 0.22, 0.03, 0.22, 0.04, 0.0005, 0.04, 0.45, 0.04, 0.77, 0.22)
SPARSE_MISSING = (
    *(0.0, 0.0, 0.034, 0.034, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0),
    *(0.0, 0.0, 0.034, 0.0, 0.0, 0.44, 0.44, 0.034, 0.76, 0.0, 0.034, 0.44, 0.44),
)
DENSE = tuple(f"I{index}" for index in range(1, 14))
SPARSE = tuple(f"C{index}" for index in range(1, 27))

DENSE_MEAN = (0.9, 2.6, 2.2, 1.6, 6.5, 3.6, 1.6, 2.2, 3.7, 0.4, 0.9, 0.3, 1.7)
DENSE_DEVIATION = (1.1, 1.9, 1.3, 1.0, 3.0, 1.8, 1.5, 1.1, 1.6, 0.5, 0.9, 0.9, 1.1)
"""Of log(1 + count), before counts below 0 become 0."""
LEAST = (0, -2, *(0,) * 11)
"""Smallest value of each dense column."""

POPULARITY_EXPONENT = 1.1
"""Category of rank r is drawn in proportion to (r + 1) ** -exponent."""
BASE_RATE = 0.25
TEACHER_SCALE = 1.5
"""Standard deviation of the teacher's logit."""

_STEPS = 1 << 16
_STREAMS = {"teacher": 0, "calibration": 1, "train": 2, "eval": 3}


@dataclass(frozen=True)
class SynthBlock:
    """B rows; columns first.

    Attributes:
        label: bool [B].
        positions: uint16 [13, B], into the tables of :class:`Synth`; where missing, of no meaning.
        dense_missing: bool [13, B].
        names: uint32 [26, B], hashes that the log shows as eight hexadecimal digits; where missing, of no meaning.
        sparse_missing: bool [26, B].
        cross_entropy: of the labels under the teacher's own probabilities, summed, nats.
    """

    label: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.uint16]
    dense_missing: npt.NDArray[np.bool_]
    names: npt.NDArray[np.uint32]
    sparse_missing: npt.NDArray[np.bool_]
    cross_entropy: float


@dataclass(frozen=True)
class _Popularity:
    """Draws a rank from 32 random bits with integers alone: 16 choose a stretch of equal probability, 16 a place in it.

    Tables of 32 bits stay in the cache: with 64 the look-ups take three times as long.
    """

    first: npt.NDArray[np.uint32]
    width: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, count: int) -> _Popularity:
        edges = np.cumsum((np.arange(count) + 1.0) ** -POPULARITY_EXPONENT)
        bounds = np.searchsorted(edges, np.arange(_STEPS + 1) / _STEPS * edges[-1])
        first, last = np.minimum(bounds[:-1], count - 1), np.minimum(bounds[1:], count - 1)
        width = last - first + 1
        assert width.max() <= _STEPS, "the product below must fit 32 bits"
        return cls(first.astype(np.uint32), width.astype(np.uint32))

    def rank(self, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        stretch = (bits >> np.uint32(16)).astype(np.intp)
        rank = bits & np.uint32(0xFFFF)
        rank *= self.width[stretch]
        rank >>= np.uint32(16)
        rank += self.first[stretch]
        return rank


class Synth:
    """The log of a seed: its columns' distributions, its teacher and its rows.

    Attributes:
        values: int64 [13, 65536], a dense column's values: what a :class:`SynthBlock` position stands for.
    """

    def __init__(self, seed: int) -> None:
        """Draws the teacher: half a second and about 150 MB, most of it for the large features."""
        self._seed = seed
        rng = np.random.default_rng([seed, _STREAMS["teacher"]])
        normal = NormalDist()
        quantiles = np.array([normal.inv_cdf((step + 0.5) / _STEPS) for step in range(_STEPS)])
        self.values, self._standardized = _dense_tables(quantiles)
        self._popularity = [_Popularity.of(count) for count in NUM_CATEGORIES]
        self._salts = rng.integers(1 << 32, size=len(NUM_CATEGORIES), dtype=np.uint32)
        self._missing = np.rint(np.array(DENSE_MISSING + SPARSE_MISSING) * _STEPS).astype(np.uint16)[:, None]
        self._teacher_order = _teacher_order()
        counts = [NUM_CATEGORIES[feature] for feature in self._teacher_order]
        self._teacher = Teacher(rng, len(DENSE), counts, TEACHER_SCALE, BASE_RATE)
        draw = self._draw(np.random.default_rng([seed, _STREAMS["calibration"]]), CALIBRATION_ROWS)
        self._teacher.calibrate(self._seen(*draw))

    def block(self, split: Split, index: int, num_rows: int = BLOCK_ROWS) -> SynthBlock:
        """The first ``num_rows`` rows of block ``index``."""
        rng = np.random.default_rng([self._seed, _STREAMS[split], index])
        positions, ranks, missing = self._draw(rng, BLOCK_ROWS)
        clicked = self._teacher.probabilities(self._seen(positions, ranks, missing))[:num_rows]
        label = rng.random(BLOCK_ROWS)[:num_rows] < clicked
        return SynthBlock(
            label,
            positions[:, :num_rows],
            missing[: len(DENSE), :num_rows],
            _mixed(ranks[:, :num_rows] + self._salts[:, None]),
            missing[len(DENSE) :, :num_rows],
            -float(np.log(np.where(label, clicked, 1 - clicked)).sum()),
        )

    def _draw(
        self, rng: np.random.Generator, num_rows: int
    ) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Positions [13, B], category ranks [26, B] and missing cells [39, B]."""
        missing = rng.integers(_STEPS, size=(len(self._missing), num_rows), dtype=np.uint16) < self._missing
        positions = rng.integers(_STEPS, size=(len(DENSE), num_rows), dtype=np.uint16)
        ranks = np.empty((len(SPARSE), num_rows), dtype=np.uint32)
        for feature, popularity in enumerate(self._popularity):
            ranks[feature] = popularity.rank(rng.integers(1 << 32, size=num_rows, dtype=np.uint32))
        return positions, ranks, missing

    def _seen(
        self, positions: npt.NDArray[np.uint16], ranks: npt.NDArray[np.uint32], missing: npt.NDArray[np.bool_]
    ) -> Rows:
        """What the teacher reads of drawn rows."""
        dense_missing = missing[: len(DENSE)]
        dense = np.stack([table[column] for table, column in zip(self._standardized, positions, strict=True)])
        dense[dense_missing] = 0.0
        categories = np.empty(ranks.shape, dtype=np.int64)
        for slot, feature in enumerate(self._teacher_order):
            categories[slot] = ranks[feature]
            categories[slot][missing[len(DENSE) + feature]] = NUM_CATEGORIES[feature]
        return Rows(dense, dense_missing, categories)


def bayes_ne(cross_entropy: float, clicks: int, rows: int) -> float | None:
    """Normalized entropy of the teacher's probabilities: on many rows no model does better.

    Args:
        cross_entropy: summed over the rows, nats.
        clicks: rows with label 1.
        rows: all of them.

    Returns:
        None unless both labels are there.
    """
    if clicks in (0, rows):
        return None
    rate = clicks / rows
    return cross_entropy / rows / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def _teacher_order() -> list[int]:
    """Features as the teacher takes them: those that interact are the smallest, whose pairs training rows can show."""
    by_size = sorted(range(len(SPARSE)), key=NUM_CATEGORIES.__getitem__)
    num_interacting = len(range(0, len(SPARSE), INTERACTING))
    interacting, others = iter(by_size[:num_interacting]), iter(by_size[num_interacting:])
    return [next(others if slot % INTERACTING else interacting) for slot in range(len(SPARSE))]


def _dense_tables(
    quantiles: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Value and standardized logarithm of each equally likely draw of the dense columns, both [13, 65536]."""
    mean, deviation = np.array(DENSE_MEAN)[:, None], np.array(DENSE_DEVIATION)[:, None]
    counts = np.floor(np.expm1(np.maximum(mean + deviation * quantiles, 0)))
    counts = np.minimum(counts, 10**8 - 1 - 2)  # eight digits
    return (counts + np.array(LEAST)[:, None]).astype(np.int64), (np.log1p(counts) - mean) / deviation


def _mixed(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finalizer (Appleby, 2011): one-to-one, so that categories of a feature differ."""
    numbers = numbers ^ (numbers >> np.uint32(16))
    numbers *= np.uint32(0x85EBCA6B)
    numbers ^= numbers >> np.uint32(13)
    numbers *= np.uint32(0xC2B2AE35)
    numbers ^= numbers >> np.uint32(16)
    return numbers
