"""Rows read but not yet encoded, column by column: all that is kept of them between reading and encoding.

Reading yields them block by block (:mod:`data.features.read`); the blocks of a chunk are joined, its rows are split
into training and held-out ones, and then the training rows are fitted (:mod:`data.features.fit`) and all are encoded
(:mod:`data.features.fitted`). No column of the input is needed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.block import FloatArray as WeightArray
from data.block import RowArray, Rows
from data.features.cells import FloatArray, distinct_texts
from data.features.dense import count_clipped
from data.features.encoding import FIRST_ROW, BoolArray, IntArray
from erase_rec.config.schema import FeaturesConfig


@dataclass(frozen=True)
class RawSparse:
    """A categorical feature of R rows.

    ``values`` below ``FIRST_ROW`` mean missing: ``MISSING_ROW``, or ``FILLED_ROW`` where the feature has a ``fill``,
    which is not applied yet. The others are table rows already (``hash``, where no bucket is known to be unseen yet,
    and ``id``), or ``FIRST_ROW`` + a position in ``texts`` (``vocabulary``).

    Attributes:
        values: int32 or int64 [R]; [V] where the feature is multi-valued, one bag after the other.
        texts: large_string [U] without nulls; texts that no value has may be among them. None: table rows.
        offsets: int64 [R + 1], bag i is values ``offsets[i]`` to ``offsets[i + 1]`` - 1. None: single-valued.
        weights: float32 [V], finite, or None.
    """

    values: RowArray
    texts: pa.Array | None = None
    offsets: IntArray | None = None
    weights: WeightArray | None = None

    def select(self, keep: BoolArray) -> RawSparse:
        """The rows at which ``keep``, bool [R], is true."""
        if self.offsets is None:
            return RawSparse(self.values[keep], self.texts)
        lengths = np.diff(self.offsets)
        kept = np.repeat(keep, lengths)
        weights = None if self.weights is None else self.weights[kept]
        return RawSparse(self.values[kept], self.texts, offsets_of(lengths[keep]), weights)

    def count_cells(self) -> int:
        """Values; an empty bag counts as one."""
        return len(self.values) + self._count_empty()

    def count_missing(self) -> int:
        """Missing values, before ``fill``, and empty bags."""
        return int(np.count_nonzero(self.values < FIRST_ROW)) + self._count_empty()

    def _count_empty(self) -> int:
        return 0 if self.offsets is None else int(np.count_nonzero(np.diff(self.offsets) == 0))


@dataclass(frozen=True)
class RawRows:
    """R rows of one file.

    Attributes:
        dense: float64 [R] a dense feature, nan: missing; N of them.
        sparse: F sparse features.
        label: uint8 [R], 0 or 1.
        rows: where they came from.
        row_numbers: int64 [R], ascending: 0-based position of each row in its file.
        file_index: the file's position among the source's files.
        extra: the other columns that were asked for, as they were read, [R] each.
    """

    dense: Sequence[FloatArray]
    sparse: Sequence[RawSparse]
    label: npt.NDArray[np.uint8]
    rows: Rows
    row_numbers: IntArray
    file_index: int
    extra: Mapping[str, pa.Array]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.label)

    def select(self, keep: BoolArray) -> RawRows:
        """The rows at which ``keep``, bool [R], is true."""
        return RawRows(
            dense=[values[keep] for values in self.dense],
            sparse=[feature.select(keep) for feature in self.sparse],
            label=self.label[keep],
            rows=Rows(self.rows.file, self.rows.unit, self.rows.numbers[keep]),
            row_numbers=self.row_numbers[keep],
            file_index=self.file_index,
            extra={name: column.filter(pa.array(keep)) for name, column in self.extra.items()},
        )


@dataclass(frozen=True)
class CellCounts:
    """What the cells of some rows were, by feature; ``+`` adds up.

    Attributes:
        cells: int64 [N + F], cells of each dense, then each sparse feature; an empty bag counts as one.
        missing: int64 [N + F], how many of them were missing, before ``fill``.
        clipped: int64 [N], dense values that are clipped to float32's range.
    """

    cells: IntArray
    missing: IntArray
    clipped: IntArray

    @classmethod
    def zero(cls, config: FeaturesConfig) -> CellCounts:
        """Of no rows."""
        num_dense, num_sparse = len(config.dense), len(config.sparse)
        return cls(*(np.zeros(size, np.int64) for size in (num_dense + num_sparse, num_dense + num_sparse, num_dense)))

    def __add__(self, other: CellCounts) -> CellCounts:
        return CellCounts(self.cells + other.cells, self.missing + other.missing, self.clipped + other.clipped)


def count_cells(config: FeaturesConfig, raw: RawRows) -> CellCounts:
    """Counts the cells of exactly these rows; ``config`` is what they were read by."""
    missing = [int(np.count_nonzero(np.isnan(values))) for values in raw.dense]
    clipped = [count_clipped(values, feature.fill) for values, feature in zip(raw.dense, config.dense, strict=True)]
    return CellCounts(
        cells=np.array([raw.num_rows] * len(raw.dense) + [each.count_cells() for each in raw.sparse], dtype=np.int64),
        missing=np.array(missing + [each.count_missing() for each in raw.sparse], dtype=np.int64),
        clipped=np.array(clipped, dtype=np.int64),
    )


def concatenate(parts: Sequence[RawRows]) -> RawRows:
    """Joins at least one part, of the same file and read by the same configuration, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    assert all(part.file_index == first.file_index for part in parts), "a chunk is a piece of one file"
    return RawRows(
        dense=[np.concatenate(columns) for columns in zip(*(part.dense for part in parts), strict=True)],
        sparse=[_join(features) for features in zip(*(part.sparse for part in parts), strict=True)],
        label=np.concatenate([part.label for part in parts]),
        rows=Rows(first.rows.file, first.rows.unit, np.concatenate([part.rows.numbers for part in parts])),
        row_numbers=np.concatenate([part.row_numbers for part in parts]),
        file_index=first.file_index,
        extra={name: _join_arrays([part.extra[name] for part in parts]) for name in first.extra},
    )


def _join(parts: Sequence[RawSparse]) -> RawSparse:
    values, texts = [part.values for part in parts], None
    if parts[0].texts is not None:
        values, texts = _unify(parts)
    weights = [part.weights for part in parts if part.weights is not None]
    lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
    return RawSparse(
        np.concatenate(values),
        texts,
        offsets_of(np.concatenate(lengths)) if lengths else None,
        np.concatenate(weights) if weights else None,
    )


def _unify(parts: Sequence[RawSparse]) -> tuple[list[RowArray], pa.Array]:
    """The parts' values with regard to common texts, each of which is there once."""
    codes, texts = distinct_texts(pa.concat_arrays([part.texts for part in parts]))
    codes = codes + np.int32(FIRST_ROW)
    values: list[RowArray] = []
    start = 0
    for part in parts:
        assert part.texts is not None, "all parts were read by the same configuration"
        row_of = np.concatenate([np.arange(FIRST_ROW, dtype=np.int32), codes[start : start + len(part.texts)]])
        values.append(row_of.take(part.values))
        start += len(part.texts)
    return values, texts


def _join_arrays(arrays: Sequence[pa.Array]) -> pa.Array:
    return pa.chunked_array(arrays).combine_chunks()


def offsets_of(lengths: IntArray) -> IntArray:
    """Where bags of these lengths [R] start and end, int64 [R + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
