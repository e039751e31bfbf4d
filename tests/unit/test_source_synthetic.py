"""The synthetic source: reproducible rows, one teacher for both splits, a floor that is the floor."""

from __future__ import annotations

import math
import pickle
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from source_cases import blocks_of, table_of

from data.bad_rows import BadRows
from data.registry import open_source
from data.sources.synthetic import BLOCK_ROWS, SyntheticSource

SMALL = {"rows": 20000, "eval_rows": 3000}


def make(split: Literal["train", "eval"] = "train", seed: int = 1, **params: Any) -> SyntheticSource:
    source = open_source("synthetic", [], {**SMALL, **params}, seed=seed, split=split)
    assert isinstance(source, SyntheticSource)
    return source


def table(source: SyntheticSource, columns: list[str] | None = None) -> pa.Table:
    return table_of(source, columns).unify_dictionaries()


def label_entropy(label: np.ndarray[Any, Any]) -> float:
    rate = float(label.mean())
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def test_columns_are_criteos_with_nulls_where_missing() -> None:
    source = make(rows=2000)
    rows = table(source)
    assert rows.column_names == ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    assert source.label_column == "label"
    assert rows.schema.field("I1").type == pa.int64()
    assert rows.schema.field("C1").type == pa.dictionary(pa.int32(), pa.string())
    assert all(len(text) == 8 and int(text, 16) >= 0 for text in rows["C3"].unique().drop_null().to_pylist())
    shares = [rows[name].null_count / len(rows) for name in rows.column_names[1:]]
    assert 0.05 < np.mean(shares) < 0.15
    assert rows["label"].null_count == 0


def test_reading_twice_gives_the_same_rows_and_a_longer_log_starts_with_them() -> None:
    short, long = make(rows=BLOCK_ROWS + 100), make(rows=2 * BLOCK_ROWS)
    assert table(short).equals(table(short))
    assert table(long).slice(0, BLOCK_ROWS + 100).equals(table(short))


def test_the_columns_asked_for_do_not_change_the_rows() -> None:
    assert (
        table(make(rows=500), ["C7", "label"]).to_pylist() == table(make(rows=500)).select(["C7", "label"]).to_pylist()
    )


def test_rows_are_numbered_through_the_chunks() -> None:
    source = make(rows=BLOCK_ROWS + 7)
    blocks = list(blocks_of(source, ["label"]))
    assert [(b.numbers[0], b.num_rows) for b in blocks] == [(1, BLOCK_ROWS), (BLOCK_ROWS + 1, 7)]
    assert blocks[1].place(6) == f"synthetic train rows row {BLOCK_ROWS + 7}"
    assert sum(chunk.num_bytes for chunk in source.chunks()) == source.num_bytes()
    assert source.inputs() == []


def test_a_chunk_made_elsewhere_and_out_of_order_has_the_same_rows() -> None:
    first, second = make(rows=BLOCK_ROWS + 7).chunks()
    copy = pickle.loads(pickle.dumps(second))
    assert len(pickle.dumps(second)) < 2000
    assert all(chunk.rereadable for chunk in (first, second))
    (expected,), (made,) = (list(chunk.blocks(["I1", "C1"], BadRows())) for chunk in (second, copy))
    assert made.columns.equals(expected.columns)
    assert list(made.row_numbers) == list(expected.row_numbers)


def test_seeds_and_splits_give_other_rows_of_the_same_categories() -> None:
    rows = [table(make(split, seed), ["I1", "C1"]) for split, seed in (("train", 1), ("train", 2), ("eval", 1))]
    heads = [part.slice(0, 3000).to_pylist() for part in rows]
    assert heads[0] != heads[1]
    assert heads[0] != heads[2]
    known = [set(part["C1"].unique().drop_null().to_pylist()) for part in rows]
    assert known[2] <= known[0] | known[1]


def test_the_teacher_is_fixed_by_its_own_seed() -> None:
    """Click rates by category agree between data seeds, and not between teachers."""

    def rates(seed: int, teacher_seed: int) -> np.ndarray[Any, Any]:
        rows = table(make(seed=seed, teacher_seed=teacher_seed), ["label", "C26"]).to_pandas(
            strings_to_categorical=False
        )
        return rows.groupby(rows["C26"].astype(object).fillna(""))["label"].mean().to_numpy()

    assert np.abs(rates(1, 0) - rates(2, 0)).max() < 0.1
    assert not np.allclose(np.sort(rates(1, 0)), np.sort(rates(1, 5)), atol=0.02)


@pytest.mark.parametrize("teacher_seed", [0, 1, 2])
def test_defaults_have_the_documented_rate_and_floor(teacher_seed: int) -> None:
    source = make(teacher_seed=teacher_seed)
    assert 0.23 < table(source, ["label"])["label"].to_numpy().mean() < 0.27
    assert 0.74 < source.bayes_ne() < 0.80


def test_base_rate_and_scale_mean_what_they_say() -> None:
    rare = make(base_rate=0.02, rows=50000)
    assert 0.015 < table(rare, ["label"])["label"].to_numpy().mean() < 0.025
    assert make(teacher_scale=3.0).bayes_ne() < make(teacher_scale=1.5).bayes_ne() < make(teacher_scale=0.5).bayes_ne()


def test_bayes_ne_is_below_what_the_best_single_column_reaches() -> None:
    """Each column's own click rates, fitted on the very rows that they are scored on, do not beat the teacher."""
    source = make()
    rows = table(source, ["label", *(f"C{i}" for i in range(1, 27))]).to_pandas()
    label, floor = rows["label"].to_numpy(), source.bayes_ne()
    for name in rows.columns[1:]:
        rate = rows.groupby(rows[name].astype(object).fillna(""))["label"].transform("mean").to_numpy()
        one_column = -np.log(np.where(label == 1, rate, 1 - rate)).mean() / label_entropy(label)
        assert floor < one_column < 1.0


def test_the_floor_of_an_eval_split_is_of_its_own_rows_and_nan_without_any() -> None:
    assert make("eval").bayes_ne() != make("train").bayes_ne()
    assert make("eval").bayes_ne() == make("eval").bayes_ne()
    assert math.isnan(make("eval", eval_rows=0).bayes_ne())
    assert list(make("eval", eval_rows=0).chunks()) == []


def test_the_fingerprint_follows_everything_that_the_rows_depend_on() -> None:
    sources = [make(), make(seed=2), make("eval"), make(rows=20001), make(teacher_seed=1), make(max_categories=5)]
    assert len({source.fingerprint() for source in sources}) == len(sources)
    assert make().fingerprint() == make().fingerprint()


def test_small_shapes_work() -> None:
    source = make(dense=1, sparse=1, max_categories=1, rows=100)
    assert table(source).column_names == ["label", "I1", "C1"]
