"""Short whole numbers from their digits: the same as Arrow's cast, several numbers an instruction.

Digits are added up in pairs, then pairs of pairs, inside one 64-bit word (the "SWAR" parsing of eight digits that
D. Lemire and J. Keiser describe for simdjson, "Parsing gigabytes of JSON per second", 2019).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data.text_views import WORD_BYTES

_ZEROS = np.uint64(0x3030303030303030)
_HIGH = np.uint64(0xF0F0F0F0F0F0F0F0)
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAST_NINE = np.uint64(0x0606060606060606)
_SHIFTS = np.array([8 * (WORD_BYTES - count) % 64 for count in range(WORD_BYTES + 1)], dtype=np.uint64)
_LEADING = np.array(
    [int(_ZEROS) >> 8 * count if count < WORD_BYTES else 0 for count in range(WORD_BYTES + 1)], dtype=np.uint64
)
"""Zeros in the place of the digits that a number of 0 to 8 digits lacks."""
_MINUS = np.uint64(ord("-"))
_FIRST_BYTE, _BYTE = np.uint64(0xFF), np.uint64(8)


def parse_whole(views: npt.NDArray[np.void]) -> npt.NDArray[np.float64] | None:
    """Numbers of up to eight digits, ``-`` counting as one, float64 [n]; nan for the empty text.

    Args:
        views: of texts that are all in their views, ``data.text_views.VIEW`` [n].

    Returns:
        None: a text is something else, a number or not.
    """
    lengths, words = views["length"], views["head"].copy()
    if len(lengths) and int(lengths.max()) > WORD_BYTES:
        return None
    negative = (words & _FIRST_BYTE) == _MINUS
    any_negative = bool(negative.any())
    if any_negative:
        words[negative] >>= _BYTE
        lengths = lengths - negative
        if (lengths[negative] == 0).any():
            return None
    empty = lengths == 0
    words <<= _SHIFTS.take(lengths)
    words |= _LEADING.take(lengths)
    digits = (words & _HIGH) == _ZEROS
    digits &= ((words + _PAST_NINE) & _HIGH) == _ZEROS
    if not digits.all():
        return None
    words &= _LOW
    for factor, shift, lanes in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10000, 32, 0x00000000FFFFFFFF),
    ):
        words = (words * np.uint64(factor) + (words >> np.uint64(shift))) & np.uint64(lanes)
    numbers = words.astype(np.float64)
    if any_negative:
        np.negative(numbers, out=numbers, where=negative)
    numbers[empty] = np.nan
    return numbers
