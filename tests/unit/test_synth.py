"""Made-up raw files: the same rows whatever is asked around them, in Criteo's shape, with known properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv
from pyarrow import parquet as pq

from data.errors import DataError
from data.synth import Spec, claim_folder, require_space, write_files
from data.synth_rows import BLOCK_ROWS, DENSE, DENSE_MISSING, NUM_CATEGORIES, SPARSE, SPARSE_MISSING, Synth

NAMES = ["label", *DENSE, *SPARSE]


@pytest.fixture(scope="module")
def synth() -> Synth:
    return Synth(1)


def write(folder: Path, *, workers: int = 1, **changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"rows": 3000, "eval_rows": 500, "seed": 1, "format": "criteo", **changes}
    folder.mkdir(exist_ok=True)
    return write_files(Spec(**spec), folder, workers=workers, on_rows=lambda rows: None)


def read_text(path: Path, names: list[str] | None, delimiter: str) -> pa.Table:
    return arrow_csv.read_csv(
        path,
        read_options=arrow_csv.ReadOptions(column_names=names),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
        convert_options=arrow_csv.ConvertOptions(
            column_types={**dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(SPARSE, pa.string())},
            strings_can_be_null=True,
        ),
    )


def test_formats_hold_the_same_rows(tmp_path: Path) -> None:
    for kind in ("criteo", "csv", "parquet"):
        write(tmp_path / kind, format=kind)
    criteo = read_text(tmp_path / "criteo" / "train-00000.tsv", NAMES, "\t")
    csv = read_text(tmp_path / "csv" / "train-00000.csv", None, ",")
    parquet = pq.read_table(tmp_path / "parquet" / "train-00000.parquet")
    assert csv.equals(criteo)
    assert parquet.set_column(0, "label", parquet["label"].cast(pa.int64())).equals(criteo)
    assert criteo.num_rows == 3000


def test_lines_are_criteos(tmp_path: Path) -> None:
    write(tmp_path)
    lines = (tmp_path / "train-00000.tsv").read_text().split("\n")
    assert lines.pop() == ""
    fields = [line.split("\t") for line in lines]
    assert {len(line) for line in fields} == {40}
    assert {line[0] for line in fields} == {"0", "1"}
    assert all(field == "" or str(int(field)) == field for line in fields for field in line[1:14])
    assert all(field == "" or (len(field) == 8 and int(field, 16) >= 0) for line in fields for field in line[14:])


def test_a_longer_log_starts_with_a_shorter_one(tmp_path: Path) -> None:
    write(tmp_path / "short", rows=700)
    write(tmp_path / "long", rows=BLOCK_ROWS + 10)
    short = (tmp_path / "short" / "train-00000.tsv").read_bytes()
    assert (tmp_path / "long" / "train-00000.tsv").read_bytes().startswith(short)


def test_files_and_workers_cut_the_same_rows(tmp_path: Path) -> None:
    rows = 2 * BLOCK_ROWS + 100
    whole = write(tmp_path / "whole", rows=rows)
    parts = write(tmp_path / "parts", rows=rows, files=3, workers=2)
    names = [file["name"] for file in parts["files"]]
    assert names == ["train-00000.tsv", "train-00001.tsv", "train-00002.tsv", "eval.tsv"]
    joined = b"".join((tmp_path / "parts" / name).read_bytes() for name in names[:-1])
    assert joined == (tmp_path / "whole" / "train-00000.tsv").read_bytes()
    assert parts["train"] == whole["train"]
    assert parts["eval"] == whole["eval"]


def test_seeds_and_splits_differ(tmp_path: Path) -> None:
    write(tmp_path / "one", rows=500)
    write(tmp_path / "two", rows=500, seed=2)
    train, held_out = ((tmp_path / "one" / name).read_bytes() for name in ("train-00000.tsv", "eval.tsv"))
    assert train != held_out
    assert train != (tmp_path / "two" / "train-00000.tsv").read_bytes()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_row_ids_name_each_row_once(tmp_path: Path, kind: str) -> None:
    write(tmp_path, format=kind, id_column=True, rows=BLOCK_ROWS + 20)
    tables = [
        pq.read_table(path) if kind == "parquet" else read_text(path, None, ",")
        for path in sorted(tmp_path.glob(f"*.{kind}"))
    ]
    held_out, train = (table["row_id"].to_pylist() for table in tables)
    assert train == [f"t{number:012d}" for number in range(BLOCK_ROWS + 20)]
    assert held_out == [f"e{number:012d}" for number in range(500)]


def test_shares_and_cardinalities(synth: Synth) -> None:
    block = synth.block("train", 0)
    # 65,536 draws of a share have a standard deviation of at most 0.002.
    np.testing.assert_allclose(block.dense_missing.mean(axis=1), DENSE_MISSING, atol=0.01)
    np.testing.assert_allclose(block.sparse_missing.mean(axis=1), SPARSE_MISSING, atol=0.01)
    assert block.label.mean() == pytest.approx(0.25, abs=0.01)
    assert synth.values[1].min() == -2
    found = [len(np.unique(names)) for names in block.names]
    assert all(count <= most for count, most in zip(found, NUM_CATEGORIES, strict=True))
    assert found[NUM_CATEGORIES.index(4)] == 4
    assert found[NUM_CATEGORIES.index(1_000_000)] > 10_000
    counts = np.unique(block.names[NUM_CATEGORIES.index(1_000_000)], return_counts=True)[1]
    assert (counts >= 10).sum() > 100, "a threshold of 10 must leave a vocabulary"
    assert (counts < 10).mean() > 0.8, "and cut most of it"


def test_rare_categories_are_all_reachable(synth: Synth) -> None:
    """The ranks' stretches leave no gap, so that a long log shows every category."""
    popularity = synth._popularity[2]
    first, last = popularity.first.astype(np.int64), popularity.first + popularity.width.astype(np.int64) - 1
    assert first[0] == 0
    assert last[-1] == NUM_CATEGORIES[2] - 1
    assert (first[1:] <= last[:-1] + 1).all()


def test_no_model_beats_the_teacher(synth: Synth, tmp_path: Path) -> None:
    summary = write(tmp_path, rows=BLOCK_ROWS)
    assert 0.5 < summary["train"]["bayes_ne"] < 0.9
    block = synth.block("train", 0)
    rate = block.label.mean()
    constant = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert summary["train"]["bayes_ne"] == pytest.approx(block.cross_entropy / BLOCK_ROWS / constant)


def test_summary_says_what_is_there(tmp_path: Path) -> None:
    summary = write(tmp_path, format="csv", id_column=True)
    assert json.loads((tmp_path / "synth.json").read_text()) == summary
    assert summary["train"]["rows"] == 3000
    assert summary["eval"]["rows"] == 500
    for file in summary["files"]:
        table = read_text(tmp_path / file["name"], None, ",")
        assert (tmp_path / file["name"]).stat().st_size == file["bytes"]
        assert (table.num_rows, sum(table["label"].to_pylist())) == (file["rows"], file["clicks"])


def test_no_eval_rows_no_eval_file(tmp_path: Path) -> None:
    summary = write(tmp_path, eval_rows=0)
    assert summary["eval"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["synth.json", "train-00000.tsv"]


@pytest.mark.parametrize("kind", ["criteo", "csv", "parquet"])
@pytest.mark.parametrize("id_column", [False, True])
def test_the_estimate_is_right(tmp_path: Path, kind: Any, id_column: bool) -> None:
    if id_column and kind == "criteo":
        return
    summary = write(tmp_path, format=kind, id_column=id_column, rows=2 * BLOCK_ROWS, eval_rows=0)
    spec = Spec(2 * BLOCK_ROWS, 0, 1, kind, id_column=id_column)
    assert sum(file["bytes"] for file in summary["files"]) == pytest.approx(spec.estimated_bytes(), rel=0.1)


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rows: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device; free some space"):
        write_files(Spec(3000, 0, 1, "criteo"), tmp_path, workers=1, on_rows=refuse)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the disk has"):
        require_space(Spec(10**12, 0, 1, "criteo"), tmp_path / "not" / "yet")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no place for a row id"):
        Spec(1000, 0, 1, "criteo", id_column=True)
    with pytest.raises(DataError, match="use at most --files 2"):
        Spec(BLOCK_ROWS + 1, 0, 1, "csv", files=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        claim_folder(tmp_path / "file", force=True)
    with pytest.raises(DataError, match="not empty"):
        claim_folder(tmp_path, force=False)


def test_force_removes_only_what_was_made_up(tmp_path: Path) -> None:
    for name in ("train-00003.csv", "train-00000.tsv.partial", "eval.tsv", "synth.json", "train-notes.txt", "mine.csv"):
        (tmp_path / name).write_text("")
    claim_folder(tmp_path, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "train-notes.txt"]
