"""Bytes that a reader may meet: valid files with a few edits, tokens of a format in any order, anything at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

MAX_REPEATS = 4000
"""Deep nesting and long fields come from tokens repeated this often."""

ANY_FORMAT = (b"\0", b"\n", b"\r", b"\r\n", b'"', b"'", b"\\", b"\xff", b"\xc3\x28", b"\xef\xbb\xbf", b"\xed\xa0\x80")
NUMBERS = (b"0", b"-1", b"1", b"2147483648", b"-9223372036854775809", b"1e40", b"1e999", b"nan", b"inf", b"1_0", b"0x1")


def edited(base: bytes, tokens: Sequence[bytes], most: int = 6) -> st.SearchStrategy[bytes]:
    """``base`` after one to ``most`` edits; simpler examples have fewer and smaller ones."""
    return st.lists(_edit(tokens), min_size=1, max_size=most).map(lambda edits: _apply(base, edits))


def joined(tokens: Sequence[bytes], most: int = 60) -> st.SearchStrategy[bytes]:
    """Tokens one behind the other, with repeats."""
    piece = st.one_of(st.sampled_from(tokens), _repeated(tokens), st.binary(max_size=4))
    return st.lists(piece, max_size=most).map(b"".join)


def any_bytes(base: Sequence[bytes], tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Edits of one of ``base``, tokens, or arbitrary bytes."""
    every = (*tokens, *ANY_FORMAT, *NUMBERS)
    return st.one_of(*(edited(valid, every) for valid in base), joined(every), st.binary(max_size=200))


def _repeated(tokens: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda token, times: token * times, st.sampled_from(tokens), st.integers(2, MAX_REPEATS))


def _edit(tokens: Sequence[bytes]) -> st.SearchStrategy[tuple[Any, ...]]:
    place = st.integers(0, 1 << 24)
    content = st.one_of(st.binary(max_size=8), st.sampled_from(tokens), _repeated(tokens))
    return st.one_of(
        st.tuples(st.just("flip"), place, st.integers(0, 7)),
        st.tuples(st.just("put"), place, content),
        st.tuples(st.just("insert"), place, content),
        st.tuples(st.just("remove"), place, st.integers(1, 64)),
        st.tuples(st.just("repeat"), place, st.integers(1, 64)),
        st.tuples(st.just("cut"), place, st.just(0)),
        st.tuples(st.just("number"), place, st.integers(-(2**63), 2**63 - 1)),
    )


def _apply(base: bytes, edits: Sequence[tuple[Any, ...]]) -> bytes:
    content = bytearray(base)
    for kind, place, value in edits:
        at = place % (len(content) + 1)
        if kind == "flip" and content:
            content[at % len(content)] ^= 1 << value
        elif kind == "put":
            content[at : at + len(value)] = value
        elif kind == "insert":
            content[at:at] = value
        elif kind == "remove":
            del content[at : at + value]
        elif kind == "repeat":
            content[at:at] = content[at : at + value]
        elif kind == "cut":
            del content[at:]
        elif kind == "number":
            content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    return bytes(content)
