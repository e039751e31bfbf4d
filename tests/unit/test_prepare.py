"""Preparation: the same rows as without it, whatever interrupts it and however many workers there are."""

from __future__ import annotations

import collections
import csv
import gzip
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prepared_cases import MEMORY_BYTES, Silent, assert_same_rows, reading_from, run

from data.dataset import build_datasets
from data.errors import DataError
from data.prepared.lock import locked
from data.prepared.manifest import Manifest
from data.prepared.prepare import Options, dry_run, prepare
from data.sources import text_file
from erase_rec.config.schema import Config

ROWS = 2000
FEATURES: dict[str, Any] = {
    "hash": {
        "dense": ["x"],
        "sparse": [{"name": "c", "num_embeddings": 50}, {"name": "id", "encoding": "id", "num_embeddings": 9}],
    },
    "vocabulary": {
        "dense": [{"name": "x", "transform": "standardize"}, "z"],
        "sparse": [
            {"name": "c", "encoding": "vocabulary", "min_count": 3, "fill": "none"},
            {"name": "tags", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "weights": "w"},
        ],
    },
    "bags": {
        "sparse": [
            {"name": "tags", "num_embeddings": 20, "multi_valued": True, "separator": "|"},
            {"name": "c", "num_embeddings": 9},
        ]
    },
}
COLUMNS = ("label", "x", "z", "c", "id", "tags", "w", "key", "at")


@pytest.fixture(autouse=True)
def _many_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "CHUNK_BYTES", 6 << 10)
    monkeypatch.setattr(text_file, "READ_BYTES", 2 << 10)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.csv")


def write_log(path: Path, rows: int = ROWS, seed: int = 0, first: int = 0, bad: Sequence[int] = ()) -> Path:
    """Rows of every kind of column; those at ``bad`` have no number in ``x``."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for row in range(rows):
            tags = [str(tag) for tag in rng.integers(0, 30, rng.integers(0, 4))]
            writer.writerow(
                [
                    int(rng.random() < 0.3),
                    "bad" if row in bad else rng.choice(["", "7", "-3", f"{rng.normal():.3f}", "1e40"]),
                    round(rng.normal(), 3),
                    rng.choice(["", f"c{int(rng.exponential(20))}"], p=[0.1, 0.9]),
                    int(rng.integers(0, 9)),
                    "|".join(tags),
                    "|".join(f"{rng.random():.2f}" for _ in tags),
                    f"row{first + row}",
                    1000 + first + row,
                ]
            )
    return path


def config_of(features: str, train: Path | str, **data: Any) -> Config:
    section = {"kind": "csv", "train": str(train), "label": {"column": "label"}} | data
    return Config.model_validate(
        {
            "data": section,
            "features": FEATURES[features],
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": 128},
        }
    )


def digests(folder: Path) -> dict[str, str]:
    """Every file's content, but for how the manifest was made."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.name == "manifest.json":
                content = json.dumps(json.loads(content) | {"made": None, "sha256": None}).encode()
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


SPLITS: dict[str, dict[str, Any]] = {
    "nothing held out": {},
    "by row": {"eval_fraction": 0.2},
    "by hash": {"eval_fraction": 0.2, "split": {"by": "hash", "column": "c"}},
    "by time": {"split": {"by": "time", "column": "at", "since": "2500"}},
    "by row, sampled": {"eval_fraction": 0.2, "negative_sampling_rate": 0.3},
}


@pytest.mark.parametrize(
    ("features", "split"),
    [
        ("hash", "nothing held out"),
        ("hash", "by row"),
        ("vocabulary", "by hash"),
        ("bags", "by time"),
        ("vocabulary", "by row, sampled"),
    ],
)
def test_prepared_rows_are_those_of_memory(log: Path, tmp_path: Path, features: str, split: str) -> None:
    config = config_of(features, log, shuffle_window=300, **SPLITS[split])
    manifest = run(config, tmp_path / "out")
    assert len(manifest.splits["train"].parts) > 2, "several groups"
    assert not (tmp_path / "out" / ".work").exists()
    assert_same_rows(config, tmp_path / "out")


def test_prepared_rows_say_how_many_were_left_out(log: Path, tmp_path: Path) -> None:
    config = config_of("hash", log, eval_fraction=0.2, negative_sampling_rate=0.3)
    manifest = run(config, tmp_path / "out")
    assert manifest.num_left_out == ROWS - sum(split.rows for split in manifest.splits.values()) > 0
    assert manifest.conclusion(tmp_path / "out")[2] == (
        f"left out: {manifest.num_left_out:,} negative rows (data.negative_sampling_rate: 0.3)"
    )
    other = config_of("hash", log, eval_fraction=0.2, negative_sampling_rate=0.4)
    with pytest.raises(DataError, match=r"data\.negative_sampling_rate: 0\.4 here, but .* was prepared with 0\.3"):
        build_datasets(reading_from(other, tmp_path / "out"))


def test_files_for_evaluation_and_several_files(log: Path, tmp_path: Path) -> None:
    """Two workers, more files than one, bad rows left out of each."""
    paths = [write_log(tmp_path / f"{day}.csv", 300, seed=day, first=300 * day, bad=[5, 70]) for day in range(4)]
    config = config_of("vocabulary", str(tmp_path / "[012].csv"), eval=str(paths[3]), bad_rows="skip")
    manifest = run(config, tmp_path / "out", workers=2)
    assert manifest.files == list(map(str, paths))
    assert manifest.bad_rows.count == 8
    assert manifest.rows_read == 1200
    assert manifest.splits["eval"].rows == 298
    assert_same_rows(config, tmp_path / "out")


def test_rows_that_are_made_up_and_no_rows_to_evaluate(log: Path, tmp_path: Path) -> None:
    columns = {"dense": ["I1"], "sparse": [{"name": "C1", "encoding": "vocabulary"}]}
    params = {"rows": 20_000, "eval_rows": 17_000, "dense": 2, "sparse": 2, "max_categories": 9}
    plain = config_of("hash", log).model_dump()
    made_up = plain | {"data": {"kind": "synthetic", "params": params}, "features": columns}
    manifest = run(Config.model_validate(made_up), tmp_path / "made up")
    assert {split: record.rows for split, record in manifest.splits.items()} == {"train": 20_000, "eval": 17_000}
    assert_same_rows(Config.model_validate(made_up), tmp_path / "made up")
    with pytest.raises(DataError, match=r"input\.train\.0\.1 is"):  # other rows of another seed
        run(Config.model_validate(made_up | {"seed": 2}), tmp_path / "made up")
    (tmp_path / "empty.csv").write_text(",".join(COLUMNS) + "\n")
    config = config_of("hash", log, eval=str(tmp_path / "empty.csv"))
    assert run(config, tmp_path / "empty").splits["eval"].label_rate is None
    assert_same_rows(config, tmp_path / "empty")


def test_nothing_depends_on_the_number_of_workers(log: Path, tmp_path: Path) -> None:
    config = config_of("vocabulary", log, eval_fraction=0.2, row_id="key")
    for workers in (1, 3):
        run(config, tmp_path / str(workers), workers=workers)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


@pytest.mark.parametrize("features", ["hash", "vocabulary"])
def test_a_stopped_preparation_goes_on_where_it_stopped(log: Path, tmp_path: Path, features: str) -> None:
    config = config_of(features, log, eval_fraction=0.2)
    whole = Silent()
    run(config, tmp_path / "whole", report=whole)
    folder, written = tmp_path / "stopped", {}
    for stop_at in (3, whole.events // 2 + 2, whole.events):
        with pytest.raises(KeyboardInterrupt):
            run(config, folder, report=Silent(stop_at))
        assert not (folder / "manifest.json").exists()
        parts = {path: path.stat().st_mtime_ns for path in folder.glob("*/part-*.arrow")}
        assert parts.items() >= written.items(), "finished parts are kept"
        written = parts
    assert written
    with pytest.raises(DataError, match="not finished; run the same erase-rec prepare command again"):
        Manifest.read(folder)
    run(config, folder)
    assert digests(folder) == digests(tmp_path / "whole")


def test_what_was_damaged_meanwhile_is_made_again(log: Path, tmp_path: Path) -> None:
    config = config_of("vocabulary", log, eval_fraction=0.2)
    whole = Silent()
    run(config, tmp_path / "whole", report=whole)
    folder = tmp_path / "damaged"
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, report=Silent(whole.events - 2))
    work = folder / ".work"
    raws, parts = sorted(work.glob("*.raw")), sorted(folder.glob("train/part-*.arrow"))
    raws[-1].write_bytes(raws[-1].read_bytes()[:-8])
    content = bytearray(parts[0].read_bytes())
    content[len(content) // 2] ^= 1
    parts[0].write_bytes(content)
    (work / "train-00001.json").write_text('{"source": "tr')
    (work / "train-00002.fit").unlink()
    (folder / "features" / "encodings.arrow").unlink()
    (folder / "train" / ".part-00009.arrow.partial-77").write_text("half a part")
    run(config, folder)
    assert digests(folder) == digests(tmp_path / "whole")


def test_a_folder_belongs_to_one_plan(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    config = config_of("hash", log, eval_fraction=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, report=Silent(3))
    other = config_of("hash", log, eval_fraction=0.3)
    for _ in range(2):  # half done, then finished
        with pytest.raises(DataError, match=r"settings\.data\.eval_fraction is 0\.2 there and 0\.3 now.*--force"):
            run(other, folder)
        run(config, folder)
    report = Silent()
    assert run(config, folder, report=report) == Manifest.read(folder)
    assert "prepared already" in report.lines[0]
    assert run(other, folder, force=True).settings["data"]["eval_fraction"] == 0.3
    moved = tmp_path / "moved.csv"
    shutil.copy2(log, moved)
    run(config_of("hash", moved, eval_fraction=0.3), folder)  # the same file in another place
    moved.write_bytes(log.read_bytes())
    with pytest.raises(DataError, match=r"input\.train\.0\.1 is"):
        run(config_of("hash", moved, eval_fraction=0.3), folder)


def test_a_preparation_that_finished_nothing_is_in_nobody_s_way(log: Path, tmp_path: Path) -> None:
    """The input is corrected, and the same command works."""
    path = tmp_path / "log.csv.gz"
    shutil.copy(log, path)
    with pytest.raises(DataError, match="the content is not gzip"):
        run(config_of("hash", path), tmp_path / "out")
    path.write_bytes(gzip.compress(log.read_bytes()))
    assert run(config_of("hash", path), tmp_path / "out").rows_read == ROWS


def test_a_folder_that_holds_something_else_is_left_alone(log: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(DataError, match=r"holds other files, such as 'thesis\.tex'"):
            run(config_of("hash", log), tmp_path, force=force)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["train/day_0.csv", "features/part-00000.arrow", "eval/notes/part-00000.arrow"])
@pytest.mark.parametrize("force", [False, True])
def test_raw_files_in_folders_of_our_names_are_left_alone(log: Path, tmp_path: Path, name: str, force: bool) -> None:
    if not name.endswith(".csv"):
        run(config_of("hash", log, eval_fraction=0.2), tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(log, tmp_path / name)
    with pytest.raises(DataError, match=f"holds other files, such as '{Path(name).parts[0]}/"):
        run(config_of("hash", log, eval_fraction=0.2), tmp_path, force=force)
    assert (tmp_path / name).read_bytes() == log.read_bytes()


def test_what_cannot_be_written_is_a_users_error(log: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(DataError, match=r"cannot be written: .*; make it a folder that you may write to, or name"):
            run(config_of("hash", log), folder)


def test_one_preparation_at_a_time(log: Path, tmp_path: Path) -> None:
    with locked(tmp_path / ".work"), pytest.raises(DataError, match=r"process \d+ is preparing data in this folder"):
        run(config_of("hash", log), tmp_path)
    run(config_of("hash", log), tmp_path)


@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_bad_rows_cost_only_themselves(tmp_path: Path, policy: str) -> None:
    path = write_log(tmp_path / "log.csv", 1500, bad=range(100, 1300, 100))
    lines = path.read_text().splitlines()
    lines[800] += ",one too many"
    path.write_text("\n".join(lines) + "\n")
    manifest = run(config_of("hash", path, bad_rows=policy, eval_fraction=0.2), tmp_path / "out")
    assert manifest.bad_rows.count == 13
    assert manifest.rows_read == 1500
    assert sum(split.rows for split in manifest.splits.values()) == 1487
    (first, count), (second, one) = manifest.bad_rows.reasons.items()
    assert (count, one) == (12, 1)
    assert first.startswith("column x: found '...', expected a number")
    assert "10 fields" in second
    quarantine = tmp_path / "out" / "quarantine.jsonl"
    assert quarantine.exists() == (policy == "quarantine")
    if policy == "quarantine":
        rows = [json.loads(line) for line in quarantine.read_text().splitlines()]
        assert [row["number"] for row in rows] == sorted([*range(102, 1302, 100), 801])
        assert rows[0] == {
            "file": str(path),
            "unit": "line",
            "number": 102,
            "column": "x",
            "value": "bad",
            "reason": rows[0]["reason"],
        }


def test_a_bad_row_ends_the_preparation_by_default(tmp_path: Path) -> None:
    """With more workers than one, too, it is the first in the file."""
    path = write_log(tmp_path / "log.csv", 1500, bad=[300, 400, 1400])
    with pytest.raises(DataError, match=rf"{path}:302: feature 'x': found 'bad', expected a number"):
        run(config_of("hash", path), tmp_path / "out", workers=2)


def test_too_many_bad_rows_end_it(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.csv", 1000, bad=range(0, 1000, 5))
    with pytest.raises(
        DataError, match=r"data\.max_bad_share: .* The most frequent \(\d+ rows, .*log\.csv, line 2\)"
    ) as it:
        run(config_of("hash", path, bad_rows="skip"), tmp_path / "out")
    assert "column x: found '...', expected a number" in str(it.value)


def test_the_same_row_on_both_sides_is_refused(log: Path, tmp_path: Path) -> None:
    again = write_log(tmp_path / "again.csv", 50, seed=3, first=ROWS - 10)
    config = config_of("vocabulary", log, eval=str(again), row_id="key")
    with pytest.raises(DataError, match="10 held-out rows have an id") as refused:
        run(config, tmp_path / "out")
    assert f"{log}:{ROWS - 8} and {again}:2" in str(refused.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_repeated_row_ids_are_said(log: Path, tmp_path: Path) -> None:
    report = Silent()
    manifest = run(config_of("hash", log, row_id="c"), tmp_path / "out", report=report)
    assert manifest.row_ids is not None
    assert manifest.row_ids.rows + manifest.row_ids.missing == ROWS
    assert manifest.row_ids.repeated["train"] > 1000
    assert set(manifest.row_ids.remarks) <= set(report.lines)
    assert "train rows repeat an id of column 'c'" in manifest.row_ids.remarks[0]


def test_rows_are_stored_with_the_time_that_splits_them(log: Path, tmp_path: Path) -> None:
    run(config_of("vocabulary", log, **SPLITS["by time"]), tmp_path)
    for split, expected in (("train", range(1000, 2500)), ("eval", range(2500, 3000))):
        parts = [pa.ipc.open_file(str(path)).read_all() for path in sorted((tmp_path / split).iterdir())]
        assert pa.concat_tables(parts)["time"].to_pylist() == list(expected)


def test_a_mistake_in_the_evaluation_files_does_not_wait_for_their_turn(log: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,c\n1,2\n")
    config = config_of("hash", log, eval=str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"a\.csv: column 'x' not found"):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_train_on_is_an_error(log: Path, tmp_path: Path) -> None:
    config = config_of("hash", log, split={"by": "time", "column": "at", "since": "5"})
    with pytest.raises(DataError, match=r"data\.train: no rows to train on \(2000 rows read"):
        run(config, tmp_path)


def test_a_dry_run_writes_nothing(log: Path, tmp_path: Path) -> None:
    report = Silent()
    disk = dry_run(config_of("hash", log, eval_fraction=0.2), tmp_path / "out", Options(2, MEMORY_BYTES), report)
    assert not (tmp_path / "out").exists()
    assert disk.rows == pytest.approx(ROWS, rel=0.1)
    manifest = run(config_of("hash", log, eval_fraction=0.2), tmp_path / "out")
    parts = sum(part.file.num_bytes for split in manifest.splits.values() for part in split.parts)
    assert disk.part_bytes < parts, "the format's own overhead is large for so few rows"
    assert "are free" in report.lines[0]
    assert "of 2 workers fit into 8,192 MiB" in report.lines[1]


def test_a_disk_that_is_too_small_is_refused_first(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1000))
    with pytest.raises(DataError, match=r"are needed and 1\.0 kB are free; make room, or name a folder on another"):
        run(config_of("hash", log), tmp_path)


def test_a_bound_that_no_worker_fits_is_refused(log: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--memory: 64 MiB are too little .* give --memory \d+MiB or more"):
        prepare(config_of("hash", log), tmp_path, Options(1, 64 << 20), Silent())
