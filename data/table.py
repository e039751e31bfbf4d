"""Encoded rows in memory, and where each came from.

A batch picks rows at random, so what every row has one of lies row by row: a row's 26 ids are two cache lines (and one
page of a file) instead of 26. Everything is a plain NumPy array: memory-mapped arrays can take the place of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from data.features.bags import ragged_positions
from data.features.encoding import UNSEEN_ROW, IntArray

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
        ids: table rows of the single-valued sparse features in feature order, int32 or int64 [R, S].
        bags: the multi-valued sparse features by their position among the F = S + len(bags) sparse features.
        label: uint8 [R], 0 or 1.
        origins: where runs of rows came from.
        origin_starts: int64 [len(origins)], first row of each run, ascending.
        num_missing: int64 [N + F], missing cells of each dense, then each sparse feature, before ``fill``; an empty
            bag counts as one.
        num_clipped: int64 [N], dense values clipped to float32's range.
    """

    dense: FloatArray
    ids: RowArray
    bags: Mapping[int, Bags]
    label: npt.NDArray[np.uint8]
    origins: tuple[Origin, ...]
    origin_starts: IntArray
    num_missing: IntArray
    num_clipped: IntArray

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.label)

    @property
    def num_sparse(self) -> int:
        """F."""
        return int(self.ids.shape[1]) + len(self.bags)

    @property
    def single_positions(self) -> list[int]:
        """Positions of the single-valued among the sparse features, [S]."""
        return [position for position in range(self.num_sparse) if position not in self.bags]

    def count_cells(self) -> IntArray:
        """Cells of each dense, then each sparse feature, int64 [N + F]; an empty bag counts as one cell."""
        num_dense = self.dense.shape[1]
        counts = np.full(num_dense + self.num_sparse, self.num_rows, dtype=np.int64)
        for position, bags in self.bags.items():
            counts[num_dense + position] = len(bags.values) + np.count_nonzero(np.diff(bags.offsets) == 0)
        return counts

    def locate(self, row: int) -> str:
        """``file:line`` (or ``file row n``) of a row."""
        run = int(np.searchsorted(self.origin_starts, row, side="right")) - 1
        return self.origins[run].place(row - int(self.origin_starts[run]))

    def count_unseen(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Unseen values and all values of each sparse feature in ``rows``, int64 [F] each."""
        unseen, total = np.zeros(self.num_sparse, dtype=np.int64), np.full(self.num_sparse, len(rows), dtype=np.int64)
        unseen[self.single_positions] = np.count_nonzero(self.ids.take(rows, axis=0) == UNSEEN_ROW, axis=0)
        for position, bags in self.bags.items():
            values = bags.take(rows)[0]
            unseen[position], total[position] = np.count_nonzero(values == UNSEEN_ROW), len(values)
        return unseen, total


def concatenate(tables: Sequence[EncodedTable]) -> EncodedTable:
    """One table from at least one, of the same features, in order."""
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    return EncodedTable(
        dense=np.concatenate([table.dense for table in tables]),
        ids=np.concatenate([table.ids for table in tables]),
        bags={position: _join([table.bags[position] for table in tables]) for position in tables[0].bags},
        label=np.concatenate([table.label for table in tables]),
        origins=tuple(origin for table in tables for origin in table.origins),
        origin_starts=np.concatenate(
            [table.origin_starts + start for table, start in zip(tables, starts, strict=False)]
        ),
        num_missing=np.sum([table.num_missing for table in tables], axis=0),
        num_clipped=np.sum([table.num_clipped for table in tables], axis=0),
    )


def _join(runs: Sequence[Bags]) -> Bags:
    lengths = np.concatenate([np.diff(bags.offsets) for bags in runs])
    weights = [bags.weights for bags in runs if bags.weights is not None]
    return Bags(
        values=np.concatenate([bags.values for bags in runs]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        weights=np.concatenate(weights) if weights else None,
    )
