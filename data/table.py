"""Encoded rows in memory, column by column, and where each came from.

Everything is a plain NumPy array, so that memory-mapped arrays can take the place of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from data.cells import ragged_positions
from data.encoding import UNSEEN_ROW, IntArray

FloatArray = npt.NDArray[np.float32]
RowArray = npt.NDArray[np.int32 | np.int64]
"""Rows of an embedding table: int32 where the table is small enough."""


@dataclass(frozen=True)
class Bags:
    """A multi-valued feature.

    Attributes:
        values: table rows of all bags [V], one bag after the other.
        offsets: int64 [R + 1], bag i is values ``offsets[i]`` to ``offsets[i + 1]`` - 1.
        weights: float32 [V], or None.
    """

    values: RowArray
    offsets: IntArray
    weights: FloatArray | None

    def take(self, rows: IntArray) -> tuple[RowArray, IntArray, FloatArray | None]:
        """Values, lengths [B] and weights of the bags at ``rows`` [B]."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        positions = ragged_positions(starts, lengths)
        return self.values[positions], lengths, None if self.weights is None else self.weights[positions]


SparseColumn = RowArray | Bags
"""A sparse feature: the table row of each of R rows, or bags."""


@dataclass(frozen=True)
class Origin:
    """Where consecutive rows came from; row i of them is at ``first_line + i``."""

    file: str
    first_line: int
    unit: Literal["line", "row"]

    def place(self, row: int) -> str:
        """``file:line``, or ``file row n``."""
        number = self.first_line + row
        return f"{self.file}:{number}" if self.unit == "line" else f"{self.file} row {number}"


@dataclass(frozen=True)
class EncodedTable:
    """R rows after the feature transforms.

    Attributes:
        dense: float32 [R, N], finite.
        sparse: a column a sparse feature.
        label: uint8 [R], 0 or 1.
        origins: where runs of rows came from.
        origin_starts: int64 [len(origins)], first row of each run, ascending.
        num_missing: int64 [N + F], missing cells of each dense, then each sparse feature, before ``fill``; an empty
            bag counts as one.
        num_clipped: int64 [N], dense values clipped to float32's range.
    """

    dense: FloatArray
    sparse: tuple[SparseColumn, ...]
    label: npt.NDArray[np.uint8]
    origins: tuple[Origin, ...]
    origin_starts: IntArray
    num_missing: IntArray
    num_clipped: IntArray

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.label)

    def count_cells(self) -> IntArray:
        """Cells of each dense, then each sparse feature, int64 [N + F]; an empty bag counts as one cell."""
        sparse = [
            len(column.values) + np.count_nonzero(np.diff(column.offsets) == 0)
            if isinstance(column, Bags)
            else len(column)
            for column in self.sparse
        ]
        return np.array([self.num_rows] * self.dense.shape[1] + sparse, dtype=np.int64)

    def locate(self, row: int) -> str:
        """``file:line`` (or ``file row n``) of a row."""
        run = int(np.searchsorted(self.origin_starts, row, side="right")) - 1
        return self.origins[run].place(row - int(self.origin_starts[run]))

    def count_unseen(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Unseen values and all values of each sparse feature in ``rows``, int64 [F] each."""
        taken = [column.take(rows)[0] if isinstance(column, Bags) else column[rows] for column in self.sparse]
        unseen = np.array([np.count_nonzero(values == UNSEEN_ROW) for values in taken], dtype=np.int64)
        return unseen, np.array([len(values) for values in taken], dtype=np.int64)


def concatenate(tables: Sequence[EncodedTable]) -> EncodedTable:
    """One table from at least one, of the same features, in order."""
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    return EncodedTable(
        dense=np.concatenate([table.dense for table in tables]),
        sparse=tuple(_join(columns) for columns in zip(*(table.sparse for table in tables), strict=True)),
        label=np.concatenate([table.label for table in tables]),
        origins=tuple(origin for table in tables for origin in table.origins),
        origin_starts=np.concatenate(
            [table.origin_starts + start for table, start in zip(tables, starts, strict=False)]
        ),
        num_missing=np.sum([table.num_missing for table in tables], axis=0),
        num_clipped=np.sum([table.num_clipped for table in tables], axis=0),
    )


def _join(columns: Sequence[SparseColumn]) -> SparseColumn:
    bags = [column for column in columns if isinstance(column, Bags)]
    if not bags:
        return np.concatenate([column for column in columns if not isinstance(column, Bags)])
    assert len(bags) == len(columns)
    lengths = np.concatenate([np.diff(column.offsets) for column in bags])
    weights = [column.weights for column in bags if column.weights is not None]
    return Bags(
        values=np.concatenate([column.values for column in bags]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        weights=np.concatenate(weights) if weights else None,
    )
