"""One run whose rows are kept in memory, then prepared, then streamed; bad rows; checkpoints of an older format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import call

CONFIG = """
data:
  kind: csv
  train: log.csv
  label: {column: label}
  eval_fraction: 0.2
  shuffle_window: 100
  bad_rows: quarantine
features:
  dense: [{name: x, transform: standardize}]
  sparse: [{name: c, encoding: vocabulary}]
towers: [{name: deep, kind: mlp}]
embedding: {dim: 4, backend: torch}
train: {steps: 12, local_batch_size: 50, threads: 1, device: cpu}
run: {name: whole}
"""


def learned(folder: Path, run: str) -> dict[str, Any]:
    """The summary without its clock."""
    summary = json.loads((folder / "runs" / run / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key != "throughput"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """300 rows for training, in six and a fraction of a step; one row of the file is bad."""
    rng = np.random.default_rng(1)
    rows = [f"{row % 3 // 2},{rng.normal():.3f},c{row % 17}" for row in range(400)]
    rows[7] = "1,none,c1"
    (tmp_path / "log.csv").write_text("\n".join(["label,x,c", *rows, ""]))
    (tmp_path / "other.csv").write_text("label,x,c\n0,1,c1\n1,,new\n1,bad,c2\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.timeout(600)
def test_a_run_goes_on_bit_for_bit_whatever_its_rows_are_read_from(folder: Path) -> None:
    whole = call(folder, "train", "--config", "config.yaml")
    assert "rows are kept in memory" in whole.stdout
    assert "1 rows could not be read and were left out (quarantine.jsonl in the run folder holds them)" in whole.stdout
    (bad,) = (folder / "runs" / "whole" / "quarantine.jsonl").read_text().splitlines()
    assert (json.loads(bad)["number"], json.loads(bad)["column"]) == (9, "x")
    assert learned(folder, "whole")["data"]["bad_rows"] == 1

    call(folder, "prepare", "--config", "config.yaml", "--out", "prepared", "--workers", "1")
    call(folder, "train", "--config", "config.yaml", "run.name=cut", "train.steps=4")
    second = call(folder, "train", "--resume", "runs/cut", "train.steps=9", "data.prepared=prepared")
    assert f"rows are read from the prepared folder {folder / 'prepared'}" in second.stdout
    others = ["data.prepared=null", "data.reading=stream", "data.workers=2"]
    third = call(folder, "train", "--resume", "runs/cut", "train.steps=12", *others)
    assert "rows are read and encoded anew in each epoch" in third.stdout
    assert learned(folder, "cut") == learned(folder, "whole")
    refused = call(folder, "train", "--resume", "runs/cut", "data.shuffle_window=10", expect=2)
    assert "data.shuffle_window cannot change in a resumed run" in refused.stderr


@pytest.mark.timeout(600)
def test_a_run_on_prepared_rows_is_evaluated_on_them_and_on_others(folder: Path) -> None:
    call(folder, "prepare", "--config", "config.yaml", "--out", "prepared", "--workers", "1")
    call(folder, "train", "--config", "config.yaml", "data.prepared=prepared")
    own = json.loads(call(folder, "eval", "--checkpoint", "runs/whole", "--json").stdout)
    assert own["eval"]["rows"] == learned(folder, "whole")["eval"]["rows"] > 0
    files = ["data.eval=other.csv", "data.eval_fraction=null", "data.max_bad_share=0.5"]
    assert "data.max_bad_share is fixed" in call(folder, "eval", "--checkpoint", "runs/whole", *files, expect=2).stderr
    other = call(folder, "eval", "--checkpoint", "runs/whole", "--json", *files[:2])
    assert json.loads(other.stdout)["eval"]["rows"] == 2
    assert "1 rows could not be read and were left out" in other.stderr
    assert "50.0% of the held-out categorical values are unseen: c 50.0%" in other.stderr

    state = max((folder / "runs" / "whole" / "checkpoints").glob("step_*/state.json"))
    state.write_text(state.read_text().replace('"format": 3', '"format": 1'))
    old = call(folder, "train", "--resume", "runs/whole", "train.steps=20", expect=2)
    assert "its format is 1, this version reads 3" in old.stderr
    assert len(old.stderr.strip().splitlines()) == 1
