"""Public bug reports of click-model tools, tried here as whole training runs on the first rows of Kaggle's Criteo log.

docs/cases.md lists all of them with the tests that hold each. Here is what only a run shows: that losses stay finite on
hard integers (case 1), that no row is lost in a last batch of one (case 4), and that labels of one class end no run
(case 10).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import Ended, call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = (
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [16], out_dim: 8}},"
    " {name: cross, kind: dcn_v2, loss: {kind: bce}, params: {num_layers: 1, rank: 4, out_dim: 8}}]",
    "embedding={dim: 4, backend: torch}",
    "over_arch={hidden: [8]}",
    "train.threads=1",
    "train.device=cpu",
    "train.log_every_steps=1",
)
Lines = list[list[str]]


@pytest.fixture(scope="module")
def lines(real_data: Path) -> Lines:
    text = (real_data / "criteo_first8k" / "train.csv").read_text()
    return [line.split("\t") for line in text.splitlines()[:400]]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


def train(folder: Path, *overrides: str) -> tuple[dict[str, Any], Ended]:
    name = f"run{len(list(folder.glob('runs/*')))}"
    ended = call(folder, "train", "--config", "ctr_criteo.yaml", *SMALL, *overrides, f"run.name={name}")
    return json.loads((folder / "runs" / name / "summary.json").read_text()), ended


def curve(folder: Path, tag: str) -> list[float]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


@pytest.mark.parametrize("transform", ["log", "standardize", "none"])
def test_losses_stay_finite_on_hard_integers(lines: Lines, tmp_path: Path, transform: str) -> None:
    hard = [list(line) for line in lines[:200]]
    for row, column, value in [(10, 2, "-3"), (11, 2, "-100"), (12, 5, "2147483648"), (13, 1, "1e40")]:
        hard[row][column] = value
    if transform == "none":
        hard[13][1] = "1"  # untransformed, 3.4e38 is beyond what a float32 layer multiplies; see the next test
    path = write(tmp_path / "hard.tsv", hard)
    summary, _ = train(
        tmp_path,
        *(f"data.train={path}", f"data.eval={path}", f"features.dense_defaults.transform={transform}"),
        *("train.epochs=2", "train.local_batch_size=50"),
    )
    assert summary["status"] == "completed"
    found = curve(tmp_path / "runs" / "run0", "train/logloss")
    assert len(found) == 8
    assert np.isfinite(found).all()
    assert math.isfinite(summary["eval"]["logloss"])


def test_a_loss_that_is_not_finite_ends_the_run_with_its_rows(lines: Lines, tmp_path: Path) -> None:
    hard = [list(line) for line in lines[:100]]
    hard[13][1] = "1e40"
    path = write(tmp_path / "hard.tsv", hard)
    ended = call(
        tmp_path,
        *("train", "--config", "ctr_criteo.yaml", *SMALL, f"data.train={path}", "data.eval_fraction=0.1"),
        *("features.dense_defaults.transform=none", "train.epochs=1"),
        expect=2,
    )
    assert ended.stderr.startswith("error: ")
    assert "is nan or infinite on the rows" in ended.stderr
    assert str(path) in ended.stderr


def test_no_row_is_lost_in_a_last_batch_of_one(lines: Lines, tmp_path: Path) -> None:
    path = write(tmp_path / "odd.tsv", lines[:257])
    found = {}
    for batch in (128, 257, 1000, 1):
        summary, _ = train(
            tmp_path,
            *(f"data.train={path}", f"data.eval={path}", f"eval.local_batch_size={batch}"),
            *("train.local_batch_size=128", "train.epochs=1"),
        )
        found[batch] = summary["eval"]
        assert summary["eval"]["rows"] == 257
        assert summary["train"] | {"ne": 0} == {"steps": 3, "rows": 257, "ne": 0}
    for batch in (128, 1000, 1):
        assert found[batch] == pytest.approx(found[257], rel=1e-6), batch
    for batch, steps in ((1000, 1), (1, 257)):
        summary, _ = train(
            tmp_path,
            *(f"data.train={path}", f"data.eval={path}", f"train.local_batch_size={batch}", "train.epochs=1"),
        )
        assert summary["train"]["steps"] == steps
        assert summary["train"]["rows"] == 257


@pytest.mark.parametrize("label", ["0", "1"])
def test_labels_of_one_class_end_no_run(lines: Lines, tmp_path: Path, label: str) -> None:
    both = write(tmp_path / "both.tsv", lines)
    one = write(tmp_path / "one.tsv", [line for line in lines if line[0] == label])
    none = write(tmp_path / "none.tsv", [])
    common = ("train.local_batch_size=100", "train.epochs=2", "train.early_stopping={patience: 5}")
    summary, ended = train(tmp_path, f"data.train={both}", f"data.eval={one}", *common)
    assert summary["status"] == "completed"
    assert summary["eval"]["auc"] is None
    assert summary["eval"]["ne"] is None
    assert math.isfinite(summary["eval"]["logloss"])
    assert not list((tmp_path / "runs" / "run0" / "checkpoints").glob("best")), "nan is no best"
    assert "Traceback" not in ended.stderr
    summary, _ = train(tmp_path, f"data.train={both}", f"data.eval={none}", *common)
    assert (summary["status"], summary["eval"]["rows"], summary["eval"]["ne"]) == ("completed", 0, None)
    summary, _ = train(tmp_path, f"data.train={one}", f"data.eval={both}", *common)
    assert summary["status"] == "completed"
    assert summary["train"]["ne"] is None
    assert math.isfinite(summary["eval"]["ne"])
