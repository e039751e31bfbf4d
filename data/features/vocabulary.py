"""The ``vocabulary`` encoding: each category that training saw often enough has a row of its own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from data.features.encoding import FIRST_ROW, MISSING_ROW, UNSEEN_ROW, IntArray


class Vocabulary:
    """Categories in table order: the most frequent first, equally frequent ones by text."""

    def __init__(self, categories: pa.Array) -> None:
        """Takes distinct texts, large_string [C]."""
        self._categories = categories
        self._index = pd.Index(categories.to_numpy(zero_copy_only=False), dtype=object)

    @property
    def table_rows(self) -> int:
        """Categories and the two special rows."""
        return FIRST_ROW + len(self._categories)

    def rows(self, texts: pa.Array) -> IntArray:
        """As :meth:`data.features.encoding.Encoding.rows`; what it lacks is unseen, nothing is refused."""
        found = self._index.get_indexer(pd.Index(texts.to_numpy(zero_copy_only=False), dtype=object))
        rows = np.where(found < 0, UNSEEN_ROW, found + FIRST_ROW)
        rows[texts.is_null().to_numpy(zero_copy_only=False)] = MISSING_ROW
        return rows

    def state(self) -> pa.Array:
        """The categories."""
        return self._categories


class VocabularyFit:
    """Counts categories in memory proportional to their number, not to the rows'."""

    def __init__(self, min_count: int, max_categories: int | None) -> None:
        """Takes the frequency threshold and the largest size; None: no bound."""
        self._min_count, self._max_categories = min_count, max_categories
        self._counted = pa.table({"text": pa.array([], pa.large_string()), "count": pa.array([], pa.int64())})
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, texts: pa.Array, counts: IntArray) -> None:
        """As :meth:`data.features.encoding.Fit.add`."""
        self._pending.append(pa.table({"text": texts, "count": pa.array(counts)}))
        self._pending_rows += len(texts)
        # Merging when the pending texts outnumber the counted ones keeps the whole work linear.
        if self._pending_rows > self._counted.num_rows:
            self._merge()

    def finish(self) -> Vocabulary:
        """The frequent categories."""
        self._merge()
        frequent = self._counted.filter(pc.field("count") >= self._min_count)
        ordered = frequent.sort_by([("count", "descending"), ("text", "ascending")])
        return Vocabulary(ordered["text"].slice(0, self._max_categories).combine_chunks())

    def _merge(self) -> None:
        both = pa.concat_tables([self._counted, *self._pending])
        merged = both.group_by("text", use_threads=False).aggregate([("count", "sum")])
        self._counted = merged.rename_columns(["text", "count"])
        self._pending, self._pending_rows = [], 0
