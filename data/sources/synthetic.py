"""A Criteo-shaped click log made up on the fly, whose irreducible NE is known.

Rows come block by block from (seed, split, block): any number of rows needs the memory of one block, any process can
make any block, and a longer log starts with the rows of a shorter one. Train and eval rows differ; the teacher, the
categories and their popularity are fixed by ``teacher_seed`` alone.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.bad_rows import BadRows
from data.sources.source import Block, Chunk, InputFile, Split, consecutive, positions_of
from data.sources.teacher import CALIBRATION_ROWS, IntArray, Rows, Teacher
from erase_rec.config.schema import Fraction, NonNegativeInt, NonNegativeNumber, PositiveInt, PositiveNumber
from erase_rec.config.types import Params

BLOCK_ROWS = 16384
_POPULARITY_STEPS = 1 << 16
_SMALLEST_FEATURE = 4
_CELL_BYTES = 8
_STREAMS = {"teacher": 0, "calibration": 1, "train": 2, "eval": 3}
_LAYOUT = 1
"""To be raised when the same configuration gives other rows."""


class SyntheticSource:
    """Rows with the columns ``label``, ``I1`` .. (int64), ``C1`` .. (dictionary of text); nulls where missing."""

    class Config(Params):
        """Size and difficulty of the log."""

        rows: PositiveInt = 300_000
        """Training rows."""
        eval_rows: NonNegativeInt = 50_000
        dense: PositiveInt = 13
        sparse: PositiveInt = 26
        max_categories: PositiveInt = 400
        """Categories of the largest sparse feature; the others' shrink geometrically to 4."""
        popularity_exponent: NonNegativeNumber = 1.2
        """Category of rank r is drawn in proportion to (r + 1) ** -exponent (Zipf)."""
        missing_share: Fraction = 0.1
        """Mean share of missing cells; it differs from column to column."""
        base_rate: Fraction = 0.25
        """Share of clicks."""
        teacher_scale: PositiveNumber = 1.5
        """Standard deviation of the teacher's logit: the larger, the lower the irreducible NE."""
        teacher_seed: NonNegativeInt = 0

    label_column: str | None = "label"

    def __init__(self, config: Config, paths: Sequence[str] = (), *, seed: int, split: Split) -> None:
        """There are no files."""
        self._config, self._seed, self._split = config, seed, split
        self._num_rows = config.rows if split == "train" else config.eval_rows

    def columns(self) -> list[str]:
        """``label``, the dense columns, the sparse columns."""
        return _columns(self._config)

    def inputs(self) -> list[InputFile]:
        """None."""
        return []

    def num_bytes(self) -> int:
        """Eight for each cell."""
        return self._num_rows * len(self.columns()) * _CELL_BYTES

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of ``BLOCK_ROWS``, of which only the last may have fewer."""
        return self._chunks()

    def fingerprint(self) -> str:
        """Identity of the rows: hash of what they are made from."""
        made_from = (self._config.model_dump_json(), self._seed, self._split, self._num_rows, _LAYOUT)
        return hashlib.sha256(repr(made_from).encode()).hexdigest()

    def bayes_ne(self) -> float:
        """NE of the teacher's own probabilities on this split's rows: on many rows no model does better.

        Makes the rows once. nan when only one class is there.
        """
        cross_entropy, clicks, count = 0.0, 0, 0
        for chunk in self._chunks():
            made = chunk.make()
            clicked = _log_of(self._config).teacher.probabilities(made.rows)
            cross_entropy -= float(np.log(np.where(made.label == 1, clicked, 1 - clicked)).sum())
            clicks, count = clicks + int(made.label.sum()), count + len(made.label)
        if clicks in (0, count):
            return math.nan
        rate = clicks / count
        return cross_entropy / count / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))

    def _chunks(self) -> Iterator[_SyntheticChunk]:
        for start in range(0, self._num_rows, BLOCK_ROWS):
            yield _SyntheticChunk(self._config, self._seed, self._split, start, min(BLOCK_ROWS, self._num_rows - start))


@dataclass(frozen=True)
class _Made:
    """B rows.

    Attributes:
        rows: what the teacher reads.
        counts: int64 [J, B], the dense values that the log shows.
        label: int8 [B].
    """

    rows: Rows
    counts: IntArray
    label: npt.NDArray[np.int8]


@dataclass(frozen=True)
class _SyntheticChunk:
    """Rows ``first_row`` to ``first_row + num_rows`` - 1; ``first_row`` is a multiple of ``BLOCK_ROWS``."""

    config: SyntheticSource.Config
    seed: int
    split: Split
    first_row: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Eight for each cell."""
        return self.num_rows * len(_columns(self.config)) * _CELL_BYTES

    @property
    def rereadable(self) -> bool:
        """Always."""
        return True

    def blocks(self, columns: Sequence[str], bad: BadRows) -> Iterator[Block]:
        """The rows in one block; none of them is bad."""
        file = f"synthetic {self.split} rows"
        positions = positions_of(columns, _columns(self.config), file)
        made = self.make()
        arrays = [_log_of(self.config).array(position, made) for position in positions]
        table = pa.table(arrays, names=list(columns))
        yield consecutive(table, file=file, file_index=0, unit="row", first_row=self.first_row)

    def make(self) -> _Made:
        """Draws a whole block, whatever part of it is wanted."""
        log = _log_of(self.config)
        rng = np.random.default_rng([self.seed, _STREAMS[self.split], self.first_row // BLOCK_ROWS])
        rows, counts = log.draw(rng, BLOCK_ROWS)
        label = (rng.random(BLOCK_ROWS) < log.teacher.probabilities(rows)).astype(np.int8)
        keep = slice(self.num_rows)
        return _Made(
            Rows(rows.dense[:, keep], rows.dense_missing[:, keep], rows.categories[:, keep]),
            counts[:, keep],
            label[keep],
        )


class _Log:
    """What all rows of a configuration have in common: the columns' distributions and the teacher."""

    def __init__(self, config: SyntheticSource.Config) -> None:
        self._config = config
        rng = np.random.default_rng([config.teacher_seed, _STREAMS["teacher"]])
        self._dense_mean = rng.uniform(0.5, 4.0, size=(config.dense, 1))
        self._dense_deviation = rng.uniform(0.5, 1.5, size=(config.dense, 1))
        self._missing = rng.uniform(0, 2 * config.missing_share, size=(config.dense + config.sparse, 1))
        self._num_categories = _category_counts(config)
        self._draws = [_popularity(count, config.popularity_exponent) for count in self._num_categories]
        self._names = [_hashes(rng, count) for count in self._num_categories]
        self.teacher = Teacher(rng, config.dense, self._num_categories, config.teacher_scale, config.base_rate)
        calibration = np.random.default_rng([config.teacher_seed, _STREAMS["calibration"]])
        self.teacher.calibrate(self.draw(calibration, CALIBRATION_ROWS)[0])

    def draw(self, rng: np.random.Generator, num_rows: int) -> tuple[Rows, IntArray]:
        """Draws rows: what the teacher reads, and the dense counts that the log shows."""
        num_dense = self._config.dense
        missing = rng.random((len(self._missing), num_rows), dtype=np.float32) < self._missing
        latent = self._dense_mean + self._dense_deviation * rng.standard_normal((num_dense, num_rows), dtype=np.float32)
        counts = np.expm1(np.maximum(latent, 0)).astype(np.int64)
        dense = (np.log1p(counts) - self._dense_mean) / self._dense_deviation
        draws = rng.integers(_POPULARITY_STEPS, size=(self._config.sparse, num_rows), dtype=np.uint16)
        categories = np.empty(draws.shape, dtype=np.int64)
        for feature, (popularity, count) in enumerate(zip(self._draws, self._num_categories, strict=True)):
            categories[feature] = np.where(missing[num_dense + feature], count, popularity[draws[feature]])
        return Rows(np.where(missing[:num_dense], 0.0, dense), missing[:num_dense], categories), counts

    def array(self, position: int, made: _Made) -> pa.Array:
        """The Arrow column at ``position`` of the source's columns."""
        if position == 0:
            return pa.array(made.label)
        if position <= self._config.dense:
            return pa.array(made.counts[position - 1], mask=made.rows.dense_missing[position - 1])
        feature = position - 1 - self._config.dense
        codes = made.rows.categories[feature].astype(np.int32)
        indices = pa.array(codes, mask=codes == self._num_categories[feature])
        return pa.DictionaryArray.from_arrays(indices, self._names[feature])


@functools.lru_cache(maxsize=2)
def _log_of(config: SyntheticSource.Config) -> _Log:
    """Drawn and calibrated once a process, not once a chunk."""
    return _Log(config)


def _columns(config: SyntheticSource.Config) -> list[str]:
    dense = [f"I{index + 1}" for index in range(config.dense)]
    return ["label", *dense, *(f"C{index + 1}" for index in range(config.sparse))]


def _category_counts(config: SyntheticSource.Config) -> list[int]:
    """Categories of each sparse feature, falling geometrically from the largest."""
    smallest = min(_SMALLEST_FEATURE, config.max_categories)
    return [round(count) for count in np.geomspace(config.max_categories, smallest, config.sparse)]


def _popularity(count: int, exponent: float) -> npt.NDArray[np.int64]:
    """Category of each of ``_POPULARITY_STEPS`` equally likely draws: a table look-up samples the distribution."""
    weights = (np.arange(count) + 1.0) ** -exponent
    edges = np.cumsum(weights) / weights.sum()
    return np.searchsorted(edges, (np.arange(_POPULARITY_STEPS) + 0.5) / _POPULARITY_STEPS).astype(np.int64)


def _hashes(rng: np.random.Generator, count: int) -> pa.Array:
    """``count`` different texts of eight hexadecimal digits."""
    return pa.array([f"{number:08x}" for number in rng.choice(1 << 32, size=count, replace=False)])
