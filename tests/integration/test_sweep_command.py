"""``erase-rec sweep`` as a user types it: a failing arm, a kill in the middle, two ranks, a dry run, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BASE = """
data: {kind: synthetic, params: {rows: 600, eval_rows: 200}}
features:
  dense: [I1, I2]
  sparse: [{name: C1, num_embeddings: 50}, {name: C2, num_embeddings: 50}]
towers:
  - {name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [8], out_dim: 4}}
  - {name: cross, kind: dcn_v2, loss: {kind: bce}, params: {rank: 4, out_dim: 4}}
embedding: {dim: 4, backend: torch}
train: {epochs: 2, local_batch_size: 50, checkpoint_every_steps: 5, warmup_qps_steps: 1, threads: 1, device: cpu}
"""
SWEEP = """
base: base.yaml
arms:
  exact: {schedule.preset: exact, towers.deep.loss: null, towers.cross.loss: null}
  detached: {schedule.preset: detached}
seeds: [1, 2]
"""
ENDS_S = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "erase_rec", "sweep", *arguments]


def call(folder: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def results(sweep: Path) -> dict[tuple[str, int], Any]:
    """Of each point: its state, and its summary without the clock."""
    found = {}
    for point in read(sweep / "sweep.json")["points"]:
        summary = read(sweep / point["folder"] / "summary.json")
        del summary["throughput"]
        assert point.pop("seconds") > 0
        found[point["arm"], point["seed"]] = (point, summary)
    return found


@pytest.mark.timeout(900)
def test_a_sweep_killed_in_the_middle_and_called_again_is_as_one_that_was_not(folder: Path) -> None:
    whole = call(folder, "--config", "sweep.yaml", "--jobs", "2", "--out", "whole")
    assert "[4/4]" in whole.stdout
    assert "mean eval.ne" in whole.stdout

    with subprocess.Popen(command("--config", "sweep.yaml", "--out", "killed"), cwd=folder) as sweep:
        record, deadline = folder / "killed" / "sweep.json", time.monotonic() + ENDS_S
        while True:  # until the second run is in its steps, with a checkpoint to go on from
            points = read(record)["points"] if record.exists() else []
            second = folder / "killed" / points[1]["folder"] if points else folder
            if any(second.glob("checkpoints/*")) or (points and points[1]["status"] == "finished"):
                break
            assert time.monotonic() < deadline
            assert sweep.poll() is None
            time.sleep(0.01)
        sweep.kill()
    states = [point["status"] for point in read(record)["points"]]
    assert states[0] == "finished"
    assert "pending" in states
    first = record.parent / read(record)["points"][0]["folder"] / "summary.json"
    written = first.stat().st_mtime_ns
    call(folder, "--config", "sweep.yaml", "--out", "killed")
    assert first.stat().st_mtime_ns == written, "a finished point ran again"
    assert results(folder / "killed") == results(folder / "whole")
    assert len(results(folder / "whole")) == 4


@pytest.mark.timeout(600)
def test_a_failing_point_is_reported_and_the_rest_goes_on(folder: Path) -> None:
    (folder / "sweep.yaml").write_text("base: base.yaml\narms: {absent: {data.prepared: nowhere}, good: {}}\n")
    result = call(folder, "--config", "sweep.yaml", expect=1)
    absent, good = read(folder / "runs" / "sweep" / "sweep.json")["points"]
    assert (absent["status"], good["status"], good["reason"]) == ("failed", "finished", None)
    assert "nowhere" in absent["reason"]
    assert f"failed: absent, seed 1: {absent['reason']}" in result.stderr
    log = folder / "runs" / "sweep" / f"{absent['folder']}.log"
    assert str(log.relative_to(folder)) in result.stderr
    assert absent["reason"] in log.read_text()
    listed = call(folder, "--config", "sweep.yaml", "--dry-run").stdout
    assert [line.split()[1] for line in listed.splitlines() if absent["id"] in line or good["id"] in line] == [
        absent["id"],
        good["id"],
    ]
    assert "failed" in listed
    assert "finished" in listed


@pytest.mark.timeout(600)
def test_points_of_two_ranks_are_started_by_torchrun_and_ctrl_c_ends_them(folder: Path) -> None:
    (folder / "sweep.yaml").write_text("base: base.yaml\nseeds: [1, 2]\nranks: 2\n")
    arguments = ("--config", "sweep.yaml", "train.local_batch_size=25")
    with subprocess.Popen(command(*arguments), cwd=folder) as sweep:
        record, deadline = folder / "runs" / "sweep" / "sweep.json", time.monotonic() + ENDS_S
        while not record.exists() or read(record)["points"][0]["status"] != "finished":
            assert time.monotonic() < deadline
            assert sweep.poll() is None
            time.sleep(0.05)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(ENDS_S) == 130
    first, second = read(record)["points"]
    assert second["status"] == "pending"
    assert not processes_of(folder)
    assert read(record.parent / first["folder"] / "summary.json")["throughput"]["ranks"] == 2
    call(folder, *arguments)
    assert [point["status"] for point in read(record)["points"]] == ["finished", "finished"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes at work in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.timeout(600)
def test_a_search_goes_on_and_names_the_best_trial(folder: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    text = "base: base.yaml\nsearch: {trials: 1, space: {optimizer.dense.lr: {low: 1e-4, high: 1e-2, log: true}}}\n"
    (folder / "sweep.yaml").write_text(text)
    call(folder, "--config", "sweep.yaml")
    (first,) = read(folder / "runs" / "sweep" / "sweep.json")["points"]
    (folder / "sweep.yaml").write_text(text.replace("trials: 1", "trials: 2"))
    said = call(folder, "--config", "sweep.yaml").stdout
    points = read(folder / "runs" / "sweep" / "sweep.json")["points"]
    assert points[0] == first
    assert [point["status"] for point in points] == ["finished", "finished"]
    costs = [read(folder / "runs" / "sweep" / point["folder"] / "summary.json")["eval"]["ne"] for point in points]
    assert f"best eval.ne: {points[costs.index(min(costs))]['arm']}\n" in said


def test_a_dry_run_lists_the_points_and_makes_nothing(folder: Path) -> None:
    listed = call(folder, "--config", "sweep.yaml", "--dry-run").stdout
    assert listed.count("pending") == 4
    assert sorted(path.name for path in folder.iterdir()) == ["base.yaml", "sweep.yaml"]


def test_mistakes_are_told_before_anything_runs(folder: Path) -> None:
    (folder / "sweep.yaml").write_text("base: base.yaml\narms: {a: {train.stepz: 3}, b: {embedding.dim: 0}, c: {}}\n")
    result = call(folder, "--config", "sweep.yaml", expect=2)
    assert result.stderr.startswith("error: 2 problems in the configuration")
    assert "did you mean 'steps'" in result.stderr
    assert "embedding.dim" in result.stderr
    assert not (folder / "runs").exists()
