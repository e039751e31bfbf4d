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

from data.features.encoding import FIRST_ROW, MISSING_ROW, BoolArray, IntArray
from data.features.whole_numbers import parse_whole
from data.text_views import texts_of, views_of, words_of

FloatArray = npt.NDArray[np.float64]
OffsetArray = npt.NDArray[np.int32 | np.int64]

LARGEST_EXACT_FLOAT = 2.0**53
SHOWN_CHARACTERS = 80
NUMBER_TYPES = "integer, float, decimal, boolean or text"
CATEGORY_TYPES = f"{NUMBER_TYPES}, or a dictionary of these"


class BadCellsError(ValueError):
    """Cells of a column that cannot be read; the caller says where and goes on without them, or not at all.

    Attributes:
        rows: int64 [B], ascending, each once: their positions in the column. Not always all that there are.
        messages: what was found there, what is expected and the way out, B of them.
    """

    def __init__(self, rows: IntArray, messages: Sequence[str]) -> None:
        """Takes at least one position."""
        super().__init__(messages[0])
        self.rows, self.messages = rows, messages


class BadColumnError(ValueError):
    """A column whose type cannot be read."""

    def __init__(self, found: pa.DataType, allowed: str) -> None:
        """Takes the column's type and a description of the types allowed."""
        super().__init__(f"found type {found}, expected {allowed}; convert the column")


@dataclass(frozen=True)
class Categories:
    """Categorical cells by their texts.

    Attributes:
        values: int32 [n]: ``FIRST_ROW`` + the position of the cell's text, or the row given for missing cells.
        texts: large_string [U] without nulls. A text can be there twice, or in no cell.
    """

    values: npt.NDArray[np.int32]
    texts: pa.Array

    def occurring(self) -> IntArray:
        """Positions of the texts that are in a cell, ascending."""
        return np.flatnonzero(np.bincount(self.values, minlength=FIRST_ROW + len(self.texts))[FIRST_ROW:])


def read_categories(
    array: pa.Array, missing_values: Sequence[str] = (), *, missing_row: int = MISSING_ROW
) -> Categories:
    """Reads categorical cells of any type.

    Args:
        array: one category a cell.
        missing_values: texts, besides the empty one, that mean missing.
        missing_row: value of a missing cell.

    Raises:
        BadColumnError: the type holds no categories.
    """
    is_dictionary = pa.types.is_dictionary(array.type)
    if not _holds_categories(array.type.value_type if is_dictionary else array.type):
        raise BadColumnError(array.type, CATEGORY_TYPES)
    if is_text(array.type) and not array.null_count:
        codes, texts = distinct_texts(array)
    else:
        encoded = array if is_dictionary else array.dictionary_encode()
        texts = _as_text(encoded.dictionary)
        indices = encoded.indices
        codes = (indices.cast(pa.int64()).fill_null(len(texts)) if indices.null_count else indices).to_numpy()
    values = np.arange(FIRST_ROW, FIRST_ROW + len(texts) + 1, dtype=np.int32)
    values[:-1][~present_texts(texts, missing_values)] = missing_row
    values[-1] = missing_row
    return Categories(values.take(codes), texts.fill_null("") if texts.null_count else texts)


def distinct_texts(texts: pa.Array) -> tuple[IntArray, pa.Array]:
    """Each text once, in the order of their first places.

    Args:
        texts: string, large_string or string_view [n] without nulls.

    Returns:
        For each of ``texts`` its position among the distinct ones, int32 [n], and these, large_string.
    """
    words = words_of(texts)
    encoded = (plain_text(texts) if words is None else _uint64_array(words)).dictionary_encode()
    found = encoded.dictionary
    codes = encoded.indices.to_numpy()
    return codes, found.cast(pa.large_string()) if words is None else texts_of(found.to_numpy())


def read_numbers(array: pa.Array, missing_values: Sequence[str] = ()) -> FloatArray:
    """Reads a numeric column, float64 [n]; nan: missing. Infinity, also a text past float64's range, stays.

    Spaces around a number are dropped. In a column that is no text, ``missing_values`` are compared as numbers.

    Raises:
        BadCellsError: texts that are no numbers; all of them.
        BadColumnError: the type holds no numbers.
    """
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if is_text(array.type):
        return _parse(array, missing_values)
    kind = array.type
    if not _holds_numbers(kind):
        raise BadColumnError(kind, NUMBER_TYPES)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    values = _nan_for_null(array.cast(pa.float64(), safe=False))
    absent = [float(text) for text in missing_values if _is_number(text)]
    return np.where(np.isin(values, absent), np.nan, values) if absent else values


def unparsable(texts: pa.Array, kind: pa.DataType) -> IntArray:
    """Positions of the texts that are no value of ``kind``, int64, ascending; by halving, so that few cost little."""
    found: list[int] = []
    pending = [(0, len(texts))]
    while pending:
        start, length = pending.pop()
        try:
            texts.slice(start, length).cast(kind)
        except pa.ArrowInvalid:
            half = length // 2
            if half:
                pending += [(start + half, length - half), (start, half)]
            else:
                found.append(start)
    return np.array(found, dtype=np.int64)


def is_plain_text(kind: pa.DataType) -> bool:
    """Whether cells of this type are offsets into one buffer of UTF-8, as :func:`text_bytes` wants them."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(is_plain_text(kind) or pa.types.is_string_view(kind))


def plain_text(array: pa.Array) -> pa.Array:
    """The array; large_string in the place of string_view, whose rows Arrow 26 cannot select."""
    return array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array


def text_bytes(texts: pa.Array) -> tuple[OffsetArray, npt.NDArray[np.uint8]]:
    """The buffers of plain texts, without a copy.

    Returns:
        Offsets, int32 or int64 [n + 1], and bytes: text i is bytes ``offsets[i]`` to ``offsets[i + 1]`` - 1. Under a
        null anything may lie.
    """
    _, offsets, content = texts.buffers()
    if offsets is None or offsets.size == 0:
        return np.zeros(len(texts) + 1, dtype=np.int32), np.empty(0, dtype=np.uint8)
    bounds: OffsetArray
    if pa.types.is_large_string(texts.type):
        bounds = np.frombuffer(offsets, dtype=np.int64)
    else:
        bounds = np.frombuffer(offsets, dtype=np.int32)
    text_bounds = bounds[texts.offset : texts.offset + len(texts) + 1]
    return text_bounds, np.frombuffer(b"" if content is None else content, dtype=np.uint8)


def present_texts(texts: pa.Array, missing_values: Sequence[str], offsets: OffsetArray | None = None) -> BoolArray:
    """Which plain texts are not missing, bool [n].

    Args:
        texts: string or large_string [n].
        missing_values: texts, besides the empty one, that mean missing.
        offsets: of :func:`text_bytes`, where it was called already.
    """
    if missing_values:
        listed: BoolArray = ~missing_texts(texts, missing_values).to_numpy(zero_copy_only=False)
        return listed
    if offsets is None:
        offsets, _ = text_bytes(texts)
    present: BoolArray = offsets[1:] != offsets[:-1]
    if texts.null_count:
        present &= texts.is_valid().to_numpy(zero_copy_only=False)
    return present


def missing_texts(texts: pa.Array, missing_values: Sequence[str]) -> pa.Array:
    """Whether each text means missing: null, empty, or one of ``missing_values``; boolean array."""
    return pc.is_in(texts, value_set=pa.array([None, "", *missing_values], texts.type))


def null_where_absent(texts: pa.Array, present: BoolArray) -> pa.Array:
    """Plain texts with a null for each that is not ``present``; shares the bytes."""
    _, offsets, content = texts.buffers()
    if offsets is None:
        return texts
    width = 8 if pa.types.is_large_string(texts.type) else 4
    valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    return type(texts).from_buffers(len(texts), offsets.slice(texts.offset * width), content, valid)


def without_views(columns: pa.Table, *, nested_only: bool = False) -> pa.Table:
    """The columns with large_string in the place of string_view, as :func:`plain_text`.

    Args:
        columns: of any types.
        nested_only: leave columns alone that are string_view themselves.
    """
    for position, kind in enumerate(columns.schema.types):
        if is_plain_text(kind) or (nested_only and pa.types.is_string_view(kind)):
            continue
        plain = _without_views(columns.column(position), kind)
        if plain is not None:
            columns = columns.set_column(position, columns.schema.names[position], plain)
    return columns


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array; the dictionaries of its chunks are unified."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def shown(value: object) -> str:
    """A cell's value for a message, shortened."""
    return "" if value is None else str(value)[:SHOWN_CHARACTERS]


def _without_views(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | None:
    """None: it has none."""
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    nested = pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not nested or not pa.types.is_string_view(kind.value_type):
        return None
    if not pa.types.is_dictionary(kind):
        return column.cast(pa.large_list(pa.large_string()))
    return pa.chunked_array(
        [
            pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(pa.large_string()))
            for chunk in column.chunks
        ],
        pa.dictionary(kind.index_type, pa.large_string()),
    )


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


def _as_text(values: pa.Array) -> pa.Array:
    """Each distinct value as text, large_string; nulls stay."""
    if not pa.types.is_floating(values.type):
        return values.cast(pa.large_string())
    numbers = values.cast(pa.float64()).fill_null(np.nan).to_numpy()
    whole = (np.abs(numbers) < LARGEST_EXACT_FLOAT) & (numbers == np.trunc(numbers))
    integers = pa.array(np.where(whole, numbers, 0).astype(np.int64)).cast(pa.large_string())
    texts = pc.if_else(pa.array(whole), integers, values.cast(pa.large_string()))
    return pc.if_else(pa.array(np.isnan(numbers)), None, texts)


def _parse(texts: pa.Array, missing_values: Sequence[str]) -> FloatArray:
    if not missing_values and (views := views_of(texts)) is not None:
        numbers = parse_whole(views)
        if numbers is not None:
            return numbers
    texts = plain_text(texts)
    present = present_texts(texts, missing_values)
    try:
        # As they are: trimming all of them takes longer than parsing them.
        return _nan_for_null(null_where_absent(texts, present).cast(pa.float64()), present)
    except pa.ArrowInvalid:
        trimmed = pc.utf8_trim_whitespace(texts)
    trimmed = null_where_absent(trimmed, present_texts(trimmed, missing_values))
    bad = unparsable(trimmed, pa.float64())
    if len(bad):
        found = trimmed.take(pa.array(bad)).to_pylist()
        raise BadCellsError(bad, [f"found {shown(text)!r}, expected a number" for text in found])
    return _nan_for_null(trimmed.cast(pa.float64()))


def _uint64_array(numbers: npt.NDArray[np.uint64]) -> pa.Array:
    return pa.Array.from_buffers(pa.uint64(), len(numbers), [None, pa.py_buffer(numbers)], null_count=0)


def _nan_for_null(numbers: pa.Array, valid: BoolArray | None = None) -> FloatArray:
    """A float64 array for NumPy; ``valid``, bool [n], spares unpacking the array's own bits."""
    if not numbers.null_count:
        values: FloatArray = numbers.to_numpy()
        return values
    if valid is None:
        valid = numbers.is_valid().to_numpy(zero_copy_only=False)
    content = np.frombuffer(numbers.buffers()[1], dtype=np.float64)[numbers.offset : numbers.offset + len(numbers)]
    return np.where(valid, content, np.nan)
