"""Which rows are held out: the four ways, over columns of every type, and rows whose time cannot be read."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.bad_rows import BadRows
from data.block import Rows
from data.errors import DataError
from data.features.encoding import BoolArray
from data.features.raw import RawRows
from data.split import cell_hashes, held_out, leave_out_untimed, left_out, split_column, times
from erase_rec.config.schema import DataConfig
from erase_rec.config.times import read_time


def data_of(**split: Any) -> DataConfig:
    fraction = split.pop("eval_fraction", None)
    files = split.pop("eval", ())
    plain = {"kind": "csv", "train": "t", "eval": files, "eval_fraction": fraction, "split": split}
    return DataConfig.model_validate(plain)


def rows_of(column: pa.Array, file_index: int = 0, first: int = 0) -> RawRows:
    count = len(column)
    numbers = np.arange(first, first + count)
    return RawRows(
        [], [], np.zeros(count, np.uint8), Rows("f.csv", "line", numbers + 2), numbers, file_index, {"c": column}
    )


def fates(data: DataConfig, column: pa.Array, seed: int = 1) -> list[bool]:
    return held_out(data, seed, rows_of(column)).tolist()


def by_row(count: int, seed: int = 1, fraction: float = 0.2, **place: int) -> BoolArray:
    return held_out(data_of(eval_fraction=fraction), seed, rows_of(pa.nulls(count), **place))


def test_a_rows_fate_does_not_depend_on_the_cut() -> None:
    whole = by_row(5000)
    parts = [by_row(1000, first=first) for first in range(0, 5000, 1000)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert whole.mean() == pytest.approx(0.2, abs=0.02)
    assert (by_row(5000, seed=2) != whole).any()
    assert (by_row(5000, file_index=1) != whole).any(), "rows of another file are other rows"


def sampled_out(count: int, seed: int = 1, first: int = 0, **data: Any) -> BoolArray:
    """Of rows with every third label 1."""
    rows = rows_of(pa.nulls(count), first=first)
    rows.label[(rows.row_numbers % 3) == 0] = 1
    left = left_out(DataConfig.model_validate({"kind": "csv", "train": "t", **data}), seed, rows)
    return np.zeros(count, bool) if left is None else left


def test_sampling_leaves_out_negative_rows_alone_and_whatever_the_cut() -> None:
    whole = sampled_out(6000, negative_sampling_rate=0.25)
    assert not whole[::3].any()
    negative = np.arange(6000) % 3 != 0
    assert whole[negative].mean() == pytest.approx(0.75, abs=0.03)
    parts = [sampled_out(1000, first=first, negative_sampling_rate=0.25) for first in range(0, 6000, 1000)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert (sampled_out(6000, seed=2, negative_sampling_rate=0.25) != whole).any()


def test_sampling_and_the_split_by_row_are_drawn_apart() -> None:
    out = sampled_out(6000, negative_sampling_rate=0.25)
    held = by_row(6000, fraction=0.25)
    negative = np.arange(6000) % 3 != 0
    assert out[negative & held].mean() == pytest.approx(0.75, abs=0.05)


def test_rows_that_were_sampled_before_stay() -> None:
    assert not sampled_out(100).any()
    assert not sampled_out(100, negative_sampling_rate=0.25, negatives_sampled=True).any()


def test_nothing_is_held_out_beside_files_or_without_a_share() -> None:
    column = pa.array(["a"] * 100)
    assert not any(fates(data_of(), column))
    assert not any(fates(data_of(eval=("e",)), column))


def test_rows_of_one_value_stay_together() -> None:
    data = data_of(by="hash", column="c", eval_fraction=0.3)
    values = np.random.default_rng(0).integers(0, 500, 4000)
    found = np.array(fates(data, pa.array(values.astype(str))))
    by_value = {value: set(found[values == value].tolist()) for value in np.unique(values)}
    assert all(len(fate) == 1 for fate in by_value.values())
    assert np.mean([fate == {True} for fate in by_value.values()]) == pytest.approx(0.3, abs=0.07)
    assert fates(data, pa.array(values.astype(str)), seed=2) != found.tolist()
    for kind in (pa.int64(), pa.float64(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(values.astype(str)).cast(kind) if "string" in str(kind) else pa.array(values, kind)
        assert fates(data, column) == found.tolist(), f"the type {kind} does not matter"
    assert fates(data, pa.array([None, "", None])) in ([True] * 3, [False] * 3), "missing is one value"


@given(st.lists(st.one_of(st.none(), st.text(max_size=12)), min_size=1))
def test_equal_texts_have_equal_hashes(texts: list[str | None]) -> None:
    hashes = cell_hashes(pa.array(texts, pa.string()))
    plain = [text or "" for text in texts]
    assert len(set(hashes.tolist())) == len(set(plain))
    assert all((hashes[i] == hashes[j]) == (plain[i] == plain[j]) for i in range(len(texts)) for j in range(i))


def test_the_values_of_a_column_are_held_out() -> None:
    data = data_of(by="column", column="c", values=["5", ""])
    assert fates(data, pa.array(["5", "6", "", "05"])) == [True, False, True, False]
    assert fates(data, pa.array([5, 6, None])) == [True, False, True]
    assert fates(data, pa.array([5.0, 5.5, None])) == [True, False, True]
    assert fates(data_of(by="column", column="c", values=["true"]), pa.array([True, False, None])) == [
        True,
        False,
        False,
    ]


def stamps(*texts: str) -> list[datetime.datetime]:
    return [datetime.datetime.fromisoformat(text) for text in texts]


DATES = ["2019-11-23 23:59:59.999", "2019-11-24 00:00:00", "2019-11-25"]


@pytest.mark.parametrize(
    ("since", "column"),
    [
        ("14102110", pa.array(["14102109", " 14102110", "14102111"])),
        ("14102110", pa.array([14102109, 14102110, 14102111])),
        ("0.5", pa.array([0.4, 0.5, 0.6])),
        ("2019-11-24", pa.array(DATES)),
        ("2019-11-24T00:00:00Z", pa.array(DATES).dictionary_encode()),
        ("2019-11-24T09:00:00+09:00", pa.array([f"{text}+00:00" for text in (*DATES[:2], "2019-11-25 00:00:00")])),
        ("2019-11-24", pa.array(["2019-11-24 08:59:59+09:00", "2019-11-24T00:00:00Z", "2019-11-25"])),
        ("2019-11-24", pa.array(stamps(*DATES), pa.timestamp("ns"))),
        ("2019-11-24", pa.array(stamps(*DATES), pa.timestamp("ms", "Asia/Tokyo"))),
        ("2019-11-24", pa.array([each.date() for each in stamps(*DATES)], pa.date32())),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
def test_later_rows_are_held_out(since: str, column: pa.Array) -> None:
    assert fates(data_of(by="time", column="c", since=since), column) == [False, True, True]


def test_times_are_seconds_or_the_columns_numbers() -> None:
    data = data_of(by="time", column="c", since="1970-01-01")
    assert times(data, rows_of(pa.array(["1970-01-02", "1969-12-31 23:59:59.5"]))).tolist() == [86400.0, -0.5]
    texts = ["9999-12-31", "0001-01-01T00:00:00Z", "1970-01-01 00:00:01.000000500"]
    assert times(data, rows_of(pa.array(texts))).tolist() == [253402214400.0, -62135596800.0, 1.0000005]
    assert times(data_of(by="time", column="c", since="7"), rows_of(pa.array(["7", "1e3"]))).tolist() == [7.0, 1000.0]


@pytest.mark.parametrize(
    ("since", "column", "words"),
    [
        ("2019-11-24", pa.array([5, 6]), "write it as a number"),
        ("5", pa.array(stamps("2019-11-24")), "write it in ISO 8601"),
        ("5", pa.array([[1], [2]]), "list"),
    ],
)
def test_a_column_of_another_kind_is_refused(since: str, column: pa.Array, words: str) -> None:
    with pytest.raises(DataError, match=words) as refused:
        fates(data_of(by="time", column="c", since=since), column)
    assert "f.csv: column 'c' of data.split: found type" in str(refused.value)


def test_a_list_column_splits_nothing() -> None:
    with pytest.raises(DataError, match=r"f\.csv: column 'c' of data\.split: found type list"):
        fates(data_of(by="hash", column="c", eval_fraction=0.1), pa.array([[1], [2]]))


@pytest.mark.parametrize(
    ("since", "cells", "bad_at", "reason"),
    [
        ("2019-11-24", ["2019-11-24", "yesterday", "", "2019-11-25Z"], [1, 2, 3], "found 'yesterday', expected a time"),
        ("2019-11-24", ["2019-11-24", "", "2019-11-25"], [1], "the time is missing"),
        ("5", ["5", "x", "6", ""], [1, 3], "found 'x', expected a number"),
        ("5", ["5", "-inf", "6", "1e999"], [1, 3], "found -inf, expected a finite number"),
    ],
)
def test_a_row_without_a_time_is_a_bad_row(since: str, cells: list[str], bad_at: list[int], reason: str) -> None:
    data, rows = data_of(by="time", column="c", since=since), rows_of(pa.array(cells))
    with pytest.raises(DataError, match=r"f\.csv:3: column 'c' of data\.split: ") as refused:
        leave_out_untimed(data, rows, BadRows())
    assert reason in str(refused.value)
    bad = BadRows("skip")
    kept = leave_out_untimed(data, rows, bad)
    assert sorted(row.number - 2 for row in bad.rows) == bad_at
    assert next(row.reason for row in bad.rows if row.number == 3).startswith(reason)
    assert {row.column for row in bad.rows} == {"c"}
    assert kept.extra["c"].to_pylist() == [cell for at, cell in enumerate(cells) if at not in bad_at]
    assert held_out(data, 1, kept).all()


def test_only_a_split_that_reads_one_names_a_column() -> None:
    assert split_column(data_of(eval_fraction=0.1)) is None
    assert split_column(data_of(by="time", column="c", since="5")) == "c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5.0),
        ("-1e3", -1000.0),
        ("1970-01-01T00:00:10Z", 10),
        ("1970-01-01 09:00:10+09:00", 10),
        (" 1970-01-02 ", 86400),
        ("0001-01-01T00:00:00+14:00", -62135647200),
        ("9999-12-31T23:59:59-14:00", 253402351199),
    ],
)
def test_times_of_a_configuration(text: str, expected: float) -> None:
    time = read_time(text)
    assert (time.timestamp() if isinstance(time, datetime.datetime) else time) == expected


def test_a_text_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="found 'June'"):
        read_time("June")
