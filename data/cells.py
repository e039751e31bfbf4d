"""Columns as cells: categories as texts, numbers as float64, bags as cells with offsets.

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

from data.encoding import BoolArray, IntArray

FloatArray = npt.NDArray[np.float64]

LARGEST_EXACT_FLOAT = 2.0**53
NUMBER_TYPES = "integer, float, decimal, boolean or text"
CATEGORY_TYPES = f"{NUMBER_TYPES}, or a dictionary of these"
BAG_TYPES = "a list of integers, floats, decimals, booleans or texts, or text with a separator"


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


@dataclass(frozen=True)
class CellBags:
    """Bags of categorical cells.

    Attributes:
        cells: all bags' cells [V], one bag after the other.
        offsets: int64 [n + 1], bag i is cells ``offsets[i]`` to ``offsets[i + 1]`` - 1.
        weights: float32 [V], finite, or None.
    """

    cells: Cells
    offsets: IntArray
    weights: npt.NDArray[np.float32] | None

    @property
    def num_missing(self) -> int:
        """Cells that were missing and bags that are empty, before ``fill``."""
        return self.cells.num_missing + int(np.count_nonzero(np.diff(self.offsets) == 0))


def read_categories(column: pa.ChunkedArray, missing_values: Sequence[str] = (), fill: str | None = None) -> Cells:
    """Reads a categorical column.

    Args:
        column: one category a cell.
        missing_values: texts, besides the empty one, that mean missing.
        fill: category that a missing cell takes; None or empty: none.

    Raises:
        BadColumnError: the type holds no categories.
    """
    array = _one_chunk(column)
    is_dictionary = pa.types.is_dictionary(array.type)
    if not _holds_categories(array.type.value_type if is_dictionary else array.type):
        raise BadColumnError(array.type, CATEGORY_TYPES)
    encoded = array if is_dictionary else array.dictionary_encode()
    texts = pa.concat_arrays([_as_text(encoded.dictionary), pa.nulls(1, pa.large_string())])
    codes: IntArray = encoded.indices.cast(pa.int64()).fill_null(len(texts) - 1).to_numpy()
    missing = _is_missing(texts, missing_values)
    texts = pc.if_else(missing, fill or None, texts)
    return Cells(texts, codes, missing.to_numpy(zero_copy_only=False))


def read_bags(
    column: pa.ChunkedArray,
    weights: pa.ChunkedArray | None,
    *,
    separator: str | None,
    max_length: int | None = None,
    missing_values: Sequence[str] = (),
    fill: str | None = None,
) -> CellBags:
    """Reads a multi-valued column: lists, or text split at ``separator``.

    A null list, an empty list and a missing text are the same empty bag; a missing value inside a bag is a missing
    cell. With ``fill`` an empty bag becomes the bag of that one category, of weight 1.

    Args:
        column: bags of categories.
        weights: a number for each value, in the same form; None: unweighted.
        separator: splits text; has no meaning for lists.
        max_length: longer bags keep their first values.
        missing_values: texts, besides the empty one, that mean missing.
        fill: category that a missing cell and an empty bag take; None or empty: none.

    Raises:
        BadCellError: weights do not match the values, or a weight is no finite number.
        BadColumnError: the type holds no bags of categories.
    """
    flat, lengths = _flatten(_one_chunk(column), separator, missing_values)
    weight = None if weights is None else _read_weights(_one_chunk(weights), lengths, separator)
    cells = read_categories(flat, missing_values, fill)
    codes = cells.codes
    starts = np.cumsum(lengths) - lengths
    if max_length is not None and (lengths > max_length).any():
        lengths = np.minimum(lengths, max_length)
        kept = ragged_positions(starts, lengths)
        codes, weight = codes[kept], None if weight is None else weight[kept]
        starts = np.cumsum(lengths) - lengths
    empty = lengths == 0
    if fill:
        codes = np.insert(codes, starts[empty], len(cells.texts) - 1)
        weight = None if weight is None else np.insert(weight, starts[empty], 1.0)
        lengths = np.where(empty, 1, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return CellBags(Cells(cells.texts, codes, cells.missing), offsets, weight)


def read_numbers(column: pa.ChunkedArray, missing_values: Sequence[str] = ()) -> FloatArray:
    """Reads a numeric column, float64 [n]; nan: missing. Infinity, also a text past float64's range, stays.

    Spaces around a number are dropped. In a column that is no text, ``missing_values`` are compared as numbers.

    Raises:
        BadCellError: a text is no number.
        BadColumnError: the type holds no numbers.
    """
    array = _one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    kind = array.type
    if _is_text(kind):
        texts = pc.utf8_trim_whitespace(array.cast(pa.large_string()))
        texts = pc.if_else(_is_missing(texts, missing_values), None, texts)
        return _nan_for_null(_parse(texts))
    if not _holds_numbers(kind):
        raise BadColumnError(kind, NUMBER_TYPES)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    values = _nan_for_null(array.cast(pa.float64(), safe=False))
    absent = [float(text) for text in missing_values if _is_number(text)]
    return np.where(np.isin(values, absent), np.nan, values) if absent else values


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Positions ``starts[i]``, ``starts[i] + 1``, ... of ``lengths[i]`` values for each i, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


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


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _is_text(kind: pa.DataType) -> bool:
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
    return _is_text(kind) or _holds_numbers(kind)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_missing(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
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


def _flatten(array: pa.Array, separator: str | None, missing_values: Sequence[str]) -> tuple[pa.Array, IntArray]:
    """All bags' values and each bag's length, int64 [n]."""
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(0), np.zeros(len(array), dtype=np.int64)
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
    if _is_text(array.type) and separator is not None:
        texts = array.cast(pa.large_string())
        array = pc.split_pattern(pc.if_else(_is_missing(texts, missing_values), None, texts), separator)
    elif _is_text(array.type):
        raise BadColumnError(kind, f"{BAG_TYPES}; the feature has no separator, which text needs")
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(array.type) for is_kind in kinds):
        raise BadColumnError(kind, BAG_TYPES)
    lengths: IntArray = array.value_lengths().cast(pa.int64()).fill_null(0).to_numpy()
    return array.flatten(), lengths


def _read_weights(array: pa.Array, lengths: IntArray, separator: str | None) -> npt.NDArray[np.float32]:
    flat, found = _flatten(array, separator, ())
    if not np.array_equal(found, lengths):
        row = int((found != lengths).argmax())
        raise BadCellError(row, f"found {found[row]} weights for {lengths[row]} values, expected one for each")
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    try:
        weights = read_numbers(flat)
    except BadCellError as error:
        raise BadCellError(int(bag_of[error.row]), f"a weight: {error}") from None
    with np.errstate(over="ignore"):
        narrow = weights.astype(np.float32)
    bad = ~np.isfinite(narrow)
    if bad.any():
        at = int(bad.argmax())
        raise BadCellError(int(bag_of[at]), f"a weight: found {weights[at]}, expected a finite number of float32")
    return narrow


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
