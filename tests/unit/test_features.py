"""Features: fitted on training rows, the same transform for all rows, missing, unseen and real kept apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.errors import DataError
from data.features.dense import LARGEST, Moments, Standard, transform
from data.features.fit import FeaturesFit
from data.features.fitted import ENCODINGS_FILE, STATE_FILE, Features
from data.features.hashing import hash_texts
from data.sources.source import Block
from data.table import EncodedTable, concatenate
from erase_rec.config.schema import DenseFeatureConfig, FeaturesConfig, LabelConfig

MISSING, UNSEEN = 0, 1


def features_config(*sparse: dict[str, Any], dense: tuple[dict[str, Any], ...] = ()) -> FeaturesConfig:
    return FeaturesConfig.model_validate({"sparse": sparse, "dense": dense})


def block(first_line: int = 2, **columns: Any) -> Block:
    rows = max(map(len, columns.values()))
    return Block(pa.table({"label": ["0"] * rows} | columns), "log.csv", first_line, "line")


def fit(config: FeaturesConfig, *blocks: Block, keep: list[bool] | None = None) -> Features:
    fitting = FeaturesFit(config)
    for one in blocks:
        rows = one.columns.num_rows
        fitting.add(one, np.ones(rows, dtype=np.bool_) if keep is None else np.array(keep))
    return fitting.finish()


def encode(features: Features, one: Block, label: LabelConfig | None = None) -> EncodedTable:
    return features.encode(one, "label", label or LabelConfig())


def ids(table: EncodedTable, position: int = 0) -> list[int]:
    return [int(row) for row in table.ids[:, position]]


def test_the_vocabulary_is_ordered_by_frequency_then_text() -> None:
    config = features_config({"name": "c", "encoding": "vocabulary"})
    features = fit(config, block(c=["b", "z", "a"]), block(c=["z", "", "é"]))
    assert ids(encode(features, block(c=["z", "a", "b", "é", "new", ""]))) == [2, 3, 4, 5, UNSEEN, MISSING]
    assert features.table_rows == {"c": 6}


def test_rare_categories_and_those_past_the_bound_are_unseen() -> None:
    rows = block(c=list("aaabbccd"))
    rare = fit(features_config({"name": "c", "encoding": "vocabulary", "min_count": 3}), rows)
    assert ids(encode(rare, rows)) == [2, 2, 2, *[UNSEEN] * 5]
    bound = fit(features_config({"name": "c", "encoding": "vocabulary", "num_embeddings": 2}), rows)
    assert ids(encode(bound, rows)) == [2, 2, 2, 3, 3, UNSEEN, UNSEEN, UNSEEN]


def test_counts_add_up_over_many_blocks() -> None:
    """Merging pending counts must lose none: 'often' is in every block, the others in one each."""
    config = features_config({"name": "c", "encoding": "vocabulary", "min_count": 20})
    features = fit(config, *(block(c=["often", f"once{number}"]) for number in range(20)))
    assert features.table_rows == {"c": 3}


def test_hash_buckets_that_training_never_touched_are_unseen() -> None:
    config = features_config({"name": "c", "encoding": "hash", "num_embeddings": 1000})
    features = fit(config, block(c=["a", "b", ""]))
    a, b, new, missing = ids(encode(features, block(c=["a", "b", "new", ""])))
    assert (new, missing) == (UNSEEN, MISSING)
    assert {a, b} == {2 + int(value) % 1000 for value in hash_texts(pa.array(["a", "b"], pa.large_string()))}
    assert features.table_rows == {"c": 1002}


def test_the_hash_is_the_same_on_every_machine() -> None:
    """Fixed values: a checkpoint's buckets must mean the same after an upgrade."""
    hashes = hash_texts(pa.array(["", "a", "5", "数据"], pa.large_string()))
    assert hashes.tolist() == [
        1760245841805064774,
        13950350942979735504,
        6701939878111629903,
        16578018057678183933,
    ]


@pytest.mark.parametrize("column", [["0", "4", "", "3"], pa.array([0, 4, None, 3]), pa.array([0.0, 4.0, None, 3.0])])
def test_ids_are_taken_as_they_are(column: Any) -> None:
    features = fit(features_config({"name": "c", "encoding": "id", "num_embeddings": 5}))
    assert ids(encode(features, block(c=column))) == [2, 6, MISSING, 5]
    assert features.table_rows == {"c": 7}


@pytest.mark.parametrize("wrong", ["5", "6", "-1", "x", "1.5", "18446744073709551615"])
def test_an_id_outside_the_table_is_refused_with_its_place(wrong: str) -> None:
    features = fit(features_config({"name": "item", "column": "c", "encoding": "id", "num_embeddings": 5}))
    message = rf"log\.csv:4: feature 'item' \(column 'c'\): found id '{wrong}', .*0 to 4 \(num_embeddings: 5\)"
    with pytest.raises(DataError, match=message):
        encode(features, block(c=["0", "4", wrong, wrong]))


def test_an_id_outside_the_table_is_found_in_a_bag() -> None:
    config = features_config(
        {"name": "c", "encoding": "id", "num_embeddings": 5, "multi_valued": True, "separator": "|"}
    )
    with pytest.raises(DataError, match=r"log\.csv:4: feature 'c': found id '9'"):
        encode(fit(config), block(c=["0|1", "", "2|9"]))


def test_unused_dictionary_entries_are_not_refused() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["1", "99"]))
    features = fit(features_config({"name": "c", "encoding": "id", "num_embeddings": 5}))
    assert ids(encode(features, block(c=column))) == [3, 3]


@pytest.mark.parametrize("encoding", ["hash", "vocabulary"])
def test_fill_gives_missing_the_row_of_that_category(encoding: str) -> None:
    config = features_config({"name": "c", "encoding": encoding, "num_embeddings": 100, "fill": "0"})
    features = fit(config, block(c=["", "a", "0"]))
    missing, _, zero = ids(encode(features, block(c=["", "a", "0"])))
    assert missing == zero
    assert zero not in {MISSING, UNSEEN}


def test_rows_that_are_not_kept_teach_nothing() -> None:
    config = features_config(
        {"name": "c", "encoding": "vocabulary"},
        {"name": "h", "encoding": "hash", "num_embeddings": 10000},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|"},
        dense=({"name": "d", "transform": "standardize"},),
    )
    rows = block(c=["a", "held"], h=["a", "held"], m=["x|y", "held|held"], d=["1", "1000"])
    features = fit(config, rows, keep=[True, False])
    table = encode(features, rows)
    assert ids(table, 0) == [2, UNSEEN]
    assert ids(table, 1)[1] == UNSEEN
    assert table.bags[2].values.tolist() == [2, 3, UNSEEN, UNSEEN]
    assert features.standards == (Standard(1.0, 1.0),)


def test_types_meet_between_training_and_evaluation() -> None:
    """Training from text, evaluation from integers: the same categories."""
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}), block(c=["5", "18446744073709551615"]))
    assert ids(encode(features, block(c=pa.array([2**64 - 1, 5], pa.uint64())))) == [2, 3]


HARD = [-3.0, -100.0, 0.0, 2147483648.0, 1e40, -1e40, 3.5e38, math.inf, -math.inf, math.nan, 5e-324, -1e-30]


@pytest.mark.parametrize("kind", ["log", "standardize", "none"])
@pytest.mark.parametrize("standard", [Standard(), Standard(1e38, 1e-300), Standard(-LARGEST, LARGEST)])
@pytest.mark.parametrize("fill", [0.0, -1.0, 1e300])
def test_every_transformed_value_is_finite(kind: str, standard: Standard, fill: float) -> None:
    config = DenseFeatureConfig.model_validate({"name": "d", "transform": kind, "fill": fill})
    result, clipped = transform(np.array(HARD), config, standard)
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    assert clipped == 5 + (fill == 1e300)


def test_the_log_transform_is_odd_and_takes_missing_as_fill() -> None:
    config = DenseFeatureConfig(name="d", transform="log", fill=3.0)
    result, _ = transform(np.array([-3.0, 3.0, math.nan, 0.0]), config, Standard())
    np.testing.assert_array_equal(result, np.float32([-math.log(4), math.log(4), math.log(4), 0]))


def test_moments_merged_over_blocks_are_those_of_all_rows() -> None:
    values = np.random.default_rng(0).normal(1e6, 1, 1000)
    moments = Moments()
    for part in np.array_split(np.append(values, math.nan), 7):
        moments.add(part)
    found = moments.finish()
    # float64 with a mean a million times the deviation: about 1e-10 of the deviation is rounding.
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(), rel=1e-8)
    assert Moments().finish() == Standard(0.0, 1.0)


def test_a_dense_cell_that_is_no_number_is_named() -> None:
    features = fit(features_config(dense=({"name": "d", "column": "amount"},)))
    with pytest.raises(DataError, match=r"log\.csv:11: feature 'd' \(column 'amount'\): found 'abc'.*missing_values"):
        encode(features, block(first_line=10, amount=["1", "abc"]))


def test_a_column_of_the_wrong_type_is_named() -> None:
    features = fit(features_config(dense=({"name": "d"},)))
    with pytest.raises(DataError, match=r"log\.csv: feature 'd': found type list<.*expected integer"):
        encode(features, block(d=[[1], [2]]))


@pytest.mark.parametrize(
    "column",
    [
        ["0", "1", "1"],
        ["0.0", "1.0", "1.00"],
        ["false", "TRUE", "true"],
        pa.array([0, 1, 1], pa.int8()),
        pa.array([0.0, 1.0, 1.0]),
        pa.array([False, True, True]),
    ],
)
def test_plain_labels(column: Any) -> None:
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}))
    assert encode(features, block(c=["a"] * 3, label=column)).label.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "column"),
    [
        ({"positive": [">50K"]}, ["<=50K", ">50K", ">50K"]),
        ({"positive": ["1"], "negative": ["-1"]}, ["-1", "1", "1"]),
        ({"positive": ["1"], "negative": ["-1"]}, pa.array([-1.0, 1.0, 1.0])),
        ({"at_least": 4}, ["3.5", "4", "5"]),
        ({"at_least": 4}, pa.array([1, 4, 5])),
    ],
)
def test_label_rules(rule: dict[str, Any], column: Any) -> None:
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}))
    table = encode(features, block(c=["a"] * 3, label=column), LabelConfig.model_validate(rule))
    assert table.label.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        ({}, "-1", "found label '-1', expected 0 or 1; say what it means with data.label.positive"),
        ({}, "2", "found label '2'"),
        ({}, "click", "found label 'click'"),
        ({}, "", "the label is missing"),
        ({"positive": ["1"], "negative": ["-1"]}, "0", "found label '0', expected one of '1', '-1'"),
        ({"positive": ["1"]}, None, "the label is missing"),
        ({"at_least": 4}, "nan", "the label is missing"),
        ({"at_least": 4}, "good", "found 'good', expected a number"),
    ],
)
def test_a_label_without_a_meaning_is_refused(rule: dict[str, Any], value: str | None, message: str) -> None:
    features = fit(features_config({"name": "c", "encoding": "vocabulary"}))
    with pytest.raises(DataError, match=rf"log\.csv:3: label column 'label': {message}"):
        encode(features, block(c=["a", "a"], label=["1", value]), LabelConfig.model_validate(rule))


def everything() -> tuple[FeaturesConfig, Block]:
    config = features_config(
        {"name": "a/b", "encoding": "vocabulary", "min_count": 2},
        {"name": "性别", "encoding": "hash", "num_embeddings": 50},
        {"name": "101", "encoding": "id", "num_embeddings": 9},
        {"name": "m", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
        dense=({"name": "d", "transform": "standardize"}, {"name": "e"}),
    )
    columns = {"a/b": list("xxyz"), "性别": list("abcd"), "101": list("0128"), "m": ["p|q", "", "q", "p|p|q"]}
    return config, block(**columns, w=["1|2", "", "3", "4|5|6"], d=["1", "2", "", "1e40"], e=["", "1", "2", "3"])


def test_saved_features_encode_identically(tmp_path: Path) -> None:
    config, rows = everything()
    features = fit(config, rows)
    features.save(tmp_path / "features")
    loaded = Features.load(tmp_path / "features")
    assert loaded.config == config
    assert loaded.table_rows == features.table_rows == {"a/b": 3, "性别": 52, "101": 11, "m": 4}
    other = block(
        **{
            name: [*rows.columns[name].to_pylist()[::-1], "new" if name in {"a/b", "性别", "m"} else "1"]
            for name in rows.columns.column_names
            if name != "label"
        }
    )
    for one in (rows, other):
        before, after = encode(features, one), encode(loaded, one)
        np.testing.assert_array_equal(before.dense, after.dense)
        np.testing.assert_array_equal(before.ids, after.ids)
        np.testing.assert_array_equal(before.bags[3].values, after.bags[3].values)


def test_features_without_sparse_ones_can_be_saved(tmp_path: Path) -> None:
    features = fit(features_config(dense=({"name": "d"},)))
    features.save(tmp_path)
    assert Features.load(tmp_path) == features


def test_unreadable_saved_features_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        Features.load(tmp_path / "nowhere")
    config, rows = everything()
    fit(config, rows).save(tmp_path)
    (tmp_path / STATE_FILE).write_text('{"format": 99}')
    with pytest.raises(DataError, match="format 99, this version reads 1"):
        Features.load(tmp_path)
    (tmp_path / ENCODINGS_FILE).write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        Features.load(tmp_path)


def test_a_table_in_one_block_equals_one_of_many_blocks() -> None:
    config, rows = everything()
    features = fit(config, rows)
    whole = encode(features, rows)
    pieces = [Block(rows.columns.slice(start, 1), rows.file, 2 + start, rows.unit) for start in range(4)]
    joined = concatenate([features.empty(), *(encode(features, piece) for piece in pieces)])
    np.testing.assert_array_equal(joined.dense, whole.dense)
    np.testing.assert_array_equal(joined.ids, whole.ids)
    for field in ("values", "offsets", "weights"):
        np.testing.assert_array_equal(getattr(joined.bags[3], field), getattr(whole.bags[3], field))
    np.testing.assert_array_equal(joined.num_missing, whole.num_missing)
    assert joined.ids.dtype == whole.ids.dtype == np.int32
    assert (
        [joined.locate(row) for row in range(4)]
        == [whole.locate(row) for row in range(4)]
        == [f"log.csv:{line}" for line in range(2, 6)]
    )


def test_missing_cells_are_counted_before_they_are_filled() -> None:
    config, rows = everything()
    table = encode(fit(config, rows), rows)
    assert table.num_missing.tolist() == [1, 1, 0, 0, 0, 1]
    assert table.num_clipped.tolist() == [1, 0]
    assert table.count_cells().tolist() == [4, 4, 4, 4, 4, 7]


def test_unseen_values_are_counted_by_feature() -> None:
    config, rows = everything()
    table = encode(fit(config, rows), rows)
    unseen, total = table.count_unseen(np.array([0, 2, 3]))
    assert unseen.tolist() == [2, 0, 0, 0], "y and z occur once, min_count is 2"
    assert total.tolist() == [3, 3, 3, 6]
