"""The comparison of objectives: what it chooses on validation rows, trains anew, and says of test rows."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from erase_rec.api.assembly import ContentCatalog
from erase_rec.summary import DataSummary, Summary, ThroughputSummary, TrainSummary
from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import plan_points
from erase_rec.sweep.record import PointRecord, SweepRecord

ROOT = Path(__file__).parents[2]
ROWS = 400


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look their types up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def objectives() -> ModuleType:
    return script("objectives")


def point(arm: str, seed: int, *overrides: str, status: Any = "finished") -> PointRecord:
    name = f"{arm}-{seed}-{len(overrides)}-{abs(hash(overrides))}"
    return PointRecord(
        id=name, arm=arm, seed=seed, overrides=(*overrides, f"seed={seed}"), folder=f"points/{name}", status=status
    )


def written(folder: Path, *points: PointRecord) -> Path:
    folder.mkdir(exist_ok=True)
    SweepRecord(name=folder.name, config="c", command="c", points=points).write(folder)
    return folder


def best_at(folder: Path, entry: PointRecord, ne: float, step: int) -> None:
    """A run that was best at ``step`` and went on a little."""
    checkpoints = folder / entry.folder / "checkpoints"
    newest = f"step_{step + 10:08d}"
    (checkpoints / newest).mkdir(parents=True)
    (checkpoints / "last").write_text(f"{newest}\n")
    (checkpoints / "best").write_text(f"step_{step:08d}\n")
    (checkpoints / newest / "state.json").write_text(json.dumps({"state": {"best": {"best": ne, "since": 1}}}))


def rates(dense: str, sparse: str) -> tuple[str, ...]:
    return f"optimizer.dense.lr={dense}", f"optimizer.sparse.lr={sparse}"


def test_the_best_point_of_each_arm_is_trained_as_long_as_it_was_best(objectives: ModuleType, tmp_path: Path) -> None:
    entries = [
        point("exact optimizer.dense.lr=1e-3", 1, "schedule.preset=exact", *rates("1e-3", "1e-2")),
        point("exact optimizer.dense.lr=3e-3", 1, "schedule.preset=exact", *rates("3e-3", "1e-2")),
        point("joint optimizer.dense.lr=1e-3", 1, "train.epochs=2", *rates("1e-3", "3e-3")),
    ]
    sweep = written(tmp_path / "objectives_frappe", *entries)
    for entry, (ne, step) in zip(entries, [(0.7, 80), (0.6, 40), (0.65, 120)], strict=True):
        best_at(sweep, entry, ne, step)
    chosen = objectives.choose(sweep)
    assert [(each.arm, each.ne, each.step) for each in chosen] == [("exact", 0.6, 40), ("joint", 0.65, 120)]
    assert chosen[0].overrides["optimizer.dense.lr"] == "3e-3"
    file = tmp_path / "final.yaml"
    file.write_text(yaml.safe_dump(objectives.final_sweep("frappe", chosen, seeds=2)))
    sweep_file = read_sweep(file)
    points = plan_points(sweep_file, [], catalog=ContentCatalog())
    assert [(each.arm, each.seed) for each in points] == [("exact", 1), ("joint", 1), ("joint", 2), ("exact", 2)]
    assert all("test.parquet" in " ".join(each.overrides) for each in points)
    assert "train.steps=40" in points[0].overrides


def test_a_sweep_that_has_not_ended_is_refused(objectives: ModuleType, tmp_path: Path) -> None:
    sweep = written(tmp_path / "objectives_adult", point("exact", 1, status="running"))
    for folder in (sweep, tmp_path / "objectives_none"):
        with pytest.raises(SystemExit, match="the sweep has not ended; run: erase-rec sweep"):
            objectives.choose(folder)


def score(folder: Path, entry: PointRecord, logit: np.ndarray, label: np.ndarray) -> None:
    run = folder / entry.folder
    run.mkdir(parents=True)
    columns = {"row_id": np.arange(ROWS), "label": label.astype("int8"), "logit": logit.astype("float32")}
    pq.write_table(pa.table(columns), run / "scores.parquet")
    Summary(
        status="completed",
        throughput=ThroughputSummary(qps_mean=1000.0 * entry.seed, global_batch_size=64),
        train=TrainSummary(steps=1, rows=1, ne=1.0),
        data=DataSummary(fingerprint="x", unseen_share=0.0),
    ).write(run)


def test_gaps_are_to_the_exact_arm_that_was_best_on_validation_rows(objectives: ModuleType, tmp_path: Path) -> None:
    """Even where another exact arm is better on the test rows."""
    generator = np.random.default_rng(1)
    logit = generator.normal(size=ROWS)
    label = generator.random(ROWS) < 1 / (1 + np.exp(-logit))
    noise = {"exact": 0.4, "exact_additive": 0.0, "joint": 0.8}
    entries = [point(arm, seed) for arm in noise for seed in (1, 2, 3)]
    folder = written(tmp_path / "objectives_adult_test", *entries)
    for entry in entries:
        score(folder, entry, logit + noise[entry.arm] * generator.normal(size=ROWS), label)
    both = {"optimizer.dense.lr": "1e-3", "optimizer.sparse.lr": "1e-2"}
    ne = {"exact": 0.7, "exact_additive": 0.8, "joint": 0.6}
    rows = objectives.measure("adult", [objectives.Chosen(arm, ne[arm], 5, both) for arm in noise], folder)
    found = {row["arm"]: row for row in rows}
    assert {row["reference"] for row in rows} == {"exact"}
    assert found["exact"]["gap_pct"] == 0
    assert found["exact_additive"]["gap_pct"] < 0 < found["joint"]["gap_pct"]
    assert found["joint"]["ci_low_pct"] < found["joint"]["gap_pct"] < found["joint"]["ci_high_pct"]
    assert (found["joint"]["seeds"], found["joint"]["rows"], found["joint"]["rows_per_s"]) == (3, ROWS, 2000)
    page = objectives.markdown(rows)
    assert page.index("| exact_additive |") < page.index("| exact |") < page.index("| joint |")
    assert "3 seeds, 400 test rows, against `exact`" in page
    assert all(math.isfinite(row["ne"]) for row in rows)


def test_the_split_is_of_all_rows_once_and_the_same_each_time() -> None:
    table = pd.DataFrame({"label": range(1000)})
    parts = script("objectives_data").split(table)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 700, "valid": 100, "test": 200}
    assert sorted(value for rows in parts.values() for value in rows["label"]) == list(range(1000))
    again = script("objectives_data").split(table)
    assert all(rows.equals(again[name]) for name, rows in parts.items())
