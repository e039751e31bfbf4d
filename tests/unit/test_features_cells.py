"""Cells: a category is its text whatever the column's type; bags, weights and numbers; what is refused."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from feature_cases import features_config
from hypothesis import given, settings
from hypothesis import strategies as st

from data.features.bags import BadWeightsError
from data.features.cells import (
    BadCellsError,
    BadColumnError,
    Categories,
    one_array,
    read_categories,
    read_numbers,
    unparsable,
)
from data.features.raw import RawSparse
from data.features.sparse import read_sparse

MISSING_ROW, FILLED_ROW, FIRST_ROW = 0, 1, 2


def texts(read: Categories | RawSparse) -> list[str | None]:
    """Each cell's category; None: missing; 'FILLED': missing, to be filled."""
    return [
        {MISSING_ROW: None, FILLED_ROW: "FILLED"}.get(
            value, read.texts[value - FIRST_ROW].as_py() if value > 1 else None
        )
        for value in read.values.tolist()
    ]


def read_bags(column: Any, weights: Any = None, **settings_: Any) -> RawSparse:
    """Reads ``column``, and ``weights``, as a multi-valued vocabulary."""
    columns = {"c": column} | ({} if weights is None else {"w": weights})
    names = {} if weights is None else {"weights": "w"}
    feature = {"name": "c", "encoding": "vocabulary", "multi_valued": True} | names | settings_
    return read_sparse(pa.table(columns), features_config(feature).sparse[0])


def bags(read: RawSparse) -> list[list[str | None]]:
    flat = texts(read)
    assert read.offsets is not None
    return [flat[start:stop] for start, stop in zip(read.offsets[:-1], read.offsets[1:], strict=True)]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["5", "05", "3e814130", "", None]), ["5", "05", "3e814130", None, None]),
        (pa.array([5, -1, None], pa.int64()), ["5", "-1", None]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([True, False, None]), ["true", "false", None]),
        (pa.array([decimal.Decimal("5.00")], pa.decimal128(10, 2)), ["5.00"]),
        (pa.array([5.0, 0.5, -0.0, 123456789012.0, math.nan, None]), ["5", "0.5", "0", "123456789012", None, None]),
        (pa.array([0.1, 7.0], pa.float32()), ["0.1", "7"]),
        (pa.array(["a", "b", "a", None]).dictionary_encode(), ["a", "b", "a", None]),
        (pa.array([7, 8, 7]).dictionary_encode(), ["7", "8", "7"]),
        (pa.array(["a", None], pa.large_string()), ["a", None]),
        (pa.array(["a"], pa.string_view()), ["a"]),
        (pa.nulls(2), [None, None]),
        (pa.array([], pa.string()), []),
    ],
)
def test_a_category_is_its_text_whatever_the_type(array: pa.Array, expected: list[str | None]) -> None:
    assert texts(read_categories(array)) == expected


def test_dictionaries_that_differ_between_chunks_are_unified() -> None:
    chunks = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "a", None]).dictionary_encode()]
    assert texts(read_categories(one_array(pa.chunked_array(chunks)))) == ["a", "b", "c", "a", None]


def test_a_small_dictionary_index_has_room_for_missing() -> None:
    """127 entries fill int8: the code of a missing cell must not wrap around."""
    entries = pa.array([f"c{number}" for number in range(128)])
    indices = pa.array([127, None, 0], pa.int8())
    assert texts(read_categories(pa.DictionaryArray.from_arrays(indices, entries))) == ["c127", None, "c0"]


def test_missing_values_and_fill() -> None:
    column = pa.array(["?", "x", "", None])
    assert texts(read_categories(column, ("?",))) == [None, "x", None, None]
    feature = {"name": "c", "encoding": "vocabulary", "missing_values": ["?"]}
    filled = read_sparse(pa.table({"c": column}), features_config(feature | {"fill": "x"}).sparse[0])
    assert texts(filled) == ["FILLED", "x", "FILLED", "FILLED"]
    assert filled.count_missing() == 3, "what will be filled is still reported as missing"
    empty = read_sparse(pa.table({"c": column}), features_config(feature | {"fill": ""}).sparse[0])
    assert texts(empty) == [None, "x", None, None], "an empty fill fills nothing"


@pytest.mark.parametrize(
    "array",
    [pa.array([b"a"]), pa.array([[1]]), pa.array([{"a": 1}]), pa.array([0], pa.timestamp("s"))],
    ids=["binary", "list", "struct", "timestamp"],
)
def test_a_type_without_categories_is_named(array: pa.Array) -> None:
    with pytest.raises(BadColumnError, match=r"found type .*expected integer, float, decimal, boolean or text"):
        read_categories(array)


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["1^2", "", None, "3", "4^^5"]),
        pa.array(["1^2", "", None, "3", "4^^5"]).dictionary_encode(),
        pa.array([["1", "2"], [], None, ["3"], ["4", None, "5"]]),
        pa.array([["1", "2"], [], None, ["3"], ["4", "", "5"]], pa.large_list(pa.large_string())),
        pa.array([[1, 2], [], None, [3], [4, None, 5]], pa.list_(pa.int64())),
        pa.array([[1.0, 2.0], [], None, [3.0], [4.0, None, 5.0]]),
    ],
    ids=["text", "dictionary", "list<string>", "large_list", "list<int64>", "list<double>"],
)
def test_every_form_of_bag_reads_the_same(array: pa.Array) -> None:
    """Null, empty and missing are one empty bag; a gap inside a bag is a missing cell."""
    read = read_bags(array, separator="^")
    assert bags(read) == [["1", "2"], [], [], ["3"], ["4", None, "5"]]
    assert read.count_missing() == 3


def test_a_null_list_with_content_behind_it_is_empty() -> None:
    """Arrow allows any offsets under a null."""
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3]), mask=pa.array([True, False])
    )
    assert bags(read_bags(hidden)) == [[], ["3"]]


def test_a_slice_of_lists_reads_its_own_rows() -> None:
    sliced = pa.array([["a"], ["b", "c"], None, ["d"]]).slice(1)
    assert bags(read_bags(sliced)) == [["b", "c"], [], ["d"]]


def test_long_bags_keep_their_first_values_and_weights() -> None:
    read = read_bags([["a", "b", "c"], ["d"], []], [[1.0, 2.0, 3.0], [4.0], []], max_length=2)
    assert bags(read) == [["a", "b"], ["d"], []]
    assert read.weights is not None
    assert read.weights.tolist() == [1.0, 2.0, 4.0]


def test_fill_takes_the_place_of_missing_cells_and_of_empty_bags() -> None:
    read = read_bags(["a|b", "", "|c"], ["1|2", "", "3|4"], separator="|", fill="z")
    assert bags(read) == [["a", "b"], ["FILLED"], ["FILLED", "c"]]
    assert read.weights is not None
    assert read.weights.tolist() == [1, 2, 1, 3, 4]
    assert read.count_missing() == 2
    assert read.count_cells() == 5


@pytest.mark.parametrize(
    ("weights", "rows", "message"),
    [
        (["1|2", "3|4", "5", "6"], [1, 3], "2 weights for 1 values"),
        (["1|2", "", "5", "6|7"], [1], "0 weights for 1 values"),
        (["x|y", "3", "z", "6|7"], [0, 2], "a weight: found 'x'"),
        (["1|2", "3", "inf", "6|7"], [2], "a weight: found inf"),
        (["1|2", "3", "5", "1|1e39"], [3], "a weight: found 1e.39"),
        (["1|", "3", "5", "6|7"], [0], "a weight: found nan"),
    ],
)
def test_weights_that_do_not_fit_are_all_named(weights: list[str], rows: list[int], message: str) -> None:
    with pytest.raises(BadWeightsError, match=message) as caught:
        read_bags(["a|b", "c", "d", "e|f"], weights, separator="|")
    assert caught.value.rows.tolist() == rows
    assert len(caught.value.messages) == len(rows)


def test_bags_need_a_list_or_a_separator() -> None:
    with pytest.raises(BadColumnError, match="no separator"):
        read_bags(["a"])
    with pytest.raises(BadColumnError, match="found type int64"):
        read_bags([1], separator="|")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (
            pa.array(["1", " 2.5 ", "", "?", None, "nan", "1e40", "-inf", "1e400"]),
            [1, 2.5, *[None] * 4, 1e40, -math.inf, math.inf],
        ),
        (pa.array([2**64 - 1, None], pa.uint64()), [2.0**64, None]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([decimal.Decimal("5.25")]), [5.25]),
        (pa.array([1.5], pa.float16()), [1.5]),
        (pa.array(["7", "8"]).dictionary_encode(), [7, 8]),
        (pa.array([-1, 2]), [None, 2]),
        (pa.nulls(1), [None]),
    ],
)
def test_numbers_of_every_type(array: pa.Array, expected: list[float | None]) -> None:
    values = read_numbers(array, missing_values=("?", "-1"))
    np.testing.assert_array_equal(values, np.array([math.nan if value is None else value for value in expected]))


@pytest.mark.parametrize("text", ["x", "1,5", "0x10", "1_000", "12 34", "true"])
def test_texts_that_are_no_numbers_are_all_found(text: str) -> None:
    with pytest.raises(BadCellsError, match="expected a number") as caught:
        read_numbers(pa.array(["1", "", text, " 2 ", text]))
    assert caught.value.rows.tolist() == [2, 4]
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["9", "-1", " -1", "", "3", " 4 ", "9"]).slice(1, 5),
        pa.array(["9", "-1", None, "", "3", "4", "9"]).slice(1, 5),
        pa.array(["-1", "\u2003", None, "3", "4"]),
    ],
    ids=["spaces", "null", "wide space"],
)
def test_missing_numbers_in_slices_and_behind_spaces(column: pa.Array) -> None:
    values = read_numbers(column, missing_values=("-1",))
    np.testing.assert_array_equal(values, [math.nan, math.nan, math.nan, 3, 4])


def test_a_type_without_numbers_is_named() -> None:
    with pytest.raises(BadColumnError, match=r"found type list<.*expected integer"):
        read_numbers(pa.array([[1]]))


@given(st.lists(st.sampled_from(["1", "22", "x", "", None, "3.5"]), max_size=60), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_text_that_cannot_be_parsed_is_found(texts_: list[str | None], offset: int) -> None:
    array = pa.array([*["y"] * offset, *texts_], pa.string()).slice(offset)
    expected = [place for place, text in enumerate(texts_) if text in ("x", "", "3.5")]
    assert unparsable(array, pa.int64()).tolist() == expected


@pytest.mark.parametrize("column", [["1", "2", "2.9", "", "21", "-3", "65535"], [1, 2, 2.9, None, 21, -3, 65535]])
def test_a_count_is_bucketed_by_the_square_of_its_logarithm(column: list[Any]) -> None:
    """As FuxiCTR's convert_to_bucket, of 2.9 too; BARS's Criteo_x4 is made with it."""
    raw = sparse_of({"encoding": "vocabulary", "derive": "log_square"}, column)
    assert texts_of(raw) == ["1", "2", "1", None, "9", "-3", "122"]


@pytest.mark.parametrize(
    ("derive", "expected"),
    [("hour", ["0", "23", "12", None]), ("weekday", ["2", "6", "0", None]), ("weekend", ["0", "1", "1", None])],
)
def test_parts_of_a_time(derive: str, expected: list[str | None]) -> None:
    """21 October 2014 was a Tuesday, the 25th a Saturday, 2 November a Sunday."""
    for column in (["14102100", "14102523", "14110212", "none"], [14102100, 14102523, 14110212, None]):
        raw = sparse_of({"encoding": "vocabulary", "derive": derive, "missing_values": ["none"]}, column)
        assert texts_of(raw) == expected
    numbered = sparse_of({"encoding": "id", "num_embeddings": 24, "derive": derive, "fill": "0"}, ["14102523", ""])
    assert numbered.values.tolist() == [FIRST_ROW + int(expected[1] or 0), FILLED_ROW]


@pytest.mark.parametrize("cell", ["14102124", "14133100", "14023000", "140001", "-4102100", "14102100.5", "114102100"])
def test_what_is_no_time_is_a_bad_cell(cell: str) -> None:
    with pytest.raises(BadCellsError, match=r"expected a time as YYMMDDHH.*derive: weekend") as caught:
        sparse_of({"num_embeddings": 9, "derive": "weekend"}, ["14102100", cell, "14102100"])
    assert caught.value.rows.tolist() == [1]


def sparse_of(feature: dict[str, Any], column: list[Any]) -> RawSparse:
    config = features_config({"name": "c", **feature}).sparse[0]
    return read_sparse(pa.table({"c": column}), config)


def texts_of(raw: RawSparse) -> list[str | None]:
    assert raw.texts is not None
    return [None if row < FIRST_ROW else raw.texts[int(row) - FIRST_ROW].as_py() for row in raw.values]
