"""The ``vocabulary`` encoding: each category that training saw often enough has a row of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.block import RowArray
from data.features.encoding import FIRST_ROW, MISSING_ROW, UNSEEN_ROW, IntArray, narrow_rows
from data.features.hashing import HashArray, hash_texts
from data.features.raw import RawSparse


@dataclass(frozen=True)
class Vocabulary:
    """Categories in table order: the most frequent first, equally frequent ones by text.

    Texts are found by their 64-bit hash and then compared, so none is ever taken for another. All parts can be memory
    of a file, which processes that encode share.

    Attributes:
        categories: distinct texts, large_string [C].
        hashes: uint64 [C], theirs, ascending.
        positions: int32 or int64 [C], the category that each of ``hashes`` belongs to.
    """

    categories: pa.Array
    hashes: HashArray
    positions: RowArray

    @classmethod
    def of(cls, categories: pa.Array) -> Vocabulary:
        """From distinct texts in table order, large_string [C]."""
        hashes = hash_texts(categories)
        positions = np.argsort(hashes)
        return cls(categories, hashes[positions], narrow_rows(positions, FIRST_ROW + len(categories)))

    @property
    def table_rows(self) -> int:
        """Categories and the two special rows."""
        return FIRST_ROW + len(self.categories)

    def find(self, texts: pa.Array) -> IntArray:
        """Position of each text among the categories, int64 [n]; -1: it is none of them.

        Args:
            texts: large_string [n] without nulls.
        """
        wanted = hash_texts(texts)
        found = np.full(len(texts), -1, dtype=np.int64)
        at = np.searchsorted(self.hashes, wanted)
        pending = np.arange(len(texts))
        # More than one turn only where several categories share a hash.
        while len(pending):
            inside = at[pending] < len(self.hashes)
            pending = pending[inside]
            pending = pending[self.hashes[at[pending]] == wanted[pending]]
            candidates = self.positions[at[pending]]
            same = pc.equal(self.categories.take(pa.array(candidates)), texts.take(pa.array(pending)))
            is_same = same.to_numpy(zero_copy_only=False)
            found[pending[is_same]] = candidates[is_same]
            pending = pending[~is_same]
            at[pending] += 1
        return found

    def encode(self, raw: RawSparse, fill: str | None) -> RowArray:
        """As :meth:`data.features.fitted.Encoding.encode`; what it lacks is unseen."""
        assert raw.texts is not None, "read as a vocabulary"
        texts = raw.texts
        if fill:
            texts = pa.concat_arrays([texts, pa.array([fill], texts.type)])
        found = self.find(texts)
        rows = np.where(found < 0, UNSEEN_ROW, found + FIRST_ROW)
        special = [MISSING_ROW, rows[-1] if fill else MISSING_ROW]
        return narrow_rows(np.concatenate([special, rows]), self.table_rows)[raw.values]

    def state(self) -> dict[str, pa.Array]:
        """The categories and the way to find them."""
        return {
            "categories": self.categories,
            "hashes": pa.array(self.hashes),
            "positions": pa.array(self.positions),
        }
