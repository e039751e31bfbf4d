"""Multi-valued columns: bags of categorical cells, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data.features.cells import BadCellsError, BadColumnError, is_text, missing_texts, read_numbers
from data.features.encoding import IntArray

BAG_TYPES = "a list of integers, floats, decimals, booleans or texts, or text with a separator"


class BadWeightsError(BadCellsError):
    """Weights that cannot be read, or do not match the values."""


def flatten(array: pa.Array, separator: str | None, missing_values: Sequence[str]) -> tuple[pa.Array, IntArray]:
    """Takes bags apart: lists, or text split at ``separator``, which has no meaning for lists.

    A null list, an empty list and a missing text are the same empty bag; a missing value inside a bag is a missing
    cell.

    Returns:
        The cells of all bags [V], one bag after the other, and each bag's length, int64 [n].

    Raises:
        BadColumnError: the type holds no bags of categories.
    """
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


def read_weights(array: pa.Array, lengths: IntArray, separator: str | None) -> npt.NDArray[np.float32]:
    """Reads a number for each value of the bags, in the same form; finite float32 [V].

    Args:
        array: bags of weights.
        lengths: int64 [n], lengths of the bags of values.
        separator: as of :func:`flatten`.

    Raises:
        BadWeightsError: they do not match the values, or are no finite numbers of float32; all that are of one kind.
        BadColumnError: the type holds no bags of numbers.
    """
    flat, found = flatten(array, separator, ())
    if not np.array_equal(found, lengths):
        rows = np.flatnonzero(found != lengths)
        pairs = zip(found[rows].tolist(), lengths[rows].tolist(), strict=True)
        raise BadWeightsError(
            rows, [f"found {some} weights for {all_} values, expected one for each" for some, all_ in pairs]
        )
    try:
        weights = read_numbers(flat)
    except BadCellsError as error:
        raise BadWeightsError(*bags_of(error, lengths, "a weight: ")) from None
    with np.errstate(over="ignore"):
        narrow = weights.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(narrow))
    if len(bad):
        messages = [f"found {weight}, expected a finite number of float32" for weight in weights[bad].tolist()]
        raise BadWeightsError(*bags_of(BadCellsError(bad, messages), lengths, "a weight: "))
    return narrow


def bags_of(error: BadCellsError, lengths: IntArray, prefix: str = "") -> tuple[IntArray, list[str]]:
    """The bags that bad cells are in, each once, and the message of its first one; as of :class:`BadCellsError`."""
    bags = np.repeat(np.arange(len(lengths)), lengths)[error.rows]
    rows, first = np.unique(bags, return_index=True)
    return rows, [prefix + error.messages[position] for position in first]


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Positions ``starts[i]``, ``starts[i] + 1``, ... of ``lengths[i]`` values for each i, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
