"""Fitting the features: what training rows say about moments, touched buckets and vocabularies."""

from __future__ import annotations

import numpy as np

from data.features.bags import CellBags
from data.features.cells import select_cells
from data.features.columns import cells_of, columns_of, read_dense, read_sparse
from data.features.dense import Moments, Standard
from data.features.encoding import BoolArray, Fit
from data.features.fitted import Features, size_of
from data.features.hashing import HashFit
from data.features.id_range import IdRange
from data.features.vocabulary import VocabularyFit
from data.sources.source import Block
from erase_rec.config.schema import FeaturesConfig, SparseFeatureConfig


class FeaturesFit:
    """Collects what the features need to know of the training rows."""

    def __init__(self, config: FeaturesConfig) -> None:
        """Takes the features, defaults filled in."""
        self._config = config
        self._moments = [Moments() if feature.transform == "standardize" else None for feature in config.dense]
        self._fits = [_fit_of(feature) for feature in config.sparse]

    @property
    def columns(self) -> list[str]:
        """Columns that :meth:`add` reads; empty where nothing is to be fitted."""
        dense = [feature for feature, moments in zip(self._config.dense, self._moments, strict=True) if moments]
        sparse = [feature for feature, fit in zip(self._config.sparse, self._fits, strict=True) if fit]
        return columns_of(*dense, *sparse)

    def add(self, block: Block, keep: BoolArray) -> None:
        """Adds the rows of ``block`` where ``keep`` [rows] is true.

        Raises:
            DataError: a cell or a column cannot be read; names file, line, column and the way out.
        """
        for dense, moments in zip(self._config.dense, self._moments, strict=True):
            if moments is not None:
                moments.add(read_dense(block, dense)[keep])
        for sparse, fit in zip(self._config.sparse, self._fits, strict=True):
            if fit is not None:
                cells = read_sparse(block, sparse)
                kept = np.repeat(keep, np.diff(cells.offsets)) if isinstance(cells, CellBags) else keep
                fit.add(*select_cells(cells_of(cells), kept))

    def finish(self) -> Features:
        """The fitted features."""
        standards = tuple(Standard() if moments is None else moments.finish() for moments in self._moments)
        encodings = tuple(
            IdRange(size_of(feature)) if fit is None else fit.finish()
            for feature, fit in zip(self._config.sparse, self._fits, strict=True)
        )
        return Features(self._config, standards, encodings)


def _fit_of(feature: SparseFeatureConfig) -> Fit | None:
    match feature.encoding:
        case "hash":
            return HashFit(size_of(feature))
        case "vocabulary":
            return VocabularyFit(feature.min_count, feature.num_embeddings)
        case "id":
            return None
