"""The hash of our own, its buckets, and which of them count as touched."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from feature_cases import MISSING, UNSEEN, block, encode, features_config, fit, ids, read
from hypothesis import given, settings
from hypothesis import strategies as st

from data.features.hashing import FIRST_ROW, bucket_rows, hash_texts, no_bucket, touch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def documented(text: str) -> int:
    """The definition in the module's docstring, in plain Python."""
    content = text.encode()
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)] or [0]
    terms = words[0] + sum(mixed((word + place * GOLDEN) & MASK) for place, word in enumerate(words) if place)
    return mixed((len(content) * GOLDEN & MASK) ^ (terms & MASK))


def test_the_hash_is_the_same_on_every_machine() -> None:
    """Fixed values: a checkpoint's buckets must mean the same after an upgrade."""
    hashes = hash_texts(pa.array(["", "a", "5", "数据", "0123456789abcdef0123456789abcdef"], pa.large_string()))
    assert hashes.tolist() == [0, 18119689086777206668, 5833679380957638813, 8361081443794373342, 4776211316124080416]


@given(st.lists(st.text(max_size=40)), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_the_hash_is_the_documented_one(texts: list[str], before: int, after: int) -> None:
    """Also of a slice, whose buffers hold other texts before and behind it."""
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    for kind in (pa.string(), pa.large_string()):
        padded = pa.array(["front" * 3] * before + texts + ["behind" * 3] * after, kind)
        assert hash_texts(padded.slice(before, len(texts))).tolist() == [documented(text) for text in texts]


def test_a_very_long_text_is_hashed_to_its_end() -> None:
    texts = ["x" * 100_001 + "a", "x" * 100_001 + "b", "short"]
    assert hash_texts(pa.array(texts)).tolist() == [documented(text) for text in texts]


def test_zero_bytes_count() -> None:
    assert len(set(hash_texts(pa.array(["", "\0", "\0\0", "a", "a\0"])).tolist())) == 5


def test_buckets_are_spread_evenly() -> None:
    """A million numbers in 1,000 buckets: chi-square of 999 degrees of freedom, six standard deviations wide."""
    texts = pa.array(np.arange(1_000_000)).cast(pa.string())
    counts = np.bincount(bucket_rows(texts, 1000) - FIRST_ROW, minlength=1000)
    chi_square = float(np.square(counts - 1000).sum() / 1000)
    assert abs(chi_square - 999) < 6 * (2 * 999) ** 0.5


@pytest.mark.parametrize("size", [1, 7, 1000, 2**31, 2**40])
def test_a_bucket_is_the_hash_modulo_the_size(size: int) -> None:
    texts = ["a", "b", "long enough for two words", ""]
    rows = bucket_rows(pa.array(texts), size)
    assert rows.tolist() == [2 + documented(text) % size for text in texts]
    assert rows.dtype == (np.int32 if size < 2**31 - 2 else np.int64)


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array(["a", "", None, "数据数据数据"]), ["a", None, None, "数据数据数据"]),
        (pa.array(["x", "a", "", None, "b", "y"], pa.large_string()).slice(1, 4), ["a", None, None, "b"]),
        (pa.array(["a", None, "", "b"], pa.string_view()), ["a", None, None, "b"]),
        (pa.array(["a", None, "", "b", "a"]).dictionary_encode(), ["a", None, None, "b", "a"]),
        (pa.array([5, None, -7], pa.int16()), ["5", None, "-7"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([5.0, 0.5, -0.0, float("nan"), None]), ["5", "0.5", "0", None, None]),
        (pa.array([True, None, False]), ["true", None, "false"]),
        (pa.array([decimal.Decimal("5.00")]), ["5.00"]),
        (pa.chunked_array([["a"], ["b", ""]]), ["a", "b", None]),
        (pa.array(["x", "?", "NA", ""]), ["x", None, "NA", None]),
    ],
    ids=str,
)
def test_a_cell_of_any_type_falls_into_the_bucket_of_its_text(column: Any, texts: list[str | None]) -> None:
    config = features_config({"name": "c", "num_embeddings": 10**6, "missing_values": ["?"]})
    values = read(config, block(c=column)).sparse[0].values
    assert values.tolist() == [0 if text is None else 2 + documented(text) % 10**6 for text in texts]


def test_what_lies_under_a_null_is_not_read() -> None:
    hidden = pa.StringArray.from_buffers(
        3, pa.py_buffer(np.array([0, 1, 5, 6], np.int32)), pa.py_buffer(b"aHIDEb"), pa.py_buffer(b"\x05")
    )
    config = features_config({"name": "c", "num_embeddings": 100})
    values = read(config, block(c=hidden)).sparse[0].values
    assert values.tolist() == [2 + documented("a") % 100, MISSING, 2 + documented("b") % 100]


def test_buckets_that_training_never_touched_are_unseen() -> None:
    config = features_config({"name": "c", "encoding": "hash", "num_embeddings": 1000})
    features = fit(config, block(c=["a", "b", ""]))
    a, b, new, missing = ids(encode(features, block(c=["a", "b", "new", ""])))
    assert (new, missing) == (UNSEEN, MISSING)
    assert [a, b] == [2 + documented(text) % 1000 for text in "ab"]
    assert features.table_rows == {"c": 1002}


def test_missing_is_missing_even_if_training_had_none() -> None:
    config = features_config({"name": "c", "num_embeddings": 1000})
    assert ids(encode(fit(config, block(c=["a"])), block(c=["", "b"]))) == [MISSING, UNSEEN]


@given(st.integers(1, 300), st.lists(st.lists(st.integers(0, 299), max_size=80), max_size=4))
@settings(max_examples=100, deadline=None)
def test_touching_marks_exactly_the_rows_given(size: int, parts: list[list[int]]) -> None:
    bits = no_bucket(size)
    expected = {0}
    for part in parts:
        rows = np.array([2 + number % size for number in part], dtype=np.int32)
        touch(bits, rows)
        expected |= set(rows.tolist())
    assert set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) == expected
