"""Short texts as numbers: the same texts, numbers and lines as Arrow makes of them."""

from __future__ import annotations

import string

import numpy as np
import pyarrow as pa
import pytest

from data.features.cells import distinct_texts, read_numbers
from data.features.hashing import no_bucket, read_buckets, touch
from data.features.whole_numbers import parse_whole
from data.sources.dialect import Dialect
from data.sources.rows_of_lines import LineParser
from data.text_views import texts_of, views_of, words_of

LETTERS = np.array(list(string.ascii_lowercase + string.digits + " .-"))
KINDS = (pa.string(), pa.large_string(), pa.string_view())


def _texts(count: int, longest: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(LETTERS, size=rng.integers(0, longest + 1))) for _ in range(count)]


@pytest.mark.parametrize("longest", [0, 1, 7, 8, 9, 12, 13, 40])
@pytest.mark.parametrize("wanted", [[0, 1, 2], [2, 0], [1]])
def test_lines_are_cut_as_arrow_cuts_them(longest: int, wanted: list[int]) -> None:
    """Lines go through Arrow where a quote may be; here none is, but the parser that knows quotes cannot know that."""
    cells = _texts(3 * 9000, longest)  # more than one piece where texts are long
    run = b"".join("\t".join(cells[at : at + 3]).encode() + b"\n" for at in range(0, len(cells), 3))
    parser = LineParser(Dialect("\t", None), ["a", "b", "c"], wanted)
    found = parser.rows(run)
    assert found is not None
    found.validate(full=True)
    expected = parser._parse(run)
    assert found.num_rows == 9000
    assert [column.to_pylist() for column in found.columns] == [column.to_pylist() for column in expected.columns]
    without_end = parser.rows(run[:-1])
    assert without_end is not None
    assert without_end.to_pylist() == found.to_pylist()


@pytest.mark.parametrize(
    "run", [b"a\tb\tc\na\tb\n", b"a\tb\n\tc\ta\tb\n", b"a\tb\tc\td\n", b"a\nb\nc\n", b"\t\t\n\n", b"a\tb\tc\n\t\n\n"]
)
def test_lines_of_another_number_of_fields_are_no_rows(run: bytes) -> None:
    """Also where all lines together have as many fields as they should."""
    assert LineParser(Dialect("\t", None), ["a", "b", "c"], [0]).rows(run) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_words_are_texts(kind: pa.DataType) -> None:
    texts = [*_texts(500, 8), "", "ü", "日本"]
    array = pa.array(["left out", *texts], kind).slice(1)
    words = words_of(array)
    assert words is not None
    assert texts_of(words).to_pylist() == texts
    assert texts_of(words).type == pa.large_string()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("text", ["123456789", "a\0", "\0"])
def test_texts_that_a_number_could_not_tell_apart_have_none(kind: pa.DataType, text: str) -> None:
    array = pa.array(["a", text, "", "a"], kind)
    assert words_of(array) is None
    codes, distinct = distinct_texts(array)
    assert codes.tolist() == [0, 1, 2, 0]
    assert distinct.to_pylist() == ["a", text, ""]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("longest", [2, 8, 20])
def test_distinct_texts_are_those_of_arrow(kind: pa.DataType, longest: int) -> None:
    texts = pa.array(_texts(2000, longest))
    codes, distinct = distinct_texts(texts.cast(kind))
    expected = texts.dictionary_encode()
    assert distinct.to_pylist() == expected.dictionary.to_pylist()
    assert codes.tolist() == expected.indices.to_pylist()


def test_views_of_long_or_missing_texts_are_not_read() -> None:
    assert views_of(pa.array(["a", None], pa.string_view())) is None
    assert views_of(pa.array(["a", "longer than twelve"], pa.string_view())) is None
    assert views_of(pa.array(["a"])) is None


@pytest.mark.parametrize("longest", [1, 8, 9, 12, 13, 30])
@pytest.mark.parametrize("missing", [(), ("a",)])
def test_buckets_do_not_depend_on_how_texts_are_stored(longest: int, missing: tuple[str, ...]) -> None:
    texts = pa.array([*_texts(1000, longest), "a"])
    expected = read_buckets(texts, 1000, missing, 0)
    for kind in (pa.large_string(), pa.string_view()):
        np.testing.assert_array_equal(read_buckets(texts.cast(kind), 1000, missing, 0), expected)


def test_whole_numbers_are_those_of_arrow() -> None:
    """Bit for bit: a negative zero keeps its sign."""
    rng = np.random.default_rng(1)
    numbers = [str(number) for number in rng.integers(-9_999_999, 99_999_999, 2000)]
    numbers += [str(number) for number in range(-120, 120)] + ["", "-0", "0", "007", "00000000", "-0000001", "99999999"]
    views = views_of(pa.array(numbers, pa.string_view()))
    assert views is not None
    found = parse_whole(views)
    assert found is not None
    expected = read_numbers(pa.array(numbers))
    np.testing.assert_array_equal(
        found.view(np.uint64)[expected == expected], expected.view(np.uint64)[expected == expected]
    )
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.parametrize("text", ["-", "+1", " 1", "1 ", "1.0", "1e3", "a", "--1", "1-", ":", "/", "123456789", "nan"])
def test_other_numbers_are_left_to_arrow(text: str) -> None:
    views = views_of(pa.array(["1", text], pa.string_view()))
    assert views is not None
    assert parse_whole(views) is None


@pytest.mark.parametrize("table", [10, 1000, 40_000])
def test_touched_buckets_are_marked_whether_rows_are_few_or_many(table: int) -> None:
    rng = np.random.default_rng(2)
    for count in (0, 1, 50, 5000):
        rows = rng.integers(0, table + 2, count).astype(np.int32)
        bits = no_bucket(table)
        bits[-1] |= 1
        expected = np.unpackbits(bits, bitorder="little")
        expected[rows] = 1
        touch(bits, rows)
        np.testing.assert_array_equal(np.unpackbits(bits, bitorder="little"), expected)
