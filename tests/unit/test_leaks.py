"""Rows that are on both sides of the split, or twice on one: against plain Python, in one pass and in many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.block import Rows
from data.errors import DataError
from data.features.cells import BadColumnError
from data.leaks import EXAMPLES, IdRun, find_repeats
from data.sources.source import Split

FILES = ["a.csv", "b.csv"]


def run(split: Split, ids: Sequence[str | None], file: int = 0, first: int = 1) -> IdRun:
    numbers = np.arange(first, first + len(ids))
    return IdRun.of(split, pa.array(ids, pa.string()), Rows(FILES[file], "line", numbers), file)


def test_a_leak_names_both_places() -> None:
    found = find_repeats([run("train", ["x", "y", "z"]), run("eval", ["w", "y"], file=1, first=7)], 1 << 20)
    assert (found.rows, found.leaked, found.repeated) == (5, 1, {"train": 0, "eval": 0})
    with pytest.raises(DataError, match="1 held-out rows have an id") as refused:
        found.refuse_leaks("id", FILES, "line")
    assert "such as a.csv:2 and b.csv:8;" in str(refused.value)
    assert "data.split.column=id" in str(refused.value)


def test_no_leak_is_no_error() -> None:
    found = find_repeats([run("train", ["x", "y"]), run("eval", ["w"])], 1 << 20)
    found.refuse_leaks("id", FILES, "line")
    assert found.remarks("id", FILES, "line") == []
    assert find_repeats([], 1 << 20).rows == 0


def test_repeats_within_a_split_and_rows_without_id_are_remarks() -> None:
    found = find_repeats([run("train", ["x", None, "x", "", "x"]), run("eval", ["q", "q"], file=1)], 1 << 20)
    found.refuse_leaks("id", FILES, "line")
    assert found.repeated == {"train": 2, "eval": 1}
    first, second = found.remarks("id", FILES, "line")
    assert "2 train rows and 1 eval rows repeat an id" in first
    assert "a.csv:1 and a.csv:3, a.csv:3 and a.csv:5, b.csv:1 and b.csv:2" in first
    assert "2 rows have no id" in second


def test_a_chance_match_is_said_where_it_can_happen() -> None:
    found = find_repeats([run("train", ["x"]), run("eval", ["x"], file=1)], 1 << 20)
    found.rows = 4_200_000_000
    with pytest.raises(DataError, match="by 64-bit hashes; of so many rows a chance match has 5e-01"):
        found.refuse_leaks("id", FILES, "row")


texts = st.lists(st.sampled_from(["", *"abcdefghij"]), max_size=12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["train", "eval"]), texts), max_size=5), st.sampled_from([1, 64 * 7, 1 << 20])
)
def test_counts_are_those_of_plain_python(parts: list[tuple[Split, list[str]]], memory: int) -> None:
    runs = [run(split, ids, first=100 * at) for at, (split, ids) in enumerate(parts)]
    found = find_repeats(runs, memory)
    ids: dict[Split, Counter[str]] = {"train": Counter(), "eval": Counter()}
    for split, some in parts:
        ids[split].update(name for name in some if name)
    assert found.leaked == sum(count for name, count in ids["eval"].items() if name in ids["train"])
    assert found.repeated == {split: sum(counts.values()) - len(counts) for split, counts in ids.items()}
    assert found.missing == sum(not name for _, some in parts for name in some)
    assert len(found.leaks) == min(EXAMPLES, len(set(ids["train"]) & set(ids["eval"])))
    whole = find_repeats(runs, 1 << 30)
    assert (found.leaks, found.doubles) == (whole.leaks, whole.doubles), "passes do not matter"


def test_runs_lie_in_files(tmp_path: Path) -> None:
    written = run("eval", [f"id{number}" for number in range(1000)], file=1, first=5)
    written.write(tmp_path / "ids.npy")
    read = IdRun.read(tmp_path / "ids.npy", "eval", 3)
    np.testing.assert_array_equal(read.hashes, written.hashes)
    np.testing.assert_array_equal(read.places, written.places)
    assert (np.diff(read.hashes.astype(object)) >= 0).all()
    assert find_repeats([run("train", ["id7"]), read], 1 << 12).leaks == [(1, (1 << 40) + 12)]


def test_integers_and_texts_are_the_same_ids() -> None:
    rows = Rows("a", "row", np.arange(1, 4))
    numbers = IdRun.of("train", pa.array([5, 6, None]), rows, 0)
    assert numbers.missing == 1
    assert find_repeats([numbers, run("eval", ["6"])], 1 << 20).leaked == 1
    with pytest.raises(BadColumnError):
        IdRun.of("train", pa.array([[1], [2], [3]]), rows, 0)
