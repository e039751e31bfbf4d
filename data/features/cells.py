"""Columns as cells: categories as texts, numbers as float64.

Whatever type a column has, a category is its text, so that an integer 5 in Parquet is the 5 of a text file:

- text and integers (past 2^63 too) as they are, ``007`` and ``7`` being different texts;
- booleans as ``true`` and ``false``, decimals with their scale (``5.00``);
- a float that is a whole number below 2^53 as that number (``5``, not ``5.0``: a column of integers with gaps is
  stored as floats), any other float in the shortest form that reads back the same; NaN is missing.

Missing is a null, an empty text, or one of the feature's ``missing_values``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data.features.encoding import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]

LARGEST_EXACT_FLOAT = 2.0**53
NUMBER_TYPES = "integer, float, decimal, boolean or text"
CATEGORY_TYPES = f"{NUMBER_TYPES}, or a dictionary of these"


class BadCellError(ValueError):
    """A cell that cannot be read; the message says what was found, expected and the way out, the caller says where."""

    def __init__(self, row: int, message: str) -> None:
        """Takes the cell's position in its column."""
        super().__init__(message)
        self.row = row


class BadColumnError(ValueError):
    """A column whose type cannot be read."""

    def __init__(self, found: pa.DataType, allowed: str) -> None:
        """Takes the column's type and a description of the types allowed."""
        super().__init__(f"found type {found}, expected {allowed}; convert the column")


@dataclass(frozen=True)
class Cells:
    """Categorical cells.

    Attributes:
        texts: large_string [U + 1], texts that occur; null: missing. The last is null.
        codes: int64 [n], each cell's position in ``texts``.
        missing: bool [U + 1], whether cells with that text were missing; they still are unless ``fill`` gave a text.
    """

    texts: pa.Array
    codes: IntArray
    missing: BoolArray

    @property
    def num_missing(self) -> int:
        """Cells that were missing, before ``fill``."""
        return int(np.count_nonzero(self.missing[self.codes]))


def read_categories(column: pa.ChunkedArray, missing_values: Sequence[str] = (), fill: str | None = None) -> Cells:
    """Reads a categorical column.

    Args:
        column: one category a cell.
        missing_values: texts, besides the empty one, that mean missing.
        fill: category that a missing cell takes; None or empty: none.

    Raises:
        BadColumnError: the type holds no categories.
    """
    array = one_chunk(column)
    is_dictionary = pa.types.is_dictionary(array.type)
    if not _holds_categories(array.type.value_type if is_dictionary else array.type):
        raise BadColumnError(array.type, CATEGORY_TYPES)
    encoded = array if is_dictionary else array.dictionary_encode()
    texts = pa.concat_arrays([_as_text(encoded.dictionary), pa.nulls(1, pa.large_string())])
    codes: IntArray = encoded.indices.cast(pa.int64()).fill_null(len(texts) - 1).to_numpy()
    missing = missing_texts(texts, missing_values)
    texts = pc.if_else(missing, fill or None, texts)
    return Cells(texts, codes, missing.to_numpy(zero_copy_only=False))


def read_numbers(column: pa.ChunkedArray, missing_values: Sequence[str] = ()) -> FloatArray:
    """Reads a numeric column, float64 [n]; nan: missing. Infinity, also a text past float64's range, stays.

    Spaces around a number are dropped. In a column that is no text, ``missing_values`` are compared as numbers.

    Raises:
        BadCellError: a text is no number.
        BadColumnError: the type holds no numbers.
    """
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    kind = array.type
    if is_text(kind):
        texts = pc.utf8_trim_whitespace(array.cast(pa.large_string()))
        texts = pc.if_else(missing_texts(texts, missing_values), None, texts)
        return _nan_for_null(_parse(texts))
    if not _holds_numbers(kind):
        raise BadColumnError(kind, NUMBER_TYPES)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    values = _nan_for_null(array.cast(pa.float64(), safe=False))
    absent = [float(text) for text in missing_values if _is_number(text)]
    return np.where(np.isin(values, absent), np.nan, values) if absent else values


def first_unparsable(texts: pa.Array, kind: pa.DataType) -> int:
    """Position of the first text that is no value of ``kind``; there must be one. Slow: for messages."""

    def parses(text: pa.Scalar) -> bool:
        try:
            text.cast(kind)
        except pa.ArrowInvalid:
            return False
        return True

    return next(position for position, text in enumerate(texts) if not parses(text))


def select_cells(cells: Cells, keep: BoolArray) -> tuple[pa.Array, IntArray]:
    """Non-null texts among the kept cells, and how often each occurs there; with ``fill`` a text can be there twice.

    Args:
        cells: of one column.
        keep: bool [n].

    Returns:
        Texts, large_string [U], and counts, int64 [U].
    """
    counts = np.bincount(cells.codes[keep], minlength=len(cells.texts))
    occurs = (counts > 0) & cells.texts.is_valid().to_numpy(zero_copy_only=False)
    return cells.texts.filter(pa.array(occurs)), counts[occurs]


def one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array; the dictionaries of its chunks are unified."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _holds_numbers(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _holds_categories(kind: pa.DataType) -> bool:
    return is_text(kind) or _holds_numbers(kind)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def missing_texts(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
    """Whether each text means missing: null, empty, or one of ``missing_values``; boolean array."""
    return pc.is_in(texts, value_set=pa.array([None, "", *missing_values], texts.type))


def _as_text(values: pa.Array) -> pa.Array:
    """Each distinct value as text, large_string; nulls stay."""
    if not pa.types.is_floating(values.type):
        return values.cast(pa.large_string())
    numbers = values.cast(pa.float64()).fill_null(np.nan).to_numpy()
    whole = (np.abs(numbers) < LARGEST_EXACT_FLOAT) & (numbers == np.trunc(numbers))
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.large_string())
    texts = pc.if_else(pa.array(whole), integers, values.cast(pa.large_string()))
    return pc.if_else(pa.array(np.isnan(numbers)), None, texts)


def _parse(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        row = first_unparsable(texts, pa.float64())
    found = texts[row].as_py()[:80]
    raise BadCellError(row, f"found {found!r}, expected a number")


def _nan_for_null(numbers: pa.Array) -> FloatArray:
    values: FloatArray = numbers.fill_null(np.nan).to_numpy()
    return values
