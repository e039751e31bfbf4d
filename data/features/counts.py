"""How often categories occur: counted chunk by chunk, merged from files in bounded memory.

What is stored of a chunk lies in 256 partitions by the highest byte of the texts' hashes. A text is in the same
partition of every chunk, so partitions can be merged one after the other where all together do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.features.cells import one_array
from data.features.encoding import IntArray
from data.features.hashing import hash_texts
from data.features.raw import offsets_of

PARTITIONS = 256
MERGE_COPIES = 4
"""Merging holds its input, the result, and a hash table with the texts and their counts."""

_SCHEMA = pa.schema({"text": pa.large_string(), "count": pa.int64()})


@dataclass(frozen=True)
class PartitionedCounts:
    """Texts and how often each occurs, by partition; memory of a file will do.

    Attributes:
        texts: large_string [E].
        counts: int64 [E].
        starts: int64 [PARTITIONS + 1], where each partition starts, and E.
    """

    texts: pa.Array
    counts: pa.Array
    starts: IntArray

    def select(self, first: int, last: int) -> pa.Table:
        """The partitions from ``first`` to ``last`` - 1: columns ``text`` and ``count``."""
        start, length = int(self.starts[first]), int(self.starts[last] - self.starts[first])
        return pa.Table.from_arrays([self.texts.slice(start, length), self.counts.slice(start, length)], schema=_SCHEMA)

    @property
    def num_bytes(self) -> int:
        """Size of all entries."""
        return int(self.texts.nbytes + self.counts.nbytes)


class CategoryCounts:
    """Counts categories in memory proportional to their number, not to the rows'."""

    def __init__(self) -> None:
        self._counted = _SCHEMA.empty_table()
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, entries: pa.Table) -> None:
        """Adds ``text`` and ``count``; a text may be there twice."""
        self._pending.append(entries)
        self._pending_rows += entries.num_rows
        # Merging when the pending texts outnumber the counted ones keeps the whole work linear.
        if self._pending_rows > self._counted.num_rows:
            self._merge()

    def finish(self) -> pa.Table:
        """``text``, each once, and ``count``, in no particular order."""
        self._merge()
        return self._counted

    def _merge(self) -> None:
        if not self._pending:
            return
        both = pa.concat_tables([self._counted, *self._pending])
        merged = both.group_by("text", use_threads=False).aggregate([("count", "sum")])
        self._counted = merged.select(["text", "count_sum"]).rename_columns(["text", "count"])
        self._pending, self._pending_rows = [], 0


def entries(texts: pa.Array, counts: IntArray) -> pa.Table:
    """What :meth:`CategoryCounts.add` takes, of the texts that occur at all."""
    occurs = counts > 0
    if not occurs.all():
        texts, counts = texts.filter(pa.array(occurs)), counts[occurs]
    return pa.Table.from_arrays([texts, pa.array(counts)], schema=_SCHEMA)


def partitioned(counted: pa.Table) -> PartitionedCounts:
    """Puts entries in the order of their partitions."""
    texts = one_array(counted["text"])
    partition_of = (hash_texts(texts) >> np.uint64(56)).astype(np.uint8)
    order = pa.array(np.argsort(partition_of, kind="stable"))
    sizes = np.bincount(partition_of, minlength=PARTITIONS)
    return PartitionedCounts(texts.take(order), one_array(counted["count"]).take(order), offsets_of(sizes))


def frequent_categories(
    parts: Iterable[Callable[[], PartitionedCounts]],
    min_count: int,
    max_categories: int | None,
    memory_bytes: int | None,
) -> pa.Array:
    """Texts that occur at least ``min_count`` times in all parts, the most frequent first, then by text.

    Args:
        parts: each opens what one part counted; called once more for each pass, so that no file stays open.
        min_count: frequency threshold.
        max_categories: longest result; None: no bound.
        memory_bytes: several passes keep what is merged at a time below this, where a partition alone does not exceed
            it; the result comes on top. None: one pass.

    Returns:
        large_string [C].
    """
    parts = list(parts)
    passes = _count_passes(sum(part().num_bytes for part in parts), memory_bytes)
    kept = _SCHEMA.empty_table()
    for first in range(0, PARTITIONS, PARTITIONS // passes):
        counts = CategoryCounts()
        for part in parts:
            counts.add(part().select(first, first + PARTITIONS // passes))
        frequent = counts.finish().filter(pc.field("count") >= min_count)
        kept = pa.concat_tables([kept, frequent])
        if max_categories is not None and kept.num_rows > max_categories:
            kept = _ordered(kept).slice(0, max_categories)
    return one_array(_ordered(kept)["text"])


def _ordered(counted: pa.Table) -> pa.Table:
    return counted.sort_by([("count", "descending"), ("text", "ascending")])


def _count_passes(num_bytes: int, memory_bytes: int | None) -> int:
    """A power of two, so that every pass has as many partitions."""
    passes = 1
    while memory_bytes is not None and passes < PARTITIONS and num_bytes * MERGE_COPIES > memory_bytes * passes:
        passes *= 2
    return passes
