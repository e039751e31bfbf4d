"""The ``id`` encoding: categories that are already numbered from 0."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.features.cells import BadCellError, first_unparsable
from data.features.encoding import FIRST_ROW, MISSING_ROW, IntArray


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

    def rows(self, texts: pa.Array) -> IntArray:
        """As :meth:`data.features.encoding.Encoding.rows`; refuses what is no whole number of the range."""
        try:
            numbers = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            raise self._refused(texts, first_unparsable(texts, pa.int64())) from None
        ids = numbers.fill_null(0).to_numpy()
        outside = (ids < 0) | (ids >= self.num_embeddings)
        if outside.any():
            raise self._refused(texts, int(outside.argmax()))
        return np.where(numbers.is_null().to_numpy(zero_copy_only=False), MISSING_ROW, ids + FIRST_ROW)

    def state(self) -> pa.Array:
        """Nothing."""
        return pa.array([], pa.int64())

    def _refused(self, texts: pa.Array, position: int) -> BadCellError:
        return BadCellError(
            position,
            f"found id {texts[position].as_py()!r}, expected a whole number from 0 to {self.num_embeddings - 1} "
            f"(num_embeddings: {self.num_embeddings}); raise num_embeddings, list the value in missing_values, "
            "or use encoding: hash or vocabulary",
        )
