"""The ``vocabulary`` encoding: each category that training saw often enough has a row of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data.block import RowArray
from data.features.arrays_file import numbers_of
from data.features.cells import text_bytes
from data.features.encoding import FIRST_ROW, MISSING_ROW, UNSEEN_ROW, IntArray, narrow_rows
from data.features.hashing import HashArray, hash_texts
from data.features.raw import RawSparse
from data.text_views import WORD_BYTES

INDEX_SHARE = 7
"""A vocabulary that is looked into takes more memory by one part in so many."""


@dataclass(frozen=True)
class Vocabulary:
    """Categories in table order: the most frequent first, equally frequent ones by text.

    Texts are found by their 64-bit hash and then compared, so none is ever taken for another; short ones by their
    length, which is as good (see :mod:`data.features.hashing`). All parts can be memory
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

    @classmethod
    def restored(cls, state: Mapping[str, pa.Array]) -> Vocabulary:
        """From what :meth:`state` gave; no copy is made."""
        return cls(state["categories"], numbers_of(state["hashes"]), numbers_of(state["positions"]))

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
        lengths = _lengths(texts)
        all_short = not len(lengths) or int(lengths.max()) <= WORD_BYTES
        at = self._first_places(wanted)
        pending = np.flatnonzero(at < len(self.hashes))
        # More than one turn only where several categories share a hash.
        while len(pending):
            pending = pending[self.hashes[at[pending]] == wanted[pending]]
            candidates = self.positions[at[pending]]
            if all_short:  # of one length and one hash there is one text
                is_same = self._category_lengths(candidates) == lengths[pending]
            else:
                same = pc.equal(self.categories.take(pa.array(candidates)), texts.take(pa.array(pending)))
                is_same = same.to_numpy(zero_copy_only=False)
            found[pending[is_same]] = candidates[is_same]
            pending = pending[~is_same]
            at[pending] += 1
            pending = pending[at[pending] < len(self.hashes)]
        return found

    @cached_property
    def _bins(self) -> tuple[npt.NDArray[np.int64 | np.int32], np.uint64]:
        """Where the hashes start that begin with each number, at most one such number a category; and how to get it.

        It takes up to 4 bytes a category (8 past 2^31), a seventh of what the vocabulary itself takes.
        """
        bits = max(1, len(self.hashes).bit_length() - 1)
        shift = np.uint64(64 - bits)
        starts = np.searchsorted(self.hashes, np.arange(1 << bits, dtype=np.uint64) << shift)
        return narrow_rows(starts, FIRST_ROW + len(self.hashes)), shift

    def _first_places(self, wanted: HashArray) -> IntArray:
        """As ``np.searchsorted(self.hashes, wanted)``, int64: hashes are spread evenly, so a few steps do."""
        starts, shift = self._bins
        at: IntArray = starts[wanted >> shift].astype(np.int64)
        pending = np.flatnonzero(at < len(self.hashes))
        while len(pending):
            pending = pending[self.hashes[at[pending]] < wanted[pending]]
            at[pending] += 1
            pending = pending[at[pending] < len(self.hashes)]
        return at

    def _category_lengths(self, positions: RowArray) -> IntArray:
        offsets, _ = text_bytes(self.categories)
        return (offsets[positions + 1] - offsets[positions]).astype(np.int64)

    def encode(self, raw: RawSparse, fill: str | None) -> RowArray:
        """As :meth:`data.features.fitted.Encoding.encode`; what it lacks is unseen."""
        assert raw.texts is not None, "read as a vocabulary"
        texts = raw.texts
        if fill:
            texts = pa.concat_arrays([texts, pa.array([fill], texts.type)])
        found = self.find(texts)
        rows = np.where(found < 0, UNSEEN_ROW, found + FIRST_ROW)
        special = [MISSING_ROW, rows[-1] if fill else MISSING_ROW]
        return narrow_rows(np.concatenate([special, rows]), self.table_rows).take(raw.values)

    def state(self) -> dict[str, pa.Array]:
        """The categories and the way to find them."""
        return {
            "categories": self.categories,
            "hashes": pa.array(self.hashes),
            "positions": pa.array(self.positions),
        }


def _lengths(texts: pa.Array) -> IntArray:
    offsets, _ = text_bytes(texts)
    return (offsets[1:] - offsets[:-1]).astype(np.int64)
