"""Short texts as numbers: Arrow's string views, which NumPy makes and reads without touching a text by itself.

A string view is 16 bytes: the text's length, and either its up to 12 bytes filled up with zero bytes, or its first four
bytes and where all of them lie (Arrow's columnar format, "variable-size binary view layout"). So the first eight bytes
of a short text are one number at a fixed place; and where no text ends in a zero byte, texts of up to eight bytes are
equal if their numbers are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.encoding import IntArray

WordArray = npt.NDArray[np.uint64]
BytesArray = npt.NDArray[np.uint8]

WORD_BYTES = 8
INLINE_BYTES = 12
VIEW = np.dtype([("length", "<i4"), ("head", "<u8"), ("tail", "<u4")])
"""``head``: the first eight bytes, or the first four and the number of a buffer; ``tail``: four more, or an offset."""
FIRST_BYTES: WordArray = np.array([(1 << 8 * count) - 1 for count in range(WORD_BYTES + 1)], dtype=np.uint64)
"""Masks of a word's first 0 to 8 bytes."""
_TAIL_BYTES = INLINE_BYTES - WORD_BYTES
_HALF = np.uint64(32)


def views_of(texts: pa.Array) -> npt.NDArray[np.void] | None:
    """The views of texts that are all in their views, ``VIEW`` [n]; None: others are among them, or nulls."""
    if not pa.types.is_string_view(texts.type) or texts.null_count:
        return None
    views = np.frombuffer(texts.buffers()[1], dtype=VIEW)[texts.offset : texts.offset + len(texts)]
    return views if not len(views) or int(views["length"].max()) <= INLINE_BYTES else None


def words_of(texts: pa.Array) -> WordArray | None:
    """A number for each text that no other text has: its bytes, filled up with zero bytes; uint64 [n].

    Args:
        texts: string, large_string or string_view without nulls.

    Returns:
        None: a text is longer than a word, or ends in a zero byte.
    """
    if pa.types.is_string_view(texts.type):
        views = views_of(texts)
        if views is None:
            return None
        lengths, words = views["length"], views["head"].copy()
        if len(words) and int(lengths.max()) > WORD_BYTES:
            return None
    else:
        found = _plain_words(texts)
        if found is None:
            return None
        words, lengths = found
    ends_in_zero = words <= FIRST_BYTES.take(lengths - 1, mode="clip")
    return None if (ends_in_zero & (lengths > 0)).any() else words


def texts_of(words: WordArray) -> pa.Array:
    """The texts of :func:`words_of`, large_string [n]."""
    lengths = np.searchsorted(FIRST_BYTES, words)
    offsets = np.zeros(len(words) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    content = np.ascontiguousarray(words).view(np.uint8)
    if offsets[-1] != len(content):
        content = content.reshape(-1, WORD_BYTES)[np.arange(WORD_BYTES) < lengths[:, None]]
    return pa.LargeStringArray.from_buffers(len(words), pa.py_buffer(offsets), pa.py_buffer(content))


class TextViews:
    """Columns of texts that lie in one piece of text, row by row: made without a copy of the long ones."""

    def __init__(self, num_columns: int, num_rows: int) -> None:
        """Nothing is filled in yet."""
        # A view as two words: its length and the first four bytes, and the rest.
        self._views = np.empty((num_columns, num_rows, 2), dtype="<u8")
        self._any_outside = np.zeros(num_columns, dtype=np.bool_)
        self._padded = np.empty(0, dtype=np.uint8)

    def add(self, first_row: int, position: int, content: BytesArray, starts: IntArray, ends: IntArray) -> None:
        """Fills in rows, all columns of a row at a time: their texts are neighbours.

        Args:
            first_row: position of the first one.
            position: of ``content`` in all of the text.
            content: ASCII or UTF-8.
            starts: where texts start in the content, int64 [rows, columns].
            ends: behind their ends.
        """
        words = self._words(content)
        lengths = ends - starts
        longest = int(lengths.max(initial=0))
        heads = words[starts]
        heads &= FIRST_BYTES.take(lengths, mode="clip")
        seconds = heads >> _HALF
        heads <<= _HALF
        heads |= lengths.view(np.uint64)
        if longest > WORD_BYTES:
            further = lengths > WORD_BYTES
            rest = words[starts[further] + WORD_BYTES]
            rest &= FIRST_BYTES.take(np.minimum(lengths[further] - WORD_BYTES, _TAIL_BYTES))
            seconds[further] |= rest << _HALF
        if longest > INLINE_BYTES:
            outside = lengths > INLINE_BYTES
            seconds[outside] = (starts[outside] + position).view(np.uint64) << _HALF
            self._any_outside |= outside.any(axis=0)
        rows = slice(first_row, first_row + len(lengths))
        self._views[:, rows, 0] = heads.T
        self._views[:, rows, 1] = seconds.T

    def columns(self, content: bytes) -> list[pa.StringViewArray]:
        """The columns, when all rows are filled in; long texts are those of ``content``, which is kept for them."""
        return [
            pa.Array.from_buffers(
                pa.string_view(),
                len(views),
                [None, pa.py_buffer(views), *([pa.py_buffer(content)] if outside else [])],
                null_count=0,
            )
            for views, outside in zip(self._views, self._any_outside.tolist(), strict=True)
        ]

    def _words(self, content: BytesArray) -> WordArray:
        """The eight bytes from each byte of ``content`` on, and from the eight behind it: indexing copies only some."""
        if len(self._padded) < len(content) + 2 * WORD_BYTES:
            self._padded = np.zeros(len(content) + 2 * WORD_BYTES, dtype=np.uint8)
        self._padded[: len(content)] = content
        return np.ndarray((len(content) + WORD_BYTES + 1,), dtype="<u8", buffer=self._padded, strides=(1,))


def _plain_words(texts: pa.Array) -> tuple[WordArray, npt.NDArray[np.int32 | np.int64]] | None:
    """First words of texts that lie one behind the other, and their lengths; None: one is longer."""
    _, bounds, content = texts.buffers()
    if bounds is None or content is None or not len(texts):
        return np.zeros(len(texts), dtype=np.uint64), np.zeros(len(texts), dtype=np.int64)
    kind = "<i8" if pa.types.is_large_string(texts.type) else "<i4"
    offsets: npt.NDArray[np.int32 | np.int64] = np.frombuffer(bounds, dtype=kind)[
        texts.offset : texts.offset + len(texts) + 1
    ]
    lengths = offsets[1:] - offsets[:-1]
    if int(lengths.max()) > WORD_BYTES:
        return None
    first, last = int(offsets[0]), int(offsets[-1])
    # The last text's word reads past its end.
    padded = np.zeros(last - first + WORD_BYTES, dtype=np.uint8)
    padded[: last - first] = np.frombuffer(content, dtype=np.uint8)[first:last]
    words = np.ndarray((last - first + 1,), dtype="<u8", buffer=padded, strides=(1,))[offsets[:-1] - first]
    words &= FIRST_BYTES.take(lengths)
    return words, lengths
