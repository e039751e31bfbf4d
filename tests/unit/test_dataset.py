"""From a configuration to loaders, on real logs where ERASE_REC_DATA names them and on small files made here."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.dataset import Datasets, build_datasets, build_eval, load_features
from data.errors import DataError
from data.loader import Loader
from erase_rec.batch import Batch
from erase_rec.config.schema import Config

MISSING, UNSEEN = 0, 1
CRITEO_DENSE = [f"I{number}" for number in range(1, 14)]
CRITEO_SPARSE = [f"C{number}" for number in range(1, 27)]


def make_config(
    data: dict[str, Any],
    sparse: Iterable[str | dict[str, Any]] = (),
    dense: Iterable[str | dict[str, Any]] = (),
    *,
    batch: int = 128,
    seed: int = 1,
    **sparse_settings: Any,
) -> Config:
    def entry(feature: str | dict[str, Any]) -> dict[str, Any]:
        return {"name": feature} if isinstance(feature, str) else feature

    settings = sparse_settings or {"encoding": "vocabulary"}
    return Config.model_validate(
        {
            "seed": seed,
            "data": data,
            "features": {
                "sparse": [settings | entry(each) for each in sparse],
                "dense": [entry(each) for each in dense],
            },
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": batch},
        }
    )


def criteo(path: Path, batch: int = 128, seed: int = 1, evaluation: Path | None = None, **settings: Any) -> Config:
    data = {"kind": "criteo", "train": str(path), "eval": [] if evaluation is None else [str(evaluation)]}
    return make_config(data, CRITEO_SPARSE, CRITEO_DENSE, batch=batch, seed=seed, **settings)


def write_csv(path: Path, header: list[str], rows: Iterable[Iterable[Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def rows_of(loader: Loader, epoch: int = 0) -> list[int]:
    return [row for batch in loader.batches(epoch) for row in batch.row_ids.tolist()]


def lines_of(loader: Loader, epoch: int = 0) -> list[int]:
    """The row's position in a file with a header, instead of that in its split."""
    places = loader.locate(torch.tensor(rows_of(loader, epoch)))
    return [int(place.rpartition(":")[2]) - 2 for place in places]


def whole(loader: Loader) -> Batch:
    """The only batch of a loader of few rows."""
    (batch,) = loader.batches(0)
    return batch


def evaluation_of(datasets: Datasets) -> Loader:
    assert datasets.eval is not None
    return datasets.eval


@pytest.fixture
def criteo_lines(real_data: Path) -> list[list[str]]:
    text = (real_data / "criteo_first8k" / "train.csv").read_text()
    return [line.split("\t") for line in text.splitlines()]


def write_criteo(path: Path, lines: list[list[str]]) -> Path:
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("kind", ["log", "standardize", "none"])
def test_hard_integers_of_criteo_stay_finite(criteo_lines: list[list[str]], tmp_path: Path, kind: str) -> None:
    """A log transform of -3, -100, 2 ** 31 and 1e40 is where others give NaN."""
    lines = [list(line) for line in criteo_lines[:200]]
    for row, column, value in [(10, 2, "-3"), (11, 2, "-100"), (12, 5, "2147483648"), (13, 1, "1e40")]:
        lines[row][column] = value
    path = write_criteo(tmp_path / "hard.tsv", lines)
    data = {"kind": "criteo", "train": str(path), "eval": str(path), "shuffle": "false"}
    dense = [{"name": name, "transform": kind} for name in CRITEO_DENSE]
    datasets = build_datasets(make_config(data, CRITEO_SPARSE, dense, batch=200))
    train, evaluation = whole(datasets.train), whole(evaluation_of(datasets))
    assert train.dense.isfinite().all()
    assert train.dense.equal(evaluation.dense), "train and eval use the same transform"
    assert datasets.num_clipped == 1
    if kind == "log":
        assert train.dense[10, 1] == pytest.approx(-math.log(4))


def test_a_missing_category_needs_no_value_from_the_user(criteo_lines: list[list[str]], tmp_path: Path) -> None:
    """Missing has a row of its own, apart from unseen and from every real category; no row is dropped."""
    path = write_criteo(tmp_path / "crit.tsv", criteo_lines)
    empty = np.array([[cell == "" for cell in line[14:]] for line in criteo_lines])
    for settings in ({}, {"fill": ""}):
        datasets = build_datasets(criteo(path, 8000, encoding="vocabulary", **settings))
        batch = whole(datasets.train)
        ids = batch.sparse.values.view(26, -1).T.numpy()
        np.testing.assert_array_equal(ids == MISSING, empty[batch.row_ids.numpy()])
        assert not (ids == UNSEEN).any()
        assert datasets.train.num_rows == len(criteo_lines)
    filled = whole(build_datasets(criteo(path, 8000, encoding="vocabulary", fill="0")).train)
    ids = filled.sparse.values.view(26, -1).T.numpy()
    assert (ids > UNSEEN).all(), "filled cells have a real category"


def test_missing_shares_are_reported(real_data: Path) -> None:
    datasets = build_datasets(criteo(real_data / "criteo_first8k" / "train.csv"))
    assert datasets.missing_share["C22"] == pytest.approx(0.82, abs=0.01)
    assert datasets.missing_share["I12"] == pytest.approx(0.77, abs=0.01)
    assert datasets.missing_share["C1"] == 0
    assert any("C22" in line for line in datasets.remarks())


@pytest.mark.parametrize("encoding", ["vocabulary", "hash"])
def test_the_share_of_unseen_categories_is_reported(real_data: Path, tmp_path: Path, encoding: str) -> None:
    """Items of one Open Bandit campaign, evaluated on another: every item category is unseen."""
    folder = real_data / "open_bandit"
    paths = []
    for name in ("bts_women", "random_women"):
        items = list(csv.DictReader((folder / name / "item_context.csv").read_text().splitlines()))
        with gzip.open(folder / name / "women.csv.gz", "rt") as file:
            rows = [(row["click"], items[int(row["item_id"])]["item_feature_1"]) for row in csv.DictReader(file)]
        paths.append(write_csv(tmp_path / f"{name}.csv", ["click", "item"], rows))
    data = {"kind": "csv", "train": paths[0], "eval": paths[1], "label": {"column": "click"}}
    # Far more buckets than categories: no collision hides an unseen one.
    datasets = build_datasets(make_config(data, ["item"], encoding=encoding, num_embeddings=1_000_000, batch=10000))
    assert datasets.unseen_share == 1.0
    assert datasets.unseen_share_of == {"item": 1.0}
    assert any("100.0% of the held-out categorical values are unseen" in line for line in datasets.remarks())
    for batch in evaluation_of(datasets).batches(0):
        assert (batch.sparse.values == UNSEEN).all()
    assert (whole(datasets.train).sparse.values > UNSEEN).all()


@pytest.mark.parametrize("wrong", [10, 11, -1])
@pytest.mark.parametrize("file", ["csv", "parquet"])
def test_ids_outside_their_table_are_refused(tmp_path: Path, wrong: int, file: str) -> None:
    """In the evaluation file too, where others read past the table."""
    paths = []
    for name, last in (("train", 9), ("eval", wrong)):
        if file == "csv":
            paths.append(write_csv(tmp_path / f"{name}.csv", ["label", "item"], [(0, 0), (1, last)]))
        else:
            pq.write_table(pa.table({"label": [0, 1], "item": [0, last]}), tmp_path / f"{name}.parquet")
            paths.append(str(tmp_path / f"{name}.parquet"))
    data = {"kind": file, "train": paths[0], "eval": paths[1], "label": {"column": "label"}}
    place = "eval.csv:3" if file == "csv" else "eval.parquet row 2"
    with pytest.raises(DataError, match=rf"{place}: feature 'item': found id '{wrong}'.*num_embeddings: 10\b"):
        build_datasets(make_config(data, ["item"], encoding="id", num_embeddings=10))


@pytest.mark.parametrize("batch", [1, 128, 257, 1000])
def test_one_row_left_for_the_last_batch_is_not_lost(criteo_lines: list[list[str]], tmp_path: Path, batch: int) -> None:
    path = write_criteo(tmp_path / "257.tsv", criteo_lines[:257])
    datasets = build_datasets(criteo(path, batch, evaluation=path))
    evaluation = evaluation_of(datasets)
    assert sorted(rows_of(datasets.train)) == rows_of(evaluation) == list(range(257))
    assert datasets.train.num_rows == evaluation.num_rows == 257
    assert {each.label.ndim for each in datasets.train.batches(0)} == {1}


def test_epochs_and_seeds_have_their_own_order_and_ranks_their_own_rows(
    criteo_lines: list[list[str]], tmp_path: Path
) -> None:
    lines = [[*line[:5], str(row), *line[6:]] for row, line in enumerate(criteo_lines[:200])]
    path = write_criteo(tmp_path / "unique_I5.tsv", lines)

    def order(seed: int, epoch: int, rank: int = 0, ranks: int = 1) -> list[int]:
        loader = build_datasets(criteo(path, 64 // ranks, seed), rank=rank, world_size=ranks).train
        i5 = [batch.dense[:, 4] for batch in loader.batches(epoch)]
        return [round(math.expm1(value)) for part in i5 for value in part.tolist()]

    orders = [order(1, 0), order(1, 1), order(1, 2), order(2, 0)]
    assert len({tuple(one) for one in orders}) == 4
    assert all(sorted(one) == list(range(200)) for one in orders)
    assert order(1, 1) == orders[1], "a restart gives the order of the right epoch"
    first, second = order(1, 1, 0, 2), order(1, 1, 1, 2)
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(200))


@pytest.mark.parametrize("num_files", [1, 5])
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_and_files_multiply_no_rows(
    criteo_lines: list[list[str]], tmp_path: Path, num_files: int, workers: int, ranks: int
) -> None:
    for number in range(num_files):
        write_criteo(tmp_path / f"{number}.tsv", criteo_lines[:1000][number::num_files])
    data = {"kind": "criteo", "train": str(tmp_path / "*.tsv"), "workers": workers}
    config = make_config(data, ["C1"], ["I5"], batch=64)
    loaders = [build_datasets(config, rank=rank, world_size=ranks).train for rank in range(ranks)]
    assert sorted(row for loader in loaders for row in rows_of(loader)) == list(range(1000))


def test_a_real_csv_with_empty_columns_and_lists(real_data: Path) -> None:
    """Taobao: one column is empty in every row, a bag column in 75 % of them."""
    path = real_data / "taobao_tiny" / "train_sample.csv"
    data = {"kind": "csv", "train": str(path), "label": {"column": "clk"}}
    sparse = ["new_user_class_level", "pid", {"name": "click_sequence", "multi_valued": True, "separator": "^"}]
    datasets = build_datasets(make_config(data, sparse, ["price"], batch=100))
    batch = whole(datasets.train)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lengths = [
        len(rows[row]["click_sequence"].split("^")) if rows[row]["click_sequence"] else 0 for row in batch.row_ids
    ]
    assert batch.sparse.lengths.view(3, 100)[2].tolist() == lengths
    assert (batch.sparse.values[:100] == MISSING).all()
    assert datasets.missing_share["new_user_class_level"] == 1.0
    assert datasets.table_rows["new_user_class_level"] == 2


def test_real_parquet_of_mapped_ids(real_data: Path) -> None:
    """Label stored as double, ids as int64."""
    folder = real_data / "taobao_tiny"
    data = {"kind": "parquet", "train": str(folder / "train.parquet"), "eval": str(folder / "test.parquet")}
    config = make_config(data | {"label": {"column": "clk"}}, ["userid", "cate_id", "brand"], batch=100)
    datasets = build_datasets(config)
    assert datasets.train.base_rate == pytest.approx(0.04)
    assert evaluation_of(datasets).num_rows == 100


def test_a_column_empty_but_for_its_last_row(tmp_path: Path) -> None:
    """Readers that guess a type from the first block call it null, and fail on the last."""
    rows = [(row % 2, "", "") for row in range(19_999)] + [(1, "late", "7.5")]
    path = write_csv(tmp_path / "late.csv", ["label", "c", "d"], rows)
    data = {"kind": "csv", "train": path, "label": {"column": "label"}, "shuffle": "false"}
    datasets = build_datasets(make_config(data, ["c"], [{"name": "d", "transform": "none"}], batch=20_000))
    batch = whole(datasets.train)
    assert batch.sparse.values.tolist() == [MISSING] * 19_999 + [2]
    assert batch.dense[-1].item() == 7.5


def test_every_parquet_type_meets_its_text(tmp_path: Path) -> None:
    """The same log as text and as typed columns, the one for training and the other for evaluation."""
    typed = pa.table(
        {
            "label": [True, False, True],
            "text": pa.array(["a", None, "b"]).dictionary_encode(),
            "big": pa.array([2**64 - 1, None, 7], pa.uint64()),
            "flag": [True, None, False],
            "bag": pa.array([[1, 2], None, []], pa.large_list(pa.int64())),
            "words": [["x", None], ["y"], None],
        }
    )
    pq.write_table(typed, tmp_path / "log.parquet")
    written = [(1, "a", 2**64 - 1, "true", "1|2", "x|"), (0, "", "", "", "", "y"), (1, "b", 7, "false", "", "")]
    write_csv(tmp_path / "log.csv", typed.column_names, written)
    bag = {"multi_valued": True, "separator": "|"}
    sparse = ["text", "big", "flag", {"name": "bag"} | bag, {"name": "words"} | bag]
    batches = []
    for kind in ("csv", "parquet"):
        data = {"kind": kind, "train": str(tmp_path / f"log.{kind}"), "label": {"column": "label"}, "shuffle": "false"}
        batches.append(whole(build_datasets(make_config(data, sparse)).train))
    text, arrow = batches
    assert text.sparse.values.equal(arrow.sparse.values)
    assert text.sparse.lengths.equal(arrow.sparse.lengths)
    assert text.label.equal(arrow.label)


def test_a_parquet_type_that_is_no_category_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "c": [{"x": 1}, {"x": 2}]}), tmp_path / "log.parquet")
    data = {"kind": "parquet", "train": str(tmp_path / "log.parquet"), "label": {"column": "label"}}
    with pytest.raises(DataError, match=r"log\.parquet: feature 'c': found type struct.*expected integer, float"):
        build_datasets(make_config(data, ["c"]))


def simple(tmp_path: Path, num_rows: int = 1000, **data: Any) -> Config:
    rows = [(row % 2, f"c{row % 10}", row) for row in range(num_rows)]
    path = write_csv(tmp_path / "log.csv", ["label", "c", "d"], rows)
    settings = {"kind": "csv", "train": path, "label": {"column": "label"}}
    return make_config(settings | data, ["c"], [{"name": "d", "transform": "standardize"}])


def test_held_out_rows_are_apart_and_teach_nothing(tmp_path: Path) -> None:
    datasets = build_datasets(simple(tmp_path, eval_fraction=0.2))
    train, evaluation = lines_of(datasets.train), lines_of(evaluation_of(datasets))
    assert sorted(train + evaluation) == list(range(1000))
    assert 150 < len(evaluation) < 250
    assert evaluation == sorted(evaluation), "held-out rows are not shuffled"
    assert datasets.features.standards[0].mean == pytest.approx(np.mean(train), rel=1e-12)
    assert evaluation_of(datasets).locate(next(evaluation_of(datasets).batches(0)).row_ids[:1]) == [
        f"{tmp_path / 'log.csv'}:{evaluation[0] + 2}"
    ]


def test_sampling_leaves_held_out_rows_alone_and_says_how_many(tmp_path: Path) -> None:
    plain = build_datasets(simple(tmp_path, eval_fraction=0.2))
    datasets = build_datasets(simple(tmp_path, eval_fraction=0.2, negative_sampling_rate=0.25))
    assert lines_of(evaluation_of(datasets)) == lines_of(evaluation_of(plain))
    kept, every = set(lines_of(datasets.train)), set(lines_of(plain.train))
    gone = every - kept
    assert kept < every
    assert all(row % 2 == 0 for row in gone), "no row with label 1 is left out"
    assert 0.65 < len(gone) / len([row for row in every if row % 2 == 0]) < 0.85
    assert datasets.remarks()[-1] == (
        f"{len(gone)} rows were left out to train on 0.25 of the negative rows; logits of evaluation and predictions "
        "are corrected by log(0.25)"
    )
    assert datasets.fingerprint != plain.fingerprint


def test_saved_features_give_the_same_evaluation(tmp_path: Path) -> None:
    config = simple(tmp_path, eval_fraction=0.2)
    datasets = build_datasets(config)
    datasets.features.save(tmp_path / "features")
    features = load_features(tmp_path / "features")
    again = build_datasets(config, features=features)
    assert again.fingerprint == datasets.fingerprint
    assert rows_of(again.train, 3) == rows_of(datasets.train, 3)
    for one, other in zip(
        evaluation_of(datasets).batches(0), build_eval(config, features).loader.batches(0), strict=True
    ):
        assert one.dense.equal(other.dense)
        assert one.sparse.values.equal(other.sparse.values)
        assert one.label.equal(other.label)


def test_other_files_are_evaluated_with_the_run_s_features(tmp_path: Path) -> None:
    features = build_datasets(simple(tmp_path)).features
    other = write_csv(tmp_path / "other.csv", ["d", "c", "label"], [(499.5, "c3", 1), ("", "new", 0)])
    config = simple(tmp_path, eval=other)
    held_out = build_eval(config, features)
    batch = whole(held_out.loader)
    assert batch.sparse.values.tolist() == [2 + 3, UNSEEN]
    assert (held_out.unseen_share_of, held_out.unseen_share) == ({"c": 0.5}, 0.5)
    assert held_out.unseen_remarks() == ["50.0% of the held-out categorical values are unseen: c 50.0%"]
    assert batch.dense[0].item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(DataError, match=r"data\.eval=PATH"):
        build_eval(simple(tmp_path), features)


def test_features_of_another_run_are_refused(tmp_path: Path) -> None:
    features = build_datasets(simple(tmp_path)).features
    config = simple(tmp_path)
    other = config.model_copy(update={"features": config.features.model_copy(update={"dense": ()})})
    with pytest.raises(DataError, match="features"):
        build_datasets(other, features=features)


@pytest.mark.parametrize(
    "change",
    [{"eval_fraction": 0.2}, {"label": {"column": "label", "positive": "0"}}, {"num_rows": 999}],
)
def test_the_fingerprint_follows_what_decides_the_rows(tmp_path: Path, change: dict[str, Any]) -> None:
    before = build_datasets(simple(tmp_path)).fingerprint
    assert build_datasets(simple(tmp_path)).fingerprint == before
    assert build_datasets(simple(tmp_path, **change)).fingerprint != before


def test_an_evaluation_file_without_rows_is_allowed(tmp_path: Path) -> None:
    empty = write_csv(tmp_path / "empty.csv", ["label", "c", "d"], [])
    datasets = build_datasets(simple(tmp_path, eval=empty))
    assert evaluation_of(datasets).num_rows == 0
    assert math.isnan(datasets.unseen_share)
    assert datasets.unseen_share_of.keys() == {"c"}
    assert list(evaluation_of(datasets).batches(0)) == []
    assert datasets.remarks() == []


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no rows to train on \(1 rows read, all of them held out or left out\)"):
        build_datasets(simple(tmp_path, 1, eval_fraction=0.999999))


def test_a_source_without_a_label_of_its_own_needs_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.label\.column: kind 'csv' has no label.*'label', 'c', 'd'"):
        build_datasets(simple(tmp_path, label={}))


def test_the_source_s_label_is_no_feature() -> None:
    with pytest.raises(DataError, match="'label' reads 'label', which is the label"):
        build_datasets(make_config({"kind": "synthetic", "params": {"rows": 10}}, ["label"]))


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = simple(tmp_path)
    wrong = make_config(config.data.model_dump(), ["cc"], ["d"])
    with pytest.raises(DataError, match=r"column 'cc' not found.*'label', 'c', 'd'"):
        build_datasets(wrong)


def test_the_synthetic_log_brings_its_evaluation_and_its_floor() -> None:
    data = {"kind": "synthetic", "params": {"rows": 2000, "eval_rows": 500}}
    datasets = build_datasets(make_config(data, CRITEO_SPARSE, CRITEO_DENSE))
    assert (datasets.train.num_rows, evaluation_of(datasets).num_rows) == (2000, 500)
    assert datasets.bayes_ne is not None
    assert 0 < datasets.bayes_ne < 1
    held = build_datasets(make_config(data | {"eval_fraction": 0.2}, CRITEO_SPARSE, CRITEO_DENSE))
    assert evaluation_of(held).num_rows + held.train.num_rows == 2000
    assert held.bayes_ne is None


def test_labels_of_one_class_are_remarked(tmp_path: Path) -> None:
    """A misspelt positive value trains a constant: it is said before the first step."""
    (tmp_path / "t.csv").write_text("y,a\nyes,1\nno,2\nyes,3\n")
    section = {"kind": "csv", "train": [str(tmp_path / "t.csv")], "label": {"column": "y", "positive": ["Yes"]}}
    config = Config.model_validate(
        {
            "data": section,
            "features": {"sparse": [{"name": "a", "num_embeddings": 10}]},
            "towers": [{"name": "deep", "kind": "mlp"}],
            "train": {"steps": 1},
        }
    )
    assert any("every training label is 0" in line for line in build_datasets(config).remarks())
