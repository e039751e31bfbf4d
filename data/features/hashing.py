"""The ``hash`` encoding: a category's bucket is a hash of its text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pandas.util import hash_array

from data.features.encoding import FIRST_ROW, MISSING_ROW, UNSEEN_ROW, BoolArray, IntArray


def hash_texts(texts: pa.Array) -> npt.NDArray[np.uint64]:
    """64-bit hash of each non-null text (SipHash with a fixed key: the same in every process and on every machine)."""
    return hash_array(texts.to_numpy(zero_copy_only=False), categorize=False)


@dataclass(frozen=True)
class HashBuckets:
    """Buckets with the memory of which ones training touched.

    A bucket that no training row touched holds an untrained vector: its categories are unseen for certain and take
    row 1. An unseen category that collides with a touched bucket goes unnoticed, so the unseen share is a lower bound.

    Attributes:
        seen: bool [num_embeddings].
    """

    seen: BoolArray

    @property
    def table_rows(self) -> int:
        """Buckets and the two special rows."""
        return FIRST_ROW + len(self.seen)

    def rows(self, texts: pa.Array) -> IntArray:
        """As :meth:`data.features.encoding.Encoding.rows`; never refuses a text."""
        buckets = _buckets(texts.fill_null(""), len(self.seen))
        rows = np.where(self.seen[buckets], buckets + FIRST_ROW, UNSEEN_ROW)
        rows[texts.is_null().to_numpy(zero_copy_only=False)] = MISSING_ROW
        return rows

    def state(self) -> pa.Array:
        """The touched buckets, ascending."""
        return pa.array(np.flatnonzero(self.seen))

    @classmethod
    def restore(cls, state: pa.Array, num_embeddings: int) -> HashBuckets:
        """From :meth:`state`."""
        seen = np.zeros(num_embeddings, dtype=np.bool_)
        seen[state.to_numpy()] = True
        return cls(seen)


class HashFit:
    """Marks the touched buckets."""

    def __init__(self, num_embeddings: int) -> None:
        self._seen: BoolArray = np.zeros(num_embeddings, dtype=np.bool_)

    def add(self, texts: pa.Array, counts: IntArray) -> None:
        """As :meth:`data.features.encoding.Fit.add`."""
        self._seen[_buckets(texts, len(self._seen))] = True

    def finish(self) -> HashBuckets:
        """The buckets."""
        return HashBuckets(self._seen)


def _buckets(texts: pa.Array, num_embeddings: int) -> IntArray:
    return (hash_texts(texts) % np.uint64(num_embeddings)).astype(np.int64)
