"""From the cells of a block to raw rows: the one place where a row turns out bad because of what is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow as pa

from data.bad_rows import BadRow, BadRows
from data.block import Rows
from data.errors import DataError
from data.features.bags import BadWeightsError
from data.features.cells import (
    BadCellsError,
    BadColumnError,
    FloatArray,
    one_array,
    plain_text,
    read_numbers,
    shown,
    without_views,
)
from data.features.columns import column_of, subject_of
from data.features.label import read_labels
from data.features.raw import RawRows, RawSparse
from data.features.sparse import read_sparse
from data.sources.source import Block
from erase_rec.config.schema import DenseFeatureConfig, FeaturesConfig, LabelConfig, SparseFeatureConfig

Column = TypeVar("Column")


def read_rows(
    config: FeaturesConfig,
    label_column: str,
    label: LabelConfig,
    block: Block,
    bad: BadRows,
    extra: Sequence[str] = (),
) -> RawRows:
    """Reads what the features and the label need of a block.

    A row is bad if a cell of it cannot be read. It is handed to ``bad``, with the first such column, and left out; the
    others stay, maybe none. Where bad rows are tolerated they are handed over in the order of their numbers.

    Args:
        config: the features, defaults filled in.
        label_column: the label's column.
        label: how the label is read.
        block: rows with all columns named here.
        bad: what becomes of bad rows.
        extra: columns that the rows carry along as they are.

    Raises:
        DataError: a column is of a type that cannot be read, or ``bad`` refuses a row; names file, line, column and
            the way out.
    """
    reading = _Reading(block, bad)
    for dense in config.dense:
        reading.add_dense(dense)
    for sparse in config.sparse:
        reading.add_sparse(sparse)
    return reading.finish(label_column, label, extra)


class _Reading:
    """Reads a block column by column; a bad row is left out of what was read and of what is still to be read."""

    def __init__(self, block: Block, bad: BadRows) -> None:
        self._block = replace(block, columns=without_views(block.columns, nested_only=True))
        self._bad = bad
        self._found: list[tuple[BadRow, DataError]] = []
        self._dense: list[FloatArray] = []
        self._sparse: list[RawSparse] = []

    def add_dense(self, feature: DenseFeatureConfig) -> None:
        """Reads a numeric feature."""
        column = column_of(feature)

        def read(columns: pa.Table) -> FloatArray:
            return read_numbers(one_array(columns[column]), feature.missing_values)

        way_out = "; correct it or list it in missing_values"
        found = self._read(read, subject_of(feature), column, way_out=way_out)
        # Not in one line: the call may put another list in the place of this one.
        self._dense.append(found)

    def add_sparse(self, feature: SparseFeatureConfig) -> None:
        """Reads a categorical feature."""

        def read(columns: pa.Table) -> RawSparse:
            return read_sparse(columns, feature)

        found = self._read(read, subject_of(feature), column_of(feature), weights_column=feature.weights)
        self._sparse.append(found)

    def finish(self, label_column: str, config: LabelConfig, extra: Sequence[str]) -> RawRows:
        """Reads the label, hands over the bad rows and returns the others."""
        label = self._read(
            lambda columns: read_labels(one_array(columns[label_column]), config),
            f"label column {label_column!r}",
            label_column,
        )
        for row, error in sorted(self._found, key=lambda pair: pair[0].number):
            self._bad.add(row, error)
        block = self._block
        return RawRows(
            dense=self._dense,
            sparse=self._sparse,
            label=label,
            rows=Rows(block.file, block.unit, block.numbers),
            row_numbers=block.row_numbers,
            file_index=block.file_index,
            extra={name: plain_text(one_array(block.columns[name])) for name in extra},
        )

    def _read(
        self,
        read: Callable[[pa.Table], Column],
        subject: str,
        column: str,
        *,
        weights_column: str | None = None,
        way_out: str = "",
    ) -> Column:
        """Calls ``read`` until none of the rows that are left is bad for it."""
        while True:
            try:
                return read(self._block.columns)
            except BadColumnError as error:
                raise DataError(f"{self._block.file}: {subject}: {error}") from None
            except BadCellsError as error:
                found = error
            wrong_column = column
            if isinstance(found, BadWeightsError):
                assert weights_column is not None, "only a feature with weights reads any"
                wrong_column = weights_column
            self._leave_out(found, subject, wrong_column, way_out)

    def _leave_out(self, found: BadCellsError, subject: str, column: str, way_out: str) -> None:
        block = self._block
        cells = one_array(block.columns[column])
        for row, message in zip(found.rows.tolist(), found.messages, strict=True):
            reason = message + way_out
            bad_row = BadRow(
                file=block.file,
                unit=block.unit,
                number=int(block.row_numbers[row]) + block.first_number,
                column=column,
                value=shown(cells[row].as_py()),
                reason=reason,
            )
            self._found.append((bad_row, DataError(f"{block.place(row)}: {subject}: {reason}")))
            if not self._bad.tolerated:
                self._bad.add(*self._found[-1])
        keep = np.ones(block.num_rows, dtype=np.bool_)
        keep[found.rows] = False
        self._block = block.select(keep)
        self._dense = [values[keep] for values in self._dense]
        self._sparse = [feature.select(keep) for feature in self._sparse]
