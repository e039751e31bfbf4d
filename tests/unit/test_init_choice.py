"""What ``erase-rec init`` decides by facts that no small file has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from erase_rec.api.init_choice import MAX_BUCKETS, Choice, Pace, choose, embedding_dim
from erase_rec.api.init_facts import ColumnFacts

TEXT = ColumnFacts(name="x", form="text", kind="string", rows=200_000, distinct=150_000, examples=("a",), length=8)
NUMBER = ColumnFacts(
    name="x", form="number", kind="int64", rows=1000, distinct=400, whole=True, low=0, high=90_000, typical=900
)


def test_many_new_values_are_hashed_where_the_rest_of_the_file_brings_more() -> None:
    chosen = choose(TEXT, total_rows=50_000_000)
    assert chosen.settings == {"encoding": "hash", "num_embeddings": MAX_BUCKETS}
    assert chosen.categories == 37_500_000
    few = choose(TEXT, total_rows=200_000)
    assert few.settings == {"encoding": "vocabulary", "min_count": 2}
    assert few.categories == 150_000
    known = choose(replace(TEXT, distinct=5000), total_rows=50_000_000)
    assert known.settings == {"encoding": "vocabulary", "min_count": 1}
    assert known.categories == 5000


def test_buckets_are_as_many_as_categories_at_least() -> None:
    chosen = choose(TEXT, total_rows=4_000_000)
    assert chosen.categories == 3_000_000
    assert chosen.settings["num_embeddings"] == 1 << 22


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ({"name": "price"}, "dense"),
        ({"name": "item_id"}, "sparse"),
        ({"name": "userId"}, "sparse"),
        ({"name": "userid"}, "sparse"),
        ({"name": "userRatingCount"}, "dense"),
        ({"name": "C17"}, "sparse"),
        ({"name": "I17"}, "dense"),
        ({"distinct": 12}, "sparse"),
        ({"high": 500.0}, "sparse"),
        ({"high": 500.0, "whole": False}, "dense"),
        ({"high": 2.0**60}, "sparse"),
        ({"name": "item_id", "distinct": 990}, "out"),
        ({"distinct": 1000, "in_order": True}, "out"),
        ({"name": "timestamp", "low": 1.5e9, "high": 1.6e9}, "out"),
        ({"distinct": 1}, "out"),
        ({"distinct": 1, "missing": 500}, "sparse"),
        ({"missing": 1000, "distinct": 0}, "out"),
        ({"says_label": True}, "out"),
    ],
)
def test_numbers_are_quantities_codes_or_left_out(changes: dict[str, object], role: str) -> None:
    chosen = choose(replace(NUMBER, **changes), total_rows=1000)
    assert chosen.role == role
    assert chosen.why


@pytest.mark.parametrize(("categories", "dim"), [(0, 8), (1_000, 8), (1_001, 16), (100_000, 16), (100_001, 32)])
def test_the_dimension_grows_with_the_largest_table(categories: int, dim: int) -> None:
    assert embedding_dim([Choice("x", "sparse", "", {}, categories), Choice("y", "dense", "")])[0] == dim


@pytest.mark.parametrize(
    ("rows", "pace"),
    [
        (1, Pace(epochs=2, batch_size=64, log_every_steps=1, warmup_steps=0)),
        (20_000, Pace(epochs=2, batch_size=256, log_every_steps=3, warmup_steps=7)),
        (1_000_000, Pace(epochs=1, batch_size=1024, log_every_steps=48, warmup_steps=97)),
        (1_000_000_000, Pace(epochs=1, batch_size=8192, log_every_steps=6103, warmup_steps=500)),
    ],
)
def test_the_pace_follows_the_rows(rows: int, pace: Pace) -> None:
    assert Pace.of(rows) == pace
