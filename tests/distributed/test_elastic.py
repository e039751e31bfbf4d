"""torchrun starts ranks again: the run goes on by itself, also on fewer ranks; no row is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_cases import faults
from in_process import call

from erase_rec.distributed.launch import Job

pytestmark = pytest.mark.timeout(900)

VARIANT = next(iter(faults.VARIANTS))
FAST = (
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [8], out_dim: 4}}]",
    "embedding={dim: 4, backend: torch}",
    "over_arch={hidden: [4]}",
    "data.params={rows: 120, eval_rows: 60}",
    "train.local_batch_size=20",
    "train.threads=1",
    "train.device=cpu",
    "run.name=r",
)


@contextmanager
def torchrun(folder: Path, *options: str, fault: dict[str, Any] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A launcher of the fault suite's run ``r``; its processes are killed at the end."""
    files = ("data.train=rows/train-00000.csv", "data.eval=rows/eval.csv", "run.name=r", "distributed.timeout_s=120")
    settings = (*faults.SETTINGS, *faults.VARIANTS[VARIANT], *files)
    program = str(faults.CHECKOUT / "benchmarks" / "faults_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", *options, program, "record", faults.ID]
    environment = os.environ | ({} if fault is None else {faults.FAULT: json.dumps(fault)})
    process = subprocess.Popen(
        [*command, "--config", "ctr_criteo.yaml", *settings],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        for each in tree(process):
            each.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A process that runs and its descendants, eldest first."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_for_step(folder: Path, step: int, *launchers: subprocess.Popen[str]) -> None:
    log, limit = folder / "runs" / "r" / "metrics.jsonl", time.monotonic() + 240
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert all(launcher.poll() is None for launcher in launchers), launchers[0].communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_torchrun_restarts_a_killed_run(tmp_path: Path) -> None:
    suite = faults.Suite(tmp_path)
    expected = suite.whole(VARIANT)
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    with torchrun(tmp_path, *options, fault={"kind": "kill", "rank": 1, "step": 10}) as process:
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert "resuming from runs/r/checkpoints/step_00000008" in said
    assert faults.audit([tmp_path / "record-0", tmp_path / "record-1"]) == []
    assert faults.differences(suite.result("r"), expected) == []


def test_a_run_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """One of two launchers is lost with its rank."""
    faults.Suite(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-id", "job"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
    )
    # The one that stays holds the meeting place. Started together they meet, however long a start takes.
    place, meeting = "--rdzv-conf", "last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    with (
        torchrun(tmp_path, *options, place, f"{meeting}true") as stays,
        torchrun(tmp_path, *options, place, f"{meeting}false") as lost,
    ):
        wait_for_step(tmp_path, 10, stays, lost)
        for each in tree(lost):
            each.send_signal(signal.SIGKILL)
        said, _ = stays.communicate(timeout=400)
    assert stays.returncode == 0, said
    assert (tmp_path / "record-0-1").exists(), "there were two"
    assert "resuming from runs/r/checkpoints/step_" in said
    assert faults.audit([tmp_path / "record-0", tmp_path / "record-1"]) == []
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["throughput"]["ranks"] == 1
    assert summary["train"]["rows"] == faults.EPOCHS * faults.ROWS


def test_what_torchrun_says_of_the_job() -> None:
    assert Job.read({}) == Job(None, 0, may_restart=False)
    given = {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert Job.read(given) == Job("job7", 2, may_restart=True)
    assert Job.read({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0"}) == Job()


def test_the_same_job_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*overrides: str, expect: int = 0) -> str:
        ended = call(tmp_path, "train", "--config", "ctr_erase.yaml", *FAST, *overrides, expect=expect)
        return ended.stdout + ended.stderr

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    assert "resuming" not in start("train.epochs=1")
    assert "resuming from runs/r/checkpoints/step_00000006" in start("train.epochs=1")
    said = start("train.epochs=1", "optimizer.dense.lr=0.5", expect=2)
    assert "runs/r was made by this job with another configuration" in said
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    assert "run.name: runs/r exists" in start("train.epochs=1", expect=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # which torchrun does after that refusal, too
    assert "run.name: runs/r exists" in start("train.epochs=1", expect=2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # restarts of a job without a name are all that is known of it
    assert "resuming from runs/r/checkpoints/step_00000006" in start("train.epochs=1")


def test_a_restart_that_could_not_find_its_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ended = call(tmp_path, "train", "--config", "ctr_erase.yaml", *FAST[:-1], expect=2)
    assert "run.name: ranks that torchrun --max-restarts starts again find their run by its name" in ended.stderr
    assert not (tmp_path / "runs").exists()
