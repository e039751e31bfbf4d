"""Fitting: the same features whichever chunks are looked at together, in memory or stored, in one pass or many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from feature_cases import (
    UNSEEN,
    assert_same_block,
    block,
    encode,
    features_config,
    fit,
    ids,
    read,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.features import counts
from data.features.counts import PARTITIONS, CategoryCounts, Counted, Partitioned, frequent_categories
from data.features.dense import Standard
from data.features.fit import FeaturesFit, merge_fits
from data.features.fitted import ENCODINGS_FILE, STATE_FILE, Features, encode_training, needs_fit
from data.features.hashing import hash_texts
from data.features.raw import RawRows
from erase_rec.config.schema import FeaturesConfig


def mixed_config() -> FeaturesConfig:
    return features_config(
        {"name": "v", "encoding": "vocabulary", "min_count": 2},
        {"name": "f", "encoding": "vocabulary", "column": "v", "fill": "filled", "num_embeddings": 40},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|"},
        {"name": "h", "encoding": "hash", "num_embeddings": 5000, "column": "v"},
        {"name": "small", "encoding": "hash", "num_embeddings": 7, "column": "v", "fill": "filled"},
        {"name": "i", "encoding": "id", "num_embeddings": 9},
        dense=({"name": "d", "transform": "standardize"}, {"name": "e", "column": "d"}),
    )


def chunks(config: FeaturesConfig, number: int = 6) -> list[RawRows]:
    """Chunks of 200 rows with frequent, rare and missing categories."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(number):
        drawn = [["", f"t{value}"][value > 1] for value in rng.zipf(1.3, 200).tolist()]
        rows = block(
            v=drawn,
            m=["|".join(drawn[row : row + row % 4]) for row in range(200)],
            i=[str(value) for value in rng.integers(0, 9, 200)],
            d=[["", f"{value:.3f}"][value > -1] for value in rng.normal(0, 1, 200).tolist()],
        )
        found.append(read(config, rows))
    return found


def fitted(config: FeaturesConfig, *raws: RawRows) -> FeaturesFit:
    fitting = FeaturesFit(config)
    for raw in raws:
        fitting.add(raw)
    return fitting


def assert_same_features(found: Features, expected: Features, raws: list[RawRows]) -> None:
    """Bit for bit: moments, and what is made of rows."""
    assert found.standards == expected.standards
    assert found.table_rows == expected.table_rows
    for raw in raws:
        assert_same_block(found.encode(raw), expected.encode(raw))


def test_chunks_fitted_together_or_apart_in_memory_or_stored_give_the_same_features(tmp_path: Path) -> None:
    config = mixed_config()
    raws = chunks(config)
    expected = merge_fits(config, [fitted(config, *raws)])
    stored = []
    for number, raw in enumerate(raws):
        stored.append(tmp_path / f"{number}.arrow")
        fitted(config, raw).write(stored[-1])
    fitted(config, *raws[2:5]).write(tmp_path / "together")
    for parts in (
        [fitted(config, raw) for raw in raws],
        stored,
        [fitted(config, *raws[:2]), tmp_path / "together", stored[5]],
    ):
        assert_same_features(merge_fits(config, parts), expected, raws)


@pytest.mark.parametrize("memory_bytes", [1, 2000, 20_000, 10**9])
def test_many_passes_over_stored_counts_give_what_one_pass_gives(tmp_path: Path, memory_bytes: int) -> None:
    config = mixed_config()
    raws = chunks(config)
    for number, raw in enumerate(raws):
        fitted(config, raw).write(tmp_path / str(number))
    parts = [tmp_path / str(number) for number in range(len(raws))]
    assert_same_features(merge_fits(config, parts, memory_bytes), merge_fits(config, parts), raws)


def test_less_memory_makes_more_passes() -> None:
    """The bound must take effect: each pass opens each part once."""
    texts = [f"text {number}" for number in range(10_000)]
    part = Partitioned.of(Counted(pa.array(texts, pa.large_string()), np.ones(10_000, dtype=np.int64)))
    opened = Counter[str]()

    def openings(memory_bytes: int) -> int:
        opened.clear()

        def open_part() -> Partitioned:
            opened["part"] += 1
            return part

        assert len(frequent_categories([open_part], 1, None, memory_bytes)) == 10_000
        return opened["part"]

    size = part.num_bytes * counts.MERGE_COPIES
    sizing = 1
    assert openings(size) == 1 + sizing
    assert openings(size // 2) == 2 + sizing
    assert openings(size // 5) == 8 + sizing
    assert openings(1) == PARTITIONS + sizing


def test_a_pass_merges_only_its_share() -> None:
    texts = pa.array([f"text {number}" for number in range(10_000)], pa.large_string())
    part = Partitioned.of(Counted(texts, np.arange(1, 10_001)))
    shares = [part.select(first, first + 32) for first in range(0, PARTITIONS, 32)]
    assert sum(len(share.counts) for share in shares) == 10_000
    assert max(len(share.counts) for share in shares) < 1500, "hashes spread evenly"
    for number, share in enumerate(shares):
        assert set((hash_texts(share.texts) >> np.uint64(61)).tolist()) == {number}


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9)), max_size=12), max_size=12),
    st.integers(1, 20),
    st.integers(1, 9) | st.none(),
    st.sampled_from([1, 3000, 10**6]),
)
@settings(max_examples=100, deadline=None)
def test_frequent_categories_are_those_that_a_counter_finds(
    parts: list[list[tuple[str, int]]], min_count: int, max_categories: int | None, memory_bytes: int
) -> None:
    total = Counter[str]()
    for part in parts:
        for text, count in part:
            total[text] += count
    order = sorted((text for text in total if total[text] >= min_count), key=lambda text: (-total[text], text))
    stored = [
        Partitioned.of(
            Counted(pa.array([text for text, _ in part], pa.large_string()), np.array([n for _, n in part], int))
        )
        for part in parts
    ]
    found = frequent_categories(
        [lambda part=part: part for part in stored],  # type: ignore[misc]
        min_count,
        max_categories,
        memory_bytes,
    )
    assert found.to_pylist() == order[:max_categories]


def test_counts_add_up_over_many_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging pending counts must lose none: 'often' is in every chunk, the others in one each."""
    monkeypatch.setattr(counts, "MIN_PENDING", 10)
    monkeypatch.setattr(counts, "MAX_PENDING_ARRAYS", 3)
    merged = CategoryCounts()
    for number in range(100):
        merged.add(Counted(pa.array(["often", f"once{number}"], pa.large_string()), np.array([2, 1])))
    found = merged.finish()
    assert dict(zip(found.texts.to_pylist(), found.counts.tolist(), strict=True)) == {
        "often": 200,
        **{f"once{number}": 1 for number in range(100)},
    }


@pytest.mark.parametrize("encoding", ["hash", "vocabulary"])
def test_fill_gives_missing_the_row_of_that_category(encoding: str) -> None:
    config = features_config({"name": "c", "encoding": encoding, "num_embeddings": 100, "fill": "0"})
    features = fit(config, block(c=["", "a", "0"]))
    missing, _, zero = ids(encode(features, block(c=["", "a", "0"])))
    assert missing == zero
    assert zero > UNSEEN


@pytest.mark.parametrize("encoding", ["hash", "vocabulary"])
def test_a_fill_that_only_missing_cells_have_is_learnt_from_them(encoding: str) -> None:
    config = features_config({"name": "c", "encoding": encoding, "num_embeddings": 100, "fill": "0", "min_count": 2})
    features = fit(config, block(c=["", "a", ""]))
    missing, zero = ids(encode(features, block(c=["", "0"])))
    assert missing == zero > UNSEEN
    untaught = fit(config, block(c=["a", "a"]))
    assert ids(encode(untaught, block(c=["", "0"]))) == [UNSEEN, UNSEEN], "like any category that training lacked"


def test_fill_of_ids() -> None:
    config = features_config({"name": "c", "encoding": "id", "num_embeddings": 100, "fill": "7"})
    assert ids(encode(fit(config), block(c=["", "7", "8"]))) == [9, 9, 10]


def test_rows_that_are_left_out_teach_nothing() -> None:
    config = features_config(
        {"name": "c", "encoding": "vocabulary"},
        {"name": "h", "encoding": "hash", "num_embeddings": 10000},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|"},
        dense=({"name": "d", "transform": "standardize"},),
    )
    raw = read(config, block(c=["a", "held"], h=["a", "held"], m=["x|y", "held|held"], d=["1", "1000"]))
    features = merge_fits(config, [fitted(config, raw.select(np.array([True, False])))])
    encoded = features.encode(raw)
    assert ids(encoded, 0) == [2, UNSEEN]
    assert ids(encoded, 1)[1] == UNSEEN
    assert encoded.bags[2].values.tolist() == [2, 3, UNSEEN, UNSEEN]
    assert features.standards == (Standard(1.0, 1.0),)


def test_what_needs_a_fit() -> None:
    hashed, ids_ = {"name": "h", "num_embeddings": 9}, {"name": "i", "encoding": "id", "num_embeddings": 9}
    assert not needs_fit(features_config(hashed, ids_, dense=({"name": "d"}, {"name": "e", "transform": "none"})))
    assert needs_fit(features_config(hashed, {"name": "v", "encoding": "vocabulary"}))
    assert needs_fit(features_config(dense=({"name": "d", "transform": "standardize"},)))


def test_training_rows_that_need_no_fit_are_encoded_as_the_fitted_features_do() -> None:
    config = features_config(
        {"name": "h", "num_embeddings": 50, "column": "v"},
        {"name": "f", "num_embeddings": 50, "column": "v", "fill": "filled"},
        {"name": "m", "num_embeddings": 50, "multi_valued": True, "separator": "|", "fill": "filled"},
        {"name": "i", "encoding": "id", "num_embeddings": 9, "fill": "3"},
        dense=({"name": "d"}, {"name": "e", "column": "d", "transform": "none", "fill": 2}),
    )
    raws = chunks(config)
    features = merge_fits(config, [fitted(config, *raws)])
    for raw in raws:
        assert_same_block(encode_training(config, raw), features.encode(raw))


def everything() -> tuple[FeaturesConfig, Any]:
    config = features_config(
        {"name": "a/b", "encoding": "vocabulary", "min_count": 2},
        {"name": "性别", "encoding": "hash", "num_embeddings": 50},
        {"name": "101", "encoding": "id", "num_embeddings": 9},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
        dense=({"name": "d", "transform": "standardize"}, {"name": "e"}),
    )
    columns = {"a/b": list("xxyz"), "性别": list("abcd"), "101": list("0128"), "m": ["p|q", "", "q", "p|p|q"]}
    return config, columns | {"w": ["1|2", "", "3", "4|5|6"], "d": ["1", "2", "", "1e40"], "e": ["", "1", "2", "3"]}


def test_saved_features_encode_identically(tmp_path: Path) -> None:
    config, columns = everything()
    features = fit(config, block(**columns))
    features.save(tmp_path / "features")
    loaded = Features.load(tmp_path / "features")
    assert loaded.config == config
    assert loaded.table_rows == features.table_rows == {"a/b": 3, "性别": 52, "101": 11, "m": 4}
    new = {"a/b": "new", "性别": "new", "101": "7", "m": "new|p", "w": "1|2", "d": "7", "e": "7"}
    other = block(**{name: [*values[::-1], new[name]] for name, values in columns.items()})
    for rows in (block(**columns), other):
        assert_same_block(encode(loaded, rows), encode(features, rows))


def test_features_are_saved_over_those_that_are_in_use(tmp_path: Path) -> None:
    """Loaded ones are memory of the file: writing into it would change them, or end the process."""
    config, columns = everything()
    features = fit(config, block(**columns))
    features.save(tmp_path)
    loaded = Features.load(tmp_path)
    fit(config).save(tmp_path)
    assert_same_block(encode(loaded, block(**columns)), encode(features, block(**columns)))
    assert Features.load(tmp_path).table_rows["m"] == 2


def test_features_without_sparse_ones_can_be_saved(tmp_path: Path) -> None:
    features = fit(features_config(dense=({"name": "d"},)))
    features.save(tmp_path)
    assert Features.load(tmp_path) == features


def test_unreadable_saved_features_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Features.load(tmp_path / "nowhere")
    config, columns = everything()
    fit(config, block(**columns)).save(tmp_path)
    whole = (tmp_path / ENCODINGS_FILE).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        (tmp_path / ENCODINGS_FILE).write_bytes(damaged)
        with pytest.raises(DataError, match="was changed after it was written"):
            Features.load(tmp_path)
    fit(features_config({"name": "c", "encoding": "vocabulary"})).save(tmp_path / "other")
    (tmp_path / "other" / ENCODINGS_FILE).rename(tmp_path / ENCODINGS_FILE)
    with pytest.raises(DataError, match="was changed after it was written"):
        Features.load(tmp_path)
    (tmp_path / STATE_FILE).write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99, this version reads 3"):
        Features.load(tmp_path)
