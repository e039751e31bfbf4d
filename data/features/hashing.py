"""The ``hash`` encoding: a category's bucket is a hash of its text.

The hash is defined here and nowhere else, so that a bucket means the same on every machine and after every upgrade. A
text's n bytes of UTF-8 are cut into words w_0, w_1, ... of eight bytes, little-endian, the last one filled up with zero
bytes; the empty text has the one word 0. With G = 0x9E3779B97F4A7C15, and sums and products modulo 2^64:

    hash = m((n * G) xor (w_0 + m(w_1 + G) + m(w_2 + 2 * G) + ...))

m is SplitMix64's finalizer (Steele, Lea and Flood, 2014), a bijection, so of texts of up to eight bytes only one of
eight and a shorter one can collide, as rarely as any. The words' terms do not wait for each other, which lets NumPy
compute them for a whole column at once. The bucket is the hash modulo ``num_embeddings``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.block import RowArray
from data.features.cells import OffsetArray, is_plain_text, plain_text, present_texts, read_categories, text_bytes
from data.features.encoding import FILLED_ROW, FIRST_ROW, MISSING_ROW, UNSEEN_ROW, IntArray, narrow_rows
from data.features.raw import RawSparse
from data.text_views import FIRST_BYTES, INLINE_BYTES, WORD_BYTES, views_of

HashArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LENGTH_TERMS: HashArray = np.arange(INLINE_BYTES + 1, dtype=np.uint64) * _GOLDEN
"""n * G of the texts that are in their views."""
_MARKS_PER_ROW = 6
"""Bytes of bits a row, up to which a byte for each bit is faster than looking at the bits one by one."""
_BITS = np.array([1 << bit for bit in range(8)], dtype=np.uint8)


def hash_texts(texts: pa.Array) -> HashArray:
    """64-bit hash of each text, uint64 [n]; under a null anything.

    Args:
        texts: string or large_string; slices will do.
    """
    return _hash(*text_bytes(texts))


def _hash(offsets: OffsetArray, content: npt.NDArray[np.uint8]) -> HashArray:
    first = int(offsets[0])
    # The last word of the last text reads past its end.
    padded = np.zeros(int(offsets[-1]) - first + WORD_BYTES, dtype=np.uint8)
    padded[:-WORD_BYTES] = content[first : int(offsets[-1])]
    words = np.ndarray((len(padded) - WORD_BYTES + 1,), dtype="<u8", buffer=padded, strides=(1,))
    starts, lengths = offsets[:-1] - first, offsets[1:] - offsets[:-1]
    # A word at every byte: indexing copies only what is asked for.
    hashes: HashArray = words[starts]
    hashes &= FIRST_BYTES.take(np.minimum(lengths, WORD_BYTES))
    long = np.flatnonzero(lengths > WORD_BYTES)
    if len(long):
        hashes[long] += _further_words(words, starts[long].astype(np.int64), lengths[long].astype(np.int64))
    hashes ^= lengths.astype(np.uint64) * _GOLDEN
    return _mixed(hashes)


def _hash_views(views: npt.NDArray[np.void]) -> HashArray:
    """The same of texts that are all in their views."""
    lengths, hashes = views["length"], views["head"].copy()
    if len(lengths) and int(lengths.max()) > WORD_BYTES:
        long = np.flatnonzero(lengths > WORD_BYTES)
        hashes[long] += _mixed(views["tail"][long].astype(np.uint64) + _GOLDEN)
    hashes ^= _LENGTH_TERMS.take(lengths)
    return _mixed(hashes)


def bucket_rows(texts: pa.Array, num_embeddings: int) -> RowArray:
    """Table row of each text's bucket, int32 or int64 [n]; under a null anything."""
    return _bucket_rows(hash_texts(texts), num_embeddings)


def _bucket_rows(hashes: HashArray, num_embeddings: int) -> RowArray:
    """Overwrites ``hashes``."""
    # NumPy divides by a constant several times faster than it takes the remainder.
    hashes -= (hashes // np.uint64(num_embeddings)) * np.uint64(num_embeddings)
    hashes += np.uint64(FIRST_ROW)
    return narrow_rows(hashes, FIRST_ROW + num_embeddings)


def read_buckets(array: pa.Array, num_embeddings: int, missing_values: Sequence[str], missing_row: int) -> RowArray:
    """Table row of each cell's bucket, int32 or int64 [n]; ``missing_row`` for the missing ones.

    Raises:
        BadColumnError: the type holds no categories.
    """
    if not missing_values and (views := views_of(array)) is not None:
        rows = _bucket_rows(_hash_views(views), num_embeddings)
        rows[views["length"] == 0] = missing_row
        return rows
    array = plain_text(array)
    if is_plain_text(array.type):
        offsets, content = text_bytes(array)
        rows = _bucket_rows(_hash(offsets, content), num_embeddings)
        rows[~present_texts(array, missing_values, offsets)] = missing_row
        return rows
    categories = read_categories(array, missing_values, missing_row=missing_row)
    buckets = bucket_rows(categories.texts, num_embeddings)
    special = np.array([MISSING_ROW, FILLED_ROW], dtype=buckets.dtype)
    return np.concatenate([special, buckets])[categories.values]


@dataclass(frozen=True)
class HashBuckets:
    """Buckets with the memory of which ones training touched.

    A bucket that no training row touched holds an untrained vector: its categories are unseen for certain and take
    row 1. An unseen category that collides with a touched bucket goes unnoticed, so the unseen share is a lower bound.

    Attributes:
        num_embeddings: buckets.
        touched: as :func:`no_bucket` makes it and :func:`touch` marks it.
    """

    num_embeddings: int
    touched: npt.NDArray[np.uint8]

    @property
    def table_rows(self) -> int:
        """Buckets and the two special rows."""
        return FIRST_ROW + self.num_embeddings

    def encode(self, raw: RawSparse, fill: str | None) -> RowArray:
        """As :meth:`data.features.fitted.Encoding.encode`."""
        rows = fill_buckets(raw.values, self.num_embeddings, fill)
        seen = (self.touched.take(rows >> 3) >> (rows & 7).astype(np.uint8)) & 1
        return np.where(seen, rows, rows.dtype.type(UNSEEN_ROW))

    def state(self) -> dict[str, pa.Array]:
        """The touched buckets' bits."""
        return {"touched": pa.array(self.touched)}


def fill_buckets(values: RowArray, num_embeddings: int, fill: str | None) -> RowArray:
    """Gives the cells that take ``fill`` the row of its bucket; the given array where there is no ``fill``."""
    if not fill:
        return values
    row = bucket_rows(pa.array([fill], pa.large_string()), num_embeddings)
    return np.where(values == FILLED_ROW, row, values)


def no_bucket(num_embeddings: int) -> npt.NDArray[np.uint8]:
    """Bits of the table rows that training touched, the lowest bit of a byte first: only that of missing is set."""
    bits = np.zeros((FIRST_ROW + num_embeddings + 7) // 8, dtype=np.uint8)
    bits[0] = 1 << MISSING_ROW
    return bits


def touch(bits: npt.NDArray[np.uint8], rows: RowArray) -> None:
    """Sets the bits of table rows, in place."""
    if len(bits) <= _MARKS_PER_ROW * len(rows):
        marks = np.zeros(8 * len(bits), dtype=np.bool_)
        marks[rows] = True
        bits |= np.packbits(marks, bitorder="little")
        return
    byte_of, bit_of = rows >> 3, _BITS.take(rows & 7)
    unset = (bits.take(byte_of) & bit_of) == 0
    while unset.any():
        byte_of, bit_of = byte_of[unset], bit_of[unset]
        # Of several bits of one byte the last is written; the others take another turn, of eight at most.
        bits[byte_of] |= bit_of
        unset = (bits.take(byte_of) & bit_of) == 0


def _further_words(words: HashArray, starts: IntArray, lengths: IntArray) -> HashArray:
    """The sum of the terms of all words but the first, for texts of more than one word."""
    counts = (lengths - 1) // WORD_BYTES
    text_starts = np.cumsum(counts) - counts
    place = np.arange(int(counts.sum())) - np.repeat(text_starts, counts) + 1
    at = np.repeat(starts, counts) + place * WORD_BYTES
    rest = np.repeat(lengths, counts) - place * WORD_BYTES
    terms = words[at]
    terms &= FIRST_BYTES.take(np.minimum(rest, WORD_BYTES))
    terms += place.astype(np.uint64) * _GOLDEN
    return np.add.reduceat(_mixed(terms), text_starts)


def _mixed(numbers: HashArray) -> HashArray:
    """SplitMix64's finalizer; overwrites ``numbers``."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers
