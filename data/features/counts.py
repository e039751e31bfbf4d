"""How often categories occur: counted chunk by chunk, merged from files in bounded memory.

What is stored of a chunk lies in 256 partitions by the highest byte of the texts' hashes. A text is in the same
partition of every chunk, so partitions can be merged one after the other where all together do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.features.cells import distinct_texts
from data.features.encoding import BoolArray, IntArray
from data.features.hashing import hash_texts
from data.features.raw import offsets_of

PARTITIONS = 256
MERGE_COPIES = 8
"""Merging holds its input, copies of it, a hash table and the result: measured 6 to 7 times the input where no text is
in two parts, which is the worst."""
MERGE_BYTES = 256 << 20
"""Bound of a merge where none is given: more is not faster, since small hash tables stay in the cache."""

MIN_PENDING = 1 << 16
"""Fewer entries are not worth a merge."""
MAX_PENDING_ARRAYS = 512
"""More arrays, each maybe a mapping of a file of its own, are copied into one: mappings are limited, too."""


@dataclass(frozen=True)
class Counted:
    """Texts and how often each occurs.

    Attributes:
        texts: large_string [E] without nulls.
        counts: int64 [E], at least 1.
    """

    texts: pa.Array
    counts: IntArray

    @classmethod
    def occurring(cls, texts: pa.Array, counts: IntArray) -> Counted:
        """Of ``counts`` that may be 0."""
        return cls(texts, counts).where(counts > 0)

    def where(self, keep: BoolArray) -> Counted:
        """The entries at which ``keep``, bool [E], is true."""
        return self if keep.all() else Counted(self.texts.filter(pa.array(keep)), self.counts[keep])

    def take(self, order: IntArray) -> Counted:
        """The entries at these positions."""
        return Counted(self.texts.take(pa.array(order)), self.counts[order])

    def slice(self, start: int, stop: int) -> Counted:
        """The entries from ``start`` to ``stop`` - 1, without a copy."""
        return Counted(self.texts.slice(start, stop - start), self.counts[start:stop])


@dataclass(frozen=True)
class Partitioned:
    """Entries in the order of their partitions; memory of a file will do.

    Attributes:
        entries: E of them.
        starts: int64 [PARTITIONS + 1], where each partition starts, and E.
    """

    entries: Counted
    starts: IntArray

    @classmethod
    def of(cls, entries: Counted) -> Partitioned:
        """Puts entries in order."""
        partition_of = (hash_texts(entries.texts) >> np.uint64(56)).astype(np.uint8)
        order = np.argsort(partition_of, kind="stable")
        return cls(entries.take(order), offsets_of(np.bincount(partition_of, minlength=PARTITIONS)))

    def select(self, first: int, last: int) -> Counted:
        """The partitions from ``first`` to ``last`` - 1."""
        return self.entries.slice(int(self.starts[first]), int(self.starts[last]))

    @property
    def num_bytes(self) -> int:
        """Size of all entries."""
        return int(self.entries.texts.nbytes + self.entries.counts.nbytes)


class CategoryCounts:
    """Counts categories in memory proportional to their number, not to the rows'."""

    def __init__(self) -> None:
        self._counted = _joined([])
        self._pending: list[Counted] = []
        self._pending_rows = 0

    def add(self, entries: Counted) -> None:
        """Adds entries; a text may be there twice."""
        self._pending.append(entries)
        self._pending_rows += len(entries.counts)
        # Merging when the pending entries outnumber the counted ones keeps the whole work linear.
        if self._pending_rows > max(len(self._counted.counts), MIN_PENDING):
            self._merge()
        elif len(self._pending) > MAX_PENDING_ARRAYS:
            self._pending = [_joined(self._pending)]

    def finish(self) -> Counted:
        """Each text once, in no particular order."""
        if self._pending:
            self._merge()
        return self._counted

    def _merge(self) -> None:
        both = _joined([self._counted, *self._pending])
        codes, texts = distinct_texts(both.texts)
        counts = np.zeros(len(texts), dtype=np.int64)
        np.add.at(counts, codes, both.counts)
        self._counted = Counted(texts, counts)
        self._pending, self._pending_rows = [], 0


def frequent_categories(
    parts: Sequence[Callable[[], Partitioned]],
    min_count: int,
    max_categories: int | None,
    memory_bytes: int = MERGE_BYTES,
) -> pa.Array:
    """Texts that occur at least ``min_count`` times in all parts, the most frequent first, then by text.

    Args:
        parts: each opens what one part counted; called once for its size and once for each pass, so that no
            file stays mapped.
        min_count: frequency threshold.
        max_categories: longest result; None: no bound.
        memory_bytes: several passes keep what is merged at a time below this, unless a single partition exceeds it;
            the result comes on top.

    Returns:
        large_string [C].
    """
    passes = _count_passes(sum(part().num_bytes for part in parts), memory_bytes)
    width = PARTITIONS // passes
    kept = _joined([])
    for first in range(0, PARTITIONS, width):
        counts = CategoryCounts()
        for part in parts:
            counts.add(part().select(first, first + width))
        counted = counts.finish()
        kept = _joined([kept, counted.where(counted.counts >= min_count)])
        if max_categories is not None and len(kept.counts) > max_categories:
            kept = _most_frequent(kept).slice(0, max_categories)
    return _most_frequent(kept).texts


def _joined(entries: Sequence[Counted]) -> Counted:
    return Counted(
        pa.concat_arrays([pa.array([], pa.large_string()), *(each.texts for each in entries)]),
        np.concatenate([np.empty(0, dtype=np.int64), *(each.counts for each in entries)]),
    )


def _most_frequent(counted: Counted) -> Counted:
    """By count, descending, then by text, ascending."""
    table = pa.table({"text": counted.texts, "count": pa.array(counted.counts)})
    order = pc.sort_indices(table, sort_keys=[("count", "descending"), ("text", "ascending")])
    return counted.take(order.to_numpy())


def _count_passes(num_bytes: int, memory_bytes: int) -> int:
    """A power of two, so that every pass has as many partitions."""
    passes = 1
    while passes < PARTITIONS and num_bytes * MERGE_COPIES > memory_bytes * passes:
        passes *= 2
    return passes
