"""Multi-valued columns: bags of categorical cells, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data.features.cells import (
    BadCellError,
    BadColumnError,
    Cells,
    is_text,
    missing_texts,
    one_chunk,
    read_categories,
    read_numbers,
)
from data.features.encoding import IntArray

BAG_TYPES = "a list of integers, floats, decimals, booleans or texts, or text with a separator"


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
    flat, lengths = _flatten(one_chunk(column), separator, missing_values)
    weight = None if weights is None else _read_weights(one_chunk(weights), lengths, separator)
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


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Positions ``starts[i]``, ``starts[i] + 1``, ... of ``lengths[i]`` values for each i, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _flatten(array: pa.Array, separator: str | None, missing_values: Sequence[str]) -> tuple[pa.Array, IntArray]:
    """All bags' values and each bag's length, int64 [n]."""
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(0), np.zeros(len(array), dtype=np.int64)
    if pa.types.is_dictionary(kind):
        array = array.cast(kind.value_type)
    if is_text(array.type) and separator is not None:
        texts = array.cast(pa.large_string())
        array = pc.split_pattern(pc.if_else(missing_texts(texts, missing_values), None, texts), separator)
    elif is_text(array.type):
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
