"""The ``id`` encoding: categories that are already numbered from 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.block import RowArray
from data.features.cells import (
    BadCellsError,
    is_plain_text,
    null_where_absent,
    plain_text,
    present_texts,
    read_categories,
    shown,
    unparsable,
)
from data.features.encoding import FILLED_ROW, FIRST_ROW, MISSING_ROW, BoolArray, IntArray, narrow_rows
from data.features.raw import RawSparse


@dataclass(frozen=True)
class IdRange:
    """Ids from 0 to ``num_embeddings`` - 1; nothing is fitted and nothing is unseen.

    An id outside the range is a mistake in the data or in the configuration and is refused: read anyway, it would be
    another category's row.
    """

    num_embeddings: int

    @property
    def table_rows(self) -> int:
        """Ids and the two special rows."""
        return FIRST_ROW + self.num_embeddings

    def encode(self, raw: RawSparse, fill: str | None) -> RowArray:
        """As :meth:`data.features.fitted.Encoding.encode`."""
        if not fill:
            return raw.values
        row = read_ids(pa.array([fill]), self.num_embeddings, (), MISSING_ROW)
        return np.where(raw.values == FILLED_ROW, row, raw.values)

    def state(self) -> dict[str, pa.Array]:
        """Nothing."""
        return {}


def read_ids(array: pa.Array, num_embeddings: int, missing_values: Sequence[str], missing_row: int) -> RowArray:
    """Table row of each cell, int32 or int64 [n]; ``missing_row`` for the missing ones.

    Raises:
        BadCellsError: cells that are no whole number of the range; all of them.
        BadColumnError: the type holds no categories.
    """
    array = plain_text(array)
    if is_plain_text(array.type):
        present = present_texts(array, missing_values)
        ids, bad = _parse(null_where_absent(array, present), num_embeddings)
        cells = bad
    elif pa.types.is_integer(array.type) and not missing_values:
        present = array.is_valid().to_numpy(zero_copy_only=False)
        ids = array.fill_null(0).to_numpy()
        bad = cells = np.flatnonzero((ids < 0) | (ids >= num_embeddings))
    else:
        return _read_texts(array, num_embeddings, missing_values, missing_row)
    if len(bad):
        raise _refused(cells, array.take(pa.array(bad)).to_pylist(), num_embeddings)
    return _rows(ids, present, num_embeddings, missing_row)


def _read_texts(array: pa.Array, num_embeddings: int, missing_values: Sequence[str], missing_row: int) -> RowArray:
    """Cells that are neither text nor integers, by their distinct texts."""
    categories = read_categories(array, missing_values, missing_row=missing_row)
    # A dictionary column may hold texts that none of these rows has: they must not be refused.
    used = categories.occurring()
    texts = categories.texts.take(pa.array(used))
    ids, bad = _parse(texts, num_embeddings)
    rows_of = np.arange(FIRST_ROW + len(categories.texts))
    rows_of[used + FIRST_ROW] = ids + FIRST_ROW
    if len(bad):
        is_bad = np.isin(categories.values, used[bad] + FIRST_ROW)
        cells = np.flatnonzero(is_bad)
        found = categories.texts.take(pa.array(categories.values[cells] - FIRST_ROW)).to_pylist()
        raise _refused(cells, found, num_embeddings)
    return narrow_rows(rows_of[categories.values], FIRST_ROW + num_embeddings)


def _parse(texts: pa.Array, num_embeddings: int) -> tuple[IntArray, IntArray]:
    """Ids of the texts (anything under a null), int64 [n], and the positions of those that are none of the range."""
    try:
        numbers = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        wrong = unparsable(texts, pa.int64())
        is_number = np.ones(len(texts), dtype=np.bool_)
        is_number[wrong] = False
        numbers = null_where_absent(texts, is_number & texts.is_valid().to_numpy(zero_copy_only=False)).cast(pa.int64())
    else:
        wrong = np.empty(0, dtype=np.int64)
    ids: IntArray = numbers.fill_null(0).to_numpy()
    outside = np.flatnonzero((ids < 0) | (ids >= num_embeddings))
    return ids, np.union1d(wrong, outside)


def _rows(ids: IntArray, present: BoolArray, num_embeddings: int, missing_row: int) -> RowArray:
    rows = np.where(present, ids.astype(np.int64) + FIRST_ROW, missing_row)
    return narrow_rows(rows, FIRST_ROW + num_embeddings)


def _refused(cells: IntArray, found: list[object], num_embeddings: int) -> BadCellsError:
    return BadCellsError(
        cells,
        [
            f"found id {shown(value)!r}, expected a whole number from 0 to {num_embeddings - 1} "
            f"(num_embeddings: {num_embeddings}); raise num_embeddings, list the value in missing_values, "
            "or use encoding: hash or vocabulary"
            for value in found
        ],
    )
