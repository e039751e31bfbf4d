"""The commands a user types, as processes in an empty folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import warm_process
from sklearn.metrics import log_loss, roc_auc_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = [
    "data.params={rows: 3000, eval_rows: 1000}",
    "embedding.backend=torch",
    "train.local_batch_size=250",
    "train.threads=1",
]


def typed(checkout: Path, arguments: Sequence[str]) -> list[str]:
    """``train.py`` or ``-m erase_rec``, and its arguments."""
    if arguments[0] == "train.py":
        return [str(checkout / "train.py"), *arguments[1:]]
    return ["-m", "erase_rec", *arguments]


def call(checkout: Path, cwd: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs ``python train.py`` or ``python -m erase_rec``."""
    return warm_process.run(cwd, *typed(checkout, arguments), expect=expect)


def call_cold(checkout: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same by an interpreter of its own, as a user does."""
    command = [sys.executable, *typed(checkout, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def summary(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return loaded


def learned(folder: Path) -> dict[str, Any]:
    """The summary without its clock."""
    return {key: value for key, value in summary(folder).items() if key != "throughput"}


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", ["exact", "exact_streams", "detached", "erase"])
def test_main_job_in_every_preset(checkout: Path, tmp_path: Path, preset: str) -> None:
    call(
        checkout,
        tmp_path,
        "train.py",
        "--config",
        "ctr_erase.yaml",
        f"schedule.preset={preset}",
        "run.name=r",
        "train.log_every_steps=4",
        *SMALL,
    )
    folder = tmp_path / "runs" / "r"
    result = summary(folder)
    assert result["status"] == "completed"
    assert result["eval"]["rows"] == 1000
    assert result["train"] == {"steps": 12, "rows": 3000, "ne": result["train"]["ne"]}
    assert 0 < result["eval"]["ne"] < 1.5
    assert len(result["towers"]) == 6
    assert all(0 < tower["ne"] < 3 for tower in result["towers"].values())
    assert result["throughput"]["global_batch_size"] == 250
    assert (folder / "config.yaml").is_file()
    assert json.loads((folder / "environment.json").read_text())["seed"] == "1"
    assert [step for step, _ in curve(folder, "train/ne")] == [4, 8, 12]
    tags = set(rows(folder)[-1]) | set(rows(folder)[0])
    wanted = {"train/ne", "tower/cross/ne", "tower/cross/grad_norm", "eval/ne", "eval/auc", "eval/logloss"}
    assert wanted | {"eval/calibration", "lr/dense", "lr/sparse"} <= tags


def test_aggregate_and_early_backward_train_the_same_model(checkout: Path, tmp_path: Path) -> None:
    """Bit for bit on the CPU: a preset changes when work is launched, not what is computed."""
    for name in ("detached", "erase"):
        call(
            checkout,
            tmp_path,
            "train.py",
            "--config",
            "ctr_erase.yaml",
            f"schedule.preset={name}",
            f"run.name={name}",
            *SMALL,
        )
    assert learned(tmp_path / "runs" / "detached") == learned(tmp_path / "runs" / "erase")


def test_kill_and_resume_equals_an_uninterrupted_run(checkout: Path, tmp_path: Path) -> None:
    """Killed in epoch 2 with a dropout model: the same summary, rates and curves, one value a step."""
    arguments = [
        *SMALL,
        "train.epochs=3",
        "train.checkpoint_every_steps=5",
        "train.log_every_steps=1",
        "train.early_stopping={patience: 5}",
        "over_arch.dropout=0.2",
        "optimizer.lr_schedule={kind: cosine, warmup_steps: 7}",
    ]
    command = ["train.py", "--config", "ctr_erase.yaml", *arguments]
    call(checkout, tmp_path, *command, "run.name=whole")
    folder = tmp_path / "runs" / "killed"
    with warm_process.started(tmp_path, typed(checkout, [*command, "run.name=killed"]), tmp_path) as killed:
        limit = time.monotonic() + 120
        while not (folder / "checkpoints" / "step_00000020").exists():
            assert killed.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < limit
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=60)
    assert len(rows(folder)) < 36
    call_cold(checkout, tmp_path, "train.py", "--resume", str(folder))
    whole = tmp_path / "runs" / "whole"
    assert learned(folder) == learned(whole)
    for tag in ("train/ne", "lr/dense", "eval/ne", "tower/mask/grad_norm"):
        assert curve(folder, tag) == curve(whole, tag), tag
    assert [step for step, _ in curve(folder, "train/ne")] == list(range(1, 37))
    assert [row["step"] for row in rows(folder)] == list(range(1, 37))


def test_eval_command_gives_the_runs_numbers(checkout: Path, tmp_path: Path) -> None:
    call(checkout, tmp_path, "train.py", "--config", "ctr_erase.yaml", "run.name=r", "eval.scores=true", *SMALL)
    folder = tmp_path / "runs" / "r"
    printed = call(
        checkout, tmp_path, "eval", "--checkpoint", str(folder), "--json", "eval.local_batch_size=333"
    ).stdout
    report = json.loads(printed)
    for name, metrics in summary(folder)["towers"].items():
        assert metrics.pop("grad_norm") > 0, "of training"
        assert report["towers"][name].pop("grad_norm") is None
        assert report["towers"][name] == pytest.approx(metrics), name
    for name, value in summary(folder)["eval"].items():
        assert report["eval"][name] == pytest.approx(value, rel=1e-6), name
    scores = pq.read_table(folder / "scores.parquet").to_pandas()
    assert report["eval"]["auc"] == pytest.approx(roc_auc_score(scores["label"], scores["prediction"]), abs=1e-9)
    assert report["eval"]["logloss"] == pytest.approx(log_loss(scores["label"], scores["prediction"]), rel=1e-5)


def test_mistakes_end_with_one_message_and_code_2(checkout: Path, tmp_path: Path) -> None:
    result = call(
        checkout,
        tmp_path,
        "train.py",
        "--config",
        "ctr_erase.yaml",
        "towers.cross.loss.wieght=1",
        "train.local_batch_size=yes",
        expect=2,
    )
    assert "towers.cross.loss.wieght" in result.stderr
    assert "'weight'" in result.stderr
    assert "train.local_batch_size" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()
    assert "--config" in call(checkout, tmp_path, "train.py", expect=2).stderr


def test_an_error_leaves_the_scalars_and_a_summary(checkout: Path, tmp_path: Path) -> None:
    """A learning rate that blows up: step, loss and rows are named, what was logged is kept."""
    result = call(
        checkout,
        tmp_path,
        "train.py",
        "--config",
        "ctr_erase.yaml",
        "run.name=r",
        *SMALL,
        "train.log_every_steps=1",
        "optimizer.dense={kind: sgd, lr: 1e30}",
        expect=2,
    )
    assert "nan or infinite" in result.stderr
    folder = tmp_path / "runs" / "r"
    assert summary(folder)["status"] == "failed"
    assert curve(folder, "lr/dense")[0][0] == 1


def test_interrupt_leaves_every_finished_step(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    arguments = ["--config", "ctr_erase.yaml", "run.name=r", *SMALL, "train.epochs=200", "train.log_every_steps=1"]
    with warm_process.started(tmp_path, typed(checkout, ["train.py", *arguments]), tmp_path) as running:
        limit = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text()) < 2000:
            assert running.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
    result = summary(folder)
    assert result["status"] == "interrupted"
    assert [step for step, _ in curve(folder, "train/ne")][-1] in {
        result["train"]["steps"],
        result["train"]["steps"] - 1,
    }


def test_help_and_version(checkout: Path, tmp_path: Path) -> None:
    for command in ([], ["train"], ["eval"], ["fetch"], ["bench"]):
        assert "Usage" in call(checkout, tmp_path, *command, "--help").stdout
    assert call_cold(checkout, tmp_path, "--version").stdout.startswith("erase-rec ")


def test_runs_from_any_folder_beside_a_stray_data_folder(checkout: Path, tmp_path: Path) -> None:
    """A folder named data in the current folder must not shadow the package."""
    (tmp_path / "data").mkdir()
    (tmp_path / "models").mkdir()
    call_cold(
        checkout,
        tmp_path,
        "train",
        "--config",
        "ctr_exact.yaml",
        "run.name=r",
        "train.epochs=null",
        "train.steps=2",
        *SMALL,
    )
    assert summary(tmp_path / "runs" / "r")["train"]["steps"] == 2
    assert os.listdir(tmp_path / "data") == []


def test_resuming_a_run_that_stopped_early_trains_no_further(checkout: Path, tmp_path: Path) -> None:
    """The checkpoint was made as patience ran out: resuming ends at the same step with the same summary."""
    stopping = ["train.epochs=6", "train.early_stopping={patience: 1, min_delta: 1}"]
    call(checkout, tmp_path, "train.py", "--config", "ctr_erase.yaml", "run.name=r", *SMALL, *stopping)
    folder = tmp_path / "runs" / "r"
    before = learned(folder)
    assert before["status"] == "stopped_early"
    assert before["train"]["steps"] == 24
    refused = call(checkout, tmp_path, "train.py", "--resume", str(folder), "run.name=other", expect=2)
    assert "run.name" in refused.stderr
    call(checkout, tmp_path, "train.py", "--resume", str(folder))
    assert learned(folder) == before
    unwritable = call(checkout, tmp_path, "eval", "--checkpoint", str(folder), "--scores", "no/file", expect=2)
    assert "--scores" in unwritable.stderr
    assert "Traceback" not in unwritable.stderr
