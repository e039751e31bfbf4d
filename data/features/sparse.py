"""Categorical features as they are read: single cells or bags, of any encoding."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from data.errors import DataError
from data.features.bags import bags_of, flatten, ragged_positions, read_weights
from data.features.cells import BadCellsError, one_array, read_categories
from data.features.columns import column_of, size_of
from data.features.derived import derive
from data.features.encoding import FILLED_ROW, MISSING_ROW
from data.features.hashing import read_buckets
from data.features.id_range import read_ids
from data.features.raw import RawSparse, offsets_of
from erase_rec.config.schema import SparseFeatureConfig


def read_sparse(columns: pa.Table, feature: SparseFeatureConfig) -> RawSparse:
    """Reads a categorical feature; a bag that is longer than its ``max_length`` keeps its first values.

    With ``fill`` an empty bag becomes the bag of that one category, of weight 1.

    Raises:
        BadCellsError: cells that cannot be read; positions are rows.
        BadWeightsError: the same of the column of weights.
        BadColumnError: a column's type cannot be read.
        DataError: ``fill`` is no id of the feature.
    """
    column = one_array(columns[column_of(feature)])
    if not feature.multi_valued:
        return _read_cells(column, feature)
    cells, lengths = flatten(column, feature.separator, feature.missing_values)
    weights = None
    if feature.weights is not None:
        weights = read_weights(one_array(columns[feature.weights]), lengths, feature.separator)
    if feature.max_length is not None and (lengths > feature.max_length).any():
        starts, lengths = np.cumsum(lengths) - lengths, np.minimum(lengths, feature.max_length)
        kept = ragged_positions(starts, lengths)
        cells, weights = cells.take(pa.array(kept)), None if weights is None else weights[kept]
    try:
        read = _read_cells(cells, feature)
    except BadCellsError as error:
        raise BadCellsError(*bags_of(error, lengths)) from None
    values = read.values
    if feature.fill:
        empty = lengths == 0
        starts = (np.cumsum(lengths) - lengths)[empty]
        values = np.insert(values, starts, FILLED_ROW)
        weights = None if weights is None else np.insert(weights, starts, 1.0)
        lengths = np.where(empty, 1, lengths)
    return RawSparse(values, read.texts, offsets_of(lengths), weights)


def _read_cells(cells: pa.Array, feature: SparseFeatureConfig) -> RawSparse:
    missing_row, missing_values = FILLED_ROW if feature.fill else MISSING_ROW, feature.missing_values
    if feature.derive is not None:
        cells, missing_values = derive(cells, feature.derive, missing_values), ()  # missing cells are null then
    match feature.encoding:
        case "hash":
            return RawSparse(read_buckets(cells, size_of(feature), missing_values, missing_row))
        case "id":
            _check_fill(feature)
            return RawSparse(read_ids(cells, size_of(feature), missing_values, missing_row))
        case "vocabulary":
            categories = read_categories(cells, missing_values, missing_row=missing_row)
            return RawSparse(categories.values, categories.texts)


def _check_fill(feature: SparseFeatureConfig) -> None:
    """A ``fill`` that is no id is a mistake of the configuration, not of the rows that need it."""
    if not feature.fill:
        return
    try:
        read_ids(pa.array([feature.fill]), size_of(feature), (), MISSING_ROW)
    except BadCellsError:
        raise DataError(
            f"features: {feature.name!r}: fill {feature.fill!r} is no id; encoding: id needs a whole number from 0 to "
            f"{size_of(feature) - 1} (num_embeddings: {size_of(feature)})"
        ) from None
