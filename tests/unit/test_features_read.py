"""Reading rows: what is refused and where, bad rows that cost only themselves, raw rows cut and joined."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from feature_cases import MISSING, assert_same_block, block, encode, features_config, fit, ids, read
from hypothesis import given, settings
from hypothesis import strategies as st

from data.bad_rows import BadRow, BadRows
from data.errors import DataError
from data.features.fit import FeaturesFit, merge_fits
from data.features.raw import CellCounts, RawRows, concatenate, count_cells
from data.features.raw_file import read_raw, write_raw
from data.sources.source import Block
from erase_rec.config.schema import FeaturesConfig


def places(bad: BadRows) -> list[tuple[int, str, str]]:
    return [(row.number, row.column, row.value) for row in bad.rows]


@pytest.mark.parametrize("column", [["0", "4", "", "3"], pa.array([0, 4, None, 3]), pa.array([0.0, 4.0, None, 3.0])])
def test_ids_are_taken_as_they_are(column: Any) -> None:
    features = fit(features_config({"name": "c", "encoding": "id", "num_embeddings": 5}))
    assert ids(encode(features, block(c=column))) == [2, 6, MISSING, 5]
    assert features.table_rows == {"c": 7}


@pytest.mark.parametrize(
    "column", [["-1", "4", "0"], pa.array([-1, 4, 0]), pa.array([-1.0, 4.0, 0.0]), pa.array([-1, 4, 0], pa.int8())]
)
def test_a_missing_value_is_no_id_outside_the_range(column: Any) -> None:
    config = features_config({"name": "c", "encoding": "id", "num_embeddings": 5, "missing_values": ["-1"]})
    assert ids(encode(fit(config), block(c=column))) == [MISSING, 6, 2]


@pytest.mark.parametrize("wrong", ["5", "6", "-1", "x", "1.5", "18446744073709551615"])
def test_an_id_outside_the_table_is_refused_with_its_place(wrong: str) -> None:
    config = features_config({"name": "item", "column": "c", "encoding": "id", "num_embeddings": 5})
    message = rf"log\.csv:4: feature 'item' \(column 'c'\): found id '{wrong}', .*0 to 4 \(num_embeddings: 5\)"
    with pytest.raises(DataError, match=message):
        read(config, block(c=["0", "4", wrong, wrong]))


@pytest.mark.parametrize(
    "column",
    [
        ["0", "7", "x", "", "4", "-1"],
        pa.array([0, 7, 2**40, None, 4, -1]),
        pa.array([0, 7, 2**63, None, 4, 2**64 - 1], pa.uint64()),
        pa.array([0.0, 7.0, 0.5, None, 4.0, -1.0]),
        pa.array(["0", "7", "x", None, "4", "7"]).dictionary_encode(),
    ],
    ids=str,
)
def test_every_wrong_id_costs_its_own_row(column: Any) -> None:
    config = features_config({"name": "c", "encoding": "id", "num_embeddings": 5})
    bad = BadRows("skip")
    raw = read(config, block(c=column), bad=bad)
    assert raw.sparse[0].values.tolist() == [2, MISSING, 6]
    assert [row.number for row in bad.rows] == [3, 4, 7]
    assert raw.rows.numbers.tolist() == [2, 5, 6]


def test_an_id_outside_the_table_is_found_in_a_bag() -> None:
    config = features_config(
        {"name": "c", "encoding": "id", "num_embeddings": 5, "multi_valued": True, "separator": "|"}
    )
    with pytest.raises(DataError, match=r"log\.csv:4: feature 'c': found id '9'"):
        read(config, block(c=["0|1", "", "2|9"]))
    bad = BadRows("quarantine")
    raw = read(config, block(c=["0|9|1", "1|0", "7|8", "", "4"]), bad=bad)
    assert places(bad) == [(2, "c", "0|9|1"), (4, "c", "7|8")]
    assert raw.sparse[0].values.tolist() == [3, 2, 6]
    assert raw.sparse[0].offsets is not None
    assert raw.sparse[0].offsets.tolist() == [0, 2, 2, 3]


def test_ids_past_the_longest_bag_are_not_read() -> None:
    config = features_config(
        {"name": "c", "encoding": "id", "num_embeddings": 5, "multi_valued": True, "max_length": 2}
    )
    assert read(config, block(c=[[1, 2, 99], [0]])).sparse[0].values.tolist() == [3, 4, 2]


def test_unused_dictionary_entries_are_not_refused() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["1", "99"]))
    config = features_config({"name": "c", "encoding": "id", "num_embeddings": 5})
    assert read(config, block(c=column)).sparse[0].values.tolist() == [3, 3]


@pytest.mark.parametrize("fill", ["5", "none"])
def test_a_fill_that_is_no_id_is_a_mistake_of_the_configuration(fill: str) -> None:
    config = features_config({"name": "c", "encoding": "id", "num_embeddings": 5, "fill": fill})
    with pytest.raises(DataError, match=rf"^features: 'c': fill '{fill}' is no id; .* 0 to 4"):
        read(config, block(c=["1"]), bad=BadRows("skip"))


def test_a_dense_cell_that_is_no_number_is_named() -> None:
    config = features_config(dense=({"name": "d", "column": "amount"},))
    with pytest.raises(DataError, match=r"log\.csv:11: feature 'd' \(column 'amount'\): found 'abc'.*missing_values"):
        read(config, block(first_number=10, amount=["1", "abc"]))


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_column_of_the_wrong_type_is_named(policy: Literal["error", "skip"]) -> None:
    with pytest.raises(DataError, match=r"log\.csv: feature 'd': found type list<.*expected integer"):
        read(features_config(dense=({"name": "d"},)), block(d=[[1], [2]]), bad=BadRows(policy))


@pytest.mark.parametrize(
    "column",
    [
        ["0", "1", "1"],
        pa.array(["1", "0", "1", "1"], pa.large_string()).slice(1),
        ["0.0", "1.0", "1.00"],
        ["false", "TRUE", "true"],
        pa.array([0, 1, 1], pa.int8()),
        pa.array([0.0, 1.0, 1.0]),
        pa.array([False, True, True]),
    ],
)
def test_plain_labels(column: Any) -> None:
    raw = read(features_config({"name": "c", "encoding": "vocabulary"}), block(c=["a"] * 3, label=column))
    assert raw.label.tolist() == [0, 1, 1]
    assert raw.label.dtype == np.uint8


@pytest.mark.parametrize(
    ("rule", "column"),
    [
        ({"positive": [">50K"]}, ["<=50K", ">50K", ">50K"]),
        ({"positive": ["0"]}, ["1", "0", "0"]),
        ({"positive": ["1"], "negative": ["-1"]}, ["-1", "1", "1"]),
        ({"positive": ["1"], "negative": ["-1"]}, pa.array([-1.0, 1.0, 1.0])),
        ({"at_least": 4}, ["3.5", "4", "5"]),
        ({"at_least": 1}, ["0", "1", "1"]),
        ({"at_least": 4}, pa.array([1, 4, 5])),
    ],
)
def test_label_rules(rule: dict[str, Any], column: Any) -> None:
    config = features_config({"name": "c", "encoding": "vocabulary"})
    assert read(config, block(c=["a"] * 3, label=column), label=rule).label.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        ({}, "-1", "found label '-1', expected 0 or 1; say what it means with data.label.positive"),
        ({}, "2", "found label '2'"),
        ({}, "/", "found label '/'"),
        ({}, "click", "found label 'click'"),
        ({}, "", "the label is missing"),
        ({"positive": ["1"], "negative": ["-1"]}, "0", "found label '0', expected one of '1', '-1'"),
        ({"positive": ["1"]}, None, "the label is missing"),
        ({"at_least": 4}, "nan", "the label is missing"),
        ({"at_least": 4}, "good", "found 'good', expected a number"),
    ],
)
def test_a_label_without_a_meaning_is_refused_or_left_out(
    rule: dict[str, Any], value: str | None, message: str
) -> None:
    config = features_config({"name": "c", "num_embeddings": 9})
    rows = block(c=list("abcd"), label=["1", value, "1", value])
    with pytest.raises(DataError, match=rf"log\.csv:3: label column 'label': {message}"):
        read(config, rows, label=rule)
    bad = BadRows("skip")
    raw = read(config, rows, label=rule, bad=bad)
    assert raw.rows.numbers.tolist() == [2, 4]
    assert places(bad) == [(3, "label", value or ""), (5, "label", value or "")]
    assert message in bad.rows[0].reason


def messy() -> tuple[FeaturesConfig, Block]:
    """Rows 1, 2, 4, 5, 6 and 8 are bad, 4 in several columns."""
    config = features_config(
        {"name": "i", "encoding": "id", "num_embeddings": 5},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
        dense=({"name": "d"}, {"name": "e"}),
    )
    rows = block(
        d=["1", "x", "3", "4", "y", "6", "7", "8", "9"],
        e=["1", "2", "z", "", "5", "6", "7", "8", "9"],
        i=["0", "1", "2", "3", "9", "7", "4", "", "1"],
        m=["a|b", "c", "d", "", "e", "f", "g|h", "i", "j"],
        w=["1|2", "3", "4", "", "5", "6", "7", "8", "9"],
        label=["0", "1", "0", "1", "0", "1", "0", "1", "2"],
    )
    return config, rows


def test_bad_rows_cost_only_themselves() -> None:
    config, rows = messy()
    bad = BadRows("quarantine")
    raw = read(config, rows, bad=bad, extra=["d"])
    assert bad.rows[0] == BadRow(
        file="log.csv",
        unit="line",
        number=3,
        column="d",
        value="x",
        reason="found 'x', expected a number; correct it or list it in missing_values",
    )
    assert places(bad) == [
        (3, "d", "x"),
        (4, "e", "z"),
        (6, "d", "y"),
        (7, "i", "7"),
        (8, "w", "7"),
        (10, "label", "2"),
    ]
    assert raw.row_numbers.tolist() == [0, 3, 7]
    assert raw.rows.numbers.tolist() == [2, 5, 9]
    assert [values.tolist() for values in raw.dense] == [[1, 4, 8], pytest.approx([1, np.nan, 8], nan_ok=True)]
    assert raw.sparse[0].values.tolist() == [2, 5, MISSING]
    assert raw.label.tolist() == [0, 1, 1]
    assert raw.extra["d"].to_pylist() == ["1", "4", "8"]


def test_rows_without_bad_ones_are_read_the_same_alone() -> None:
    config, rows = messy()
    raw = read(config, rows, bad=BadRows("skip"))
    good = np.zeros(9, dtype=np.bool_)
    good[raw.row_numbers] = True
    alone = read(config, rows.select(good))
    features = merge_fits(config, [_fitted(config, alone)])
    assert_same_block(features.encode(raw), features.encode(alone))


def test_the_first_bad_column_is_refused_under_the_policy_error() -> None:
    config, rows = messy()
    with pytest.raises(DataError, match=r"^log\.csv:3: feature 'd': found 'x', expected a number; correct it"):
        read(config, rows)


@pytest.mark.parametrize("form", ["plain", "dictionary", "list"])
def test_views_of_text_can_be_selected(form: str) -> None:
    """Arrow has no kernel for it; files of other writers hold such columns."""
    texts = pa.array(["a", None, "b"], pa.string_view())
    column = {
        "plain": texts,
        "dictionary": texts.dictionary_encode(),
        "list": pa.array([["a"], None, ["b"]], pa.list_(pa.string_view())),
    }[form]
    config = features_config({"name": "c", "encoding": "vocabulary", "multi_valued": form == "list"})
    raw = read(config, block(c=column, label=["1", "x", "0"]), bad=BadRows("skip"), extra=["c"])
    assert raw.select(np.array([False, True])).extra["c"].to_pylist() == [["b"] if form == "list" else "b"]
    assert raw.sparse[0].count_missing() == 0


def test_a_block_of_bad_rows_only_leaves_none() -> None:
    config, rows = messy()
    keep = np.zeros(9, dtype=np.bool_)
    keep[[1, 4]] = True
    raw = read(config, rows.select(keep), bad=BadRows("skip"))
    assert raw.num_rows == 0
    assert count_cells(config, raw).cells.tolist() == [0, 0, 0, 0]


@given(st.lists(st.sampled_from(["ok", "d", "i", "label"]), min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_any_mix_of_bad_rows_is_sorted_out(kinds: list[str]) -> None:
    config = features_config({"name": "i", "encoding": "id", "num_embeddings": 5}, dense=({"name": "d"},))
    rows = block(
        **{
            column: [wrong if kind == column else str(row % 2) for row, kind in enumerate(kinds)]
            for column, wrong in {"d": "?", "i": "5", "label": "3"}.items()
        }
    )
    bad = BadRows("skip")
    raw = read(config, rows, bad=bad)
    assert [(row.number - 2, row.column) for row in bad.rows] == [
        (row, kind) for row, kind in enumerate(kinds) if kind != "ok"
    ]
    good = [row for row, kind in enumerate(kinds) if kind == "ok"]
    assert raw.row_numbers.tolist() == good
    assert raw.dense[0].tolist() == raw.label.tolist() == [row % 2 for row in good]


def everything() -> tuple[FeaturesConfig, Block]:
    """All kinds of features, one row a line of a table below."""
    config = features_config(
        {"name": "v", "encoding": "vocabulary", "fill": "z"},
        {"name": "h", "encoding": "hash", "num_embeddings": 50},
        {"name": "i", "encoding": "id", "num_embeddings": 9},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
        {"name": "f", "encoding": "hash", "num_embeddings": 9, "multi_valued": True, "separator": "|", "fill": "q"},
        dense=({"name": "d", "transform": "standardize"}, {"name": "e", "fill": 1e300}),
    )
    rows = block(
        v=["x", "x", "", "z", "y"],
        h=["a", "", "c", "d", "a"],
        i=["0", "1", "2", "8", ""],
        m=["p|q", "", "q", "p||q", "r"],
        w=["1|2", "", "3", "4|5|6", "0.1"],
        f=["a", "", "b|c", "|d", "a|a"],
        d=["1", "2", "", "1e40", "0.1"],
        e=["", "1", "2", "3", "-inf"],
        label=["0", "1", "1", "0", "1"],
        day=["mon", "tue", "wed", "thu", "fri"],
    )
    return config, rows


def _fitted(config: FeaturesConfig, raw: RawRows) -> FeaturesFit:
    fitting = FeaturesFit(config)
    fitting.add(raw)
    return fitting


def test_missing_and_clipped_cells_are_counted_before_they_are_filled() -> None:
    config, rows = everything()
    raw = read(config, rows)
    counts = count_cells(config, raw)
    assert counts.cells.tolist() == [5, 5, 5, 5, 5, 8, 8]
    assert counts.missing.tolist() == [1, 1, 1, 1, 1, 2, 2]
    assert counts.clipped.tolist() == [1, 2], "1e40; -inf and the fill of 1e300"
    keep = np.array([True, False, False, True, True])
    parts = [count_cells(config, raw.select(keep)), count_cells(config, raw.select(~keep))]
    total = parts[0] + parts[1] + CellCounts.zero(config)
    for name in ("cells", "missing", "clipped"):
        np.testing.assert_array_equal(getattr(total, name), getattr(counts, name))


@given(st.lists(st.integers(0, 4), max_size=4), st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=60, deadline=None)
def test_blocks_cut_joined_and_selected_are_the_rows_themselves(cuts: list[int], keep: list[bool]) -> None:
    config, rows = everything()
    features = merge_fits(config, [_fitted(config, read(config, rows))])
    bounds = sorted({0, 5, *cuts})
    kept = np.array(keep)
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        inside = (np.arange(5) >= start) & (np.arange(5) < stop)
        pieces.append(read(config, rows.select(inside), extra=["day"]))
    whole = read(config, rows.select(kept), extra=["day"])
    joined = concatenate(pieces).select(kept)
    assert_same_block(features.encode(joined), features.encode(whole))
    assert joined.extra["day"].to_pylist() == whole.extra["day"].to_pylist()
    assert joined.row_numbers.tolist() == np.flatnonzero(kept).tolist()


def test_joined_vocabularies_hold_each_text_once() -> None:
    config = features_config({"name": "c", "encoding": "vocabulary"})
    joined = concatenate([read(config, block(c=["a", "b"])), read(config, block(c=["b", "", "a", "c"]))])
    texts = joined.sparse[0].texts
    assert texts is not None
    assert sorted(text for text in texts.to_pylist() if text) == ["a", "b", "c"]


@pytest.mark.parametrize("columns", ["all", "dense", "none left"])
def test_raw_rows_come_back_from_a_file(tmp_path: Path, columns: str) -> None:
    config, rows = everything()
    if columns == "dense":
        config = config.model_copy(update={"sparse": ()})
    raw = read(config, rows, extra=["day"])
    if columns == "none left":
        raw = raw.select(np.zeros(5, dtype=np.bool_))
    write_raw(tmp_path / "raw", raw)
    back = read_raw(tmp_path / "raw")
    (tmp_path / "raw").unlink()
    features = merge_fits(config, [_fitted(config, raw)])
    assert_same_block(features.encode(back), features.encode(raw))
    assert [values.dtype for values in back.dense] == [np.float64] * 2
    np.testing.assert_array_equal(back.row_numbers, raw.row_numbers)
    assert back.file_index == raw.file_index
    assert back.extra["day"].to_pylist() == raw.extra["day"].to_pylist()
    for name in ("cells", "missing", "clipped"):
        np.testing.assert_array_equal(getattr(count_cells(config, back), name), getattr(count_cells(config, raw), name))


def test_numbers_that_float32_holds_take_half_the_room(tmp_path: Path) -> None:
    config = features_config(dense=({"name": "d"},))
    sizes = []
    for name, value in (("whole", "16777216"), ("broken", "0.1")):
        write_raw(tmp_path / name, read(config, block(d=[value, "", *["7"] * 9998])))
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] - sizes[0] == pytest.approx(40_000, abs=200)
    assert read_raw(tmp_path / "broken").dense[0][0] == 0.1
