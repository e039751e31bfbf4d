"""Ways of reading: whatever is kept in memory, streamed or stored on the way, the batches are the same."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import scan, unprepared
from data.bad_rows import BadRows
from data.block import EncodedBlock
from data.dataset import Datasets, build_datasets, build_eval
from data.errors import DataError
from data.loader import Loader
from data.memory import available_bytes, refuse_too_much
from data.reading import Reading, open_train
from data.sources import text_file
from data.store import UnseenValues
from erase_rec.batch import Batch
from erase_rec.config.schema import Config

ROWS = 1500
COLUMNS = ("label", "x", "z", "c", "tags", "w", "key")
HASH = {"dense": ["x"], "sparse": [{"name": "c", "num_embeddings": 50}]}
VOCABULARY = {
    "dense": [{"name": "x", "transform": "standardize"}, "z"],
    "sparse": [
        {"name": "c", "encoding": "vocabulary", "min_count": 3, "fill": "none"},
        {"name": "tags", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
    ],
}


@pytest.fixture(autouse=True)
def _many_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "CHUNK_BYTES", 4 << 10)
    monkeypatch.setattr(text_file, "READ_BYTES", 2 << 10)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.csv")


def write_log(path: Path, rows: int = ROWS, *, seed: int = 0, first: int = 0, bad: Sequence[int] = ()) -> Path:
    """Rows of every kind of column, ``key`` unique; those at ``bad`` have no number in ``x``."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for row in range(rows):
            tags = [str(tag) for tag in rng.integers(0, 30, rng.integers(0, 4))]
            category = rng.choice(["", f"c{int(rng.exponential(20))}"], p=[0.1, 0.9])
            x = "bad" if row in bad else rng.choice(["", "7", "-3", f"{rng.normal():.3f}", "1e40"])
            weights = "|".join(f"{rng.random():.2f}" for _ in tags)
            label = int(rng.random() < 0.3)
            writer.writerow([label, x, f"{rng.normal():.3f}", category, "|".join(tags), weights, f"row{first + row}"])
    return path


def make_config(train: Path | str, features: dict[str, Any] = HASH, *, batch: int = 64, **data: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"kind": "csv", "train": str(train), "label": {"column": "label"}, "shuffle_window": 200} | data,
            "features": features,
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": batch},
            "eval": {"local_batch_size": 100},
        }
    )


def contents(batch: Batch) -> list[Any]:
    sparse = batch.sparse
    weights = None if sparse.weights is None else sparse.weights.tolist()
    return [batch.dense.tolist(), sparse.values.tolist(), sparse.lengths.tolist(), weights, batch.row_ids.tolist()]


def batches(loader: Loader | None, epochs: int = 2) -> list[list[Any]]:
    assert loader is not None
    return [contents(batch) for epoch in range(epochs) for batch in loader.batches(epoch)]


def assert_same(one: Datasets, other: Datasets) -> None:
    assert batches(one.train) == batches(other.train)
    assert (one.eval is None) == (other.eval is None)
    if one.eval is not None:
        assert batches(one.eval) == batches(other.eval)
        assert one.unseen_share_of == other.unseen_share_of
    assert one.table_rows == other.table_rows
    assert one.fingerprint == other.fingerprint
    assert one.missing_share == other.missing_share
    assert one.num_clipped == other.num_clipped > 0
    assert one.bad_rows.count == other.bad_rows.count
    assert one.train.locate(torch.arange(5)) == other.train.locate(torch.arange(5))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("features", [HASH, VOCABULARY])
@pytest.mark.parametrize("split", ["none", "fraction", "file"])
def test_streamed_rows_give_the_batches_of_rows_in_memory(
    log: Path, features: dict[str, Any], split: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though what is fitted is stored in parts on the way."""
    monkeypatch.setattr(unprepared, "_STORED_CHUNKS", 3)
    data: dict[str, Any] = {"none": {}, "fraction": {"eval_fraction": 0.2}}.get(split, {})
    if split == "file":
        data = {"eval": str(write_log(log.with_name("eval.csv"), 300, seed=1))}
    memory = build_datasets(make_config(log, features, **data))
    stream = build_datasets(make_config(log, features, reading="stream", workers=workers, **data))
    assert len(memory.train.store.block_rows) > 6
    assert_same(memory, stream)
    assert memory.origin == "kept in memory"
    assert stream.origin == "read and encoded anew in each epoch"


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_threads_that_read_change_nothing(log: Path, reading: str) -> None:
    alone = build_datasets(make_config(log, VOCABULARY, reading=reading, eval_fraction=0.2))
    helped = build_datasets(make_config(log, VOCABULARY, reading=reading, eval_fraction=0.2, workers=3))
    assert_same(alone, helped)


@pytest.mark.parametrize("reading", ["memory", "stream"])
@pytest.mark.parametrize("features", [HASH, VOCABULARY])
def test_fitted_features_give_the_same_batches(log: Path, features: dict[str, Any], reading: str) -> None:
    config = make_config(log, features, reading=reading, eval_fraction=0.2)
    first = build_datasets(config)
    assert_same(first, build_datasets(config, features=first.features))
    evaluation = build_eval(config, first.features)
    assert batches(evaluation.loader) == batches(first.eval)
    assert evaluation.unseen_share_of == first.unseen_share_of


def test_unseen_shares_of_streamed_rows_are_known_once_they_were_read(log: Path) -> None:
    other = write_log(log.with_name("eval.csv"), 300, seed=1)
    memory = build_datasets(make_config(log, VOCABULARY, eval=str(other)))
    stream = build_datasets(make_config(log, VOCABULARY, eval=str(other), reading="stream"))
    assert 0 < memory.unseen_share < 1
    assert math.isnan(stream.unseen_share)
    for _ in range(2):
        batches(stream.eval, 1)
        assert stream.unseen_share_of == memory.unseen_share_of


def test_a_block_counts_once() -> None:
    counts = UnseenValues(1)
    block = EncodedBlock([], [np.array([1, 5, 1], np.int32)], {}, np.zeros(3, np.uint8), None)  # type: ignore[arg-type]
    for number in (0, 1, 0):
        counts.add(number, block)
    assert (counts.unseen.tolist(), counts.values.tolist()) == ([4], [6])


@pytest.mark.parametrize("num_files", [1, 5])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_streaming_multiplies_no_rows(tmp_path: Path, num_files: int, workers: int, ranks: int) -> None:
    """Others give each worker, and each rank, the whole file."""
    for number in range(num_files):
        write_log(tmp_path / f"{number}.csv", 1000 // num_files, seed=number)
    config = make_config(tmp_path / "*.csv", reading="stream", workers=workers, batch=32)
    loaders = [build_datasets(config, rank=rank, world_size=ranks).train for rank in range(ranks)]
    for epoch in range(2):
        rows = [row for loader in loaders for batch in loader.batches(epoch) for row in batch.row_ids.tolist()]
        assert sorted(rows) == list(range(1000))


def test_a_file_that_changes_while_it_is_streamed_is_named(log: Path) -> None:
    datasets = build_datasets(make_config(log, reading="stream"))
    text = log.read_bytes()
    cut = text[: len(text) // 2]
    log.write_bytes(cut[: cut.rindex(b"\n") + 1])
    with pytest.raises(DataError, match=r"log\.csv"):
        batches(datasets.train)


def test_rows_of_a_chunk_that_became_bad_are_missed(log: Path) -> None:
    """A cell changes in place: the file keeps its size, and one row can no longer be read."""
    datasets = build_datasets(make_config(log, reading="stream", bad_rows="skip"))
    lines = log.read_bytes().split(b"\n")
    position = next(at for at, line in enumerate(lines) if line.split(b",")[1:2] == [b"1e40"])
    lines[position] = lines[position].replace(b"1e40", b"1x40")
    log.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=r"log\.csv.*(rows where there were|changed)"):
        batches(datasets.train)


def test_compressed_text_is_not_streamed(log: Path) -> None:
    packed = log.with_suffix(".csv.gz")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    with pytest.raises(DataError, match=r"log\.csv\.gz: compressed.*unpack.*prepare.*data\.reading: memory"):
        build_datasets(make_config(packed, reading="stream"))
    plain, unpacked = build_datasets(make_config(log)), build_datasets(make_config(packed))
    assert batches(plain.train) == batches(unpacked.train)


def test_rows_that_do_not_fit_into_memory_are_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprepared, "available_bytes", lambda: 5 * ROWS)  # a row takes at least 8 + 1 + 8 bytes
    with pytest.raises(DataError, match=r"data\.train: its rows take about .* GiB.*erase-rec prepare.*reading: stream"):
        build_datasets(make_config(log))
    build_datasets(make_config(log, reading="stream"))
    monkeypatch.setattr(unprepared, "available_bytes", lambda: 1 << 30)
    build_datasets(make_config(log))


def test_memory_is_estimated_from_the_share_read() -> None:
    gib = 1 << 30
    refuse_too_much("data.train", held=gib, read=10, total=100, available=9 * gib)
    refuse_too_much("data.train", held=gib, read=10, total=100, available=None)
    with pytest.raises(DataError, match=r"about 10\.0 GiB in memory, and there are only 9\.9 GiB"):
        refuse_too_much("data.train", held=gib, read=10, total=100, available=9 * gib - gib // 10)


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available_bytes(tmp_path, meminfo) == 50 * 1024
    assert available_bytes(tmp_path, tmp_path / "none") is None
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\ninactive_file 4000\n")
    for limit, expected in (("40000", 14_000), ("max", 50 * 1024), ("9000000", 50 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes(tmp_path, meminfo) == expected


@pytest.mark.parametrize("reading", ["memory", "stream"])
@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_bad_rows_are_left_out_and_reported(tmp_path: Path, policy: str, reading: str) -> None:
    bad = [3, 700, 701, 1499]
    good = make_config(write_log(tmp_path / "log.csv", bad=bad), bad_rows=policy, reading=reading, eval_fraction=0.3)
    datasets = build_datasets(good)
    assert datasets.bad_rows.count == 4
    assert sum(datasets.bad_rows.reasons.values()) == 4
    (line,) = [line for line in datasets.remarks() if "could not be read" in line]
    assert line.startswith("4 rows could not be read and were left out")
    assert "4 x column x: found '...', expected a number" in line
    assert datasets.eval is not None
    assert datasets.train.num_rows + datasets.eval.num_rows == ROWS - 4
    for loader in (datasets.train, datasets.eval):
        rows = [row for batch in loader.batches(0) for row in batch.row_ids.tolist()]
        lines = {int(place.rpartition(":")[2]) for place in loader.locate(torch.tensor(rows))}
        assert len(lines) == loader.num_rows
        assert not lines & {row + 2 for row in bad}
    datasets.write_quarantine(tmp_path)
    path = tmp_path / "quarantine.jsonl"
    assert path.exists() == (policy == "quarantine")
    if policy == "quarantine":
        found = [json.loads(entry) for entry in path.read_text().splitlines()]
        assert [(entry["number"], entry["column"], entry["value"]) for entry in found] == [
            (row + 2, "x", "bad") for row in bad
        ]
        assert "quarantine.jsonl in the run folder holds them" in line
    with pytest.raises(DataError, match=r"log\.csv:5: feature 'x': found 'bad', expected a number"):
        build_datasets(make_config(tmp_path / "log.csv", reading=reading))


def test_too_many_bad_rows_end_the_reading(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", bad=range(0, ROWS, 5))
    with pytest.raises(DataError, match=r"data\.max_bad_share: 1\d\d of the first"):
        build_datasets(make_config(log, bad_rows="skip"))
    assert build_datasets(make_config(log, bad_rows="skip", max_bad_share=0.5)).bad_rows.count == ROWS // 5


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_a_row_on_both_sides_of_the_split_is_refused(
    log: Path, tmp_path: Path, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_JOINED_IDS", 100)
    apart = write_log(tmp_path / "apart.csv", 300, seed=1, first=ROWS)
    datasets = build_datasets(make_config(log, eval=str(apart), row_id="key", reading=reading))
    assert not any("row_id" in line for line in datasets.remarks())
    leaking = write_log(tmp_path / "leaking.csv", 300, seed=1, first=ROWS - 2)
    with pytest.raises(DataError, match=r"2 held-out rows have an id.*log\.csv:1500 and .*leaking\.csv:2,"):
        build_datasets(make_config(log, eval=str(leaking), row_id="key", reading=reading))
    twice = tmp_path / "twice.csv"
    twice.write_text(log.read_text() + log.read_text().splitlines()[-1] + "\n")
    datasets = build_datasets(make_config(twice, row_id="key", reading=reading))
    assert any("1 train rows repeat an id of column 'key'" in line for line in datasets.remarks())


def test_a_type_that_names_no_rows_is_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"label": [0, 1], "c": [1, 2], "key": [[1], [2]]}), tmp_path / "log.parquet")
    features = {"sparse": [{"name": "c", "num_embeddings": 5}]}
    config = make_config(tmp_path / "log.parquet", features, kind="parquet", row_id="key")
    with pytest.raises(DataError, match=r"log\.parquet: column 'key' of data\.row_id: found type list"):
        build_datasets(config)


def test_a_column_missing_from_the_evaluation_file_is_named_before_anything_is_read(log: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.csv").write_text("label,c\n1,c1\n")
    log.write_text(log.read_text() + "broken\n")
    with pytest.raises(DataError, match=r"eval\.csv: column 'x' not found"):
        build_datasets(make_config(log, eval=str(tmp_path / "eval.csv")))


def test_orders_differ_by_epoch_and_seed_and_ranks_share_one(log: Path) -> None:
    def order(seed: int, epoch: int, rank: int = 0, ranks: int = 1) -> list[int]:
        config = make_config(log, reading="stream", batch=60 // ranks).model_copy(update={"seed": seed})
        loader = build_datasets(config, rank=rank, world_size=ranks).train
        return [row for batch in loader.batches(epoch) for row in batch.row_ids.tolist()]

    orders = [order(1, 0), order(1, 1), order(2, 0)]
    assert len({tuple(one) for one in orders}) == 3
    assert all(sorted(one) == list(range(ROWS)) for one in orders)
    assert order(1, 1) == orders[1]
    first, second = order(1, 0, 0, 2), order(1, 0, 1, 2)
    joined = [
        row
        for start in range(0, len(first), 30)
        for row in itertools.chain(first[start : start + 30], second[start : start + 30])
    ]
    assert joined == orders[0]


def test_blocks_are_read_by_one_reading(log: Path) -> None:
    """A store's blocks are the source's chunks; what a chunk gives does not depend on who reads it, or when."""
    config = make_config(log, VOCABULARY)
    datasets = build_datasets(config)
    reading = Reading.of(config, open_train(config), "train")
    chunks: Iterator[Any] = open_train(config).chunks()
    for number, chunk in enumerate(chunks):
        rows = reading.read(chunk, BadRows())
        assert rows is not None
        encoded, kept = datasets.features.encode(rows.rows), datasets.train.store.read(number)
        assert [column.tolist() for column in encoded.ids] == [column.tolist() for column in kept.ids]
        assert encoded.rows.numbers.tolist() == kept.rows.numbers.tolist()
