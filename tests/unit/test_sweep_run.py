"""The runner of a sweep, with a script in the place of training: failures, stops, kills, and what is left for later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from erase_rec.errors import UserError
from erase_rec.summary import DataSummary, EvalSummary, Summary, ThroughputSummary, TrainSummary
from erase_rec.sweep.lock import locked
from erase_rec.sweep.points import Point
from erase_rec.sweep.process import Launch, train_command
from erase_rec.sweep.record import PointRecord, SweepRecord
from erase_rec.sweep.view import Results, arm_table

ENDS_S = 60.0
"""Longest wait for what should take a second; the machine may be busy."""

# Stands in for `python -m erase_rec train`: notes that it was called, then does what the point's seed says.
STUB = """
import json, os, pathlib, sys, time
run, seed, mode = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
plan = json.loads((run.parent / "plan.json").read_text()).get(seed, "finish")
run.mkdir(exist_ok=True)
(run / "config.yaml").write_text("")
with (run.parent / "calls").open("a") as file:
    file.write(f"{seed} {mode} {os.getpid()}\\n")
if plan == "fail":
    print("a line before")
    sys.exit("error: planned\\nand a line behind")
if plan == "die":
    print("last words", flush=True)
    os.kill(os.getpid(), 9)
if plan == "wait":
    time.sleep(600)
if plan == "stubborn":
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (run / "deaf").touch()
    time.sleep(600)
if plan != "silent":
    (run / "summary.json").write_text((run.parent / "summary.json").read_text())
"""
# A sweep in a process of its own, as the command is; argument: jobs.
DRIVER = """
import sys
from pathlib import Path
from erase_rec.sweep import process, run
from erase_rec.sweep.lock import locked
from erase_rec.sweep.points import Point
from erase_rec.sweep.record import SweepRecord

def command(point, launch):
    folder = launch.folder / point.folder
    mode = "resumed" if (folder / "config.yaml").is_file() else "new"
    return [sys.executable, "-I", "-S", str(launch.folder / "stub.py"), str(folder), str(point.seed), mode]

class Quiet:
    def update(self, record):
        pass

process.train_command = command
run.GRACE_S = float(sys.argv[2])
points = [Point(f"p{seed}", "arm", seed, (f"seed={seed}",)) for seed in (1, 2, 3)]
record = SweepRecord.of(points, Path(), name="s", config="c.yaml", command="x")
with locked(Path()) as lock, run.noted_signals() as stop:
    launch = process.Launch(Path(), Path("c.yaml"), 1, lock)
    run.run_sweep(record, launch, jobs=int(sys.argv[1]), view=Quiet(), stop=stop)
assert "torch" not in sys.modules  # a sweep may wait for days beside its runs
sys.exit(128 + stop.signals[0] if stop.signals else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points").mkdir()
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "driver.py").write_text(DRIVER)
    summary(ne=0.9).write(tmp_path / "points")
    plan(tmp_path)
    return tmp_path


def summary(ne: float, **throughput: Any) -> Summary:
    return Summary(
        status="completed",
        eval=EvalSummary(ne=ne),
        throughput=ThroughputSummary(global_batch_size=1, **throughput),
        train=TrainSummary(steps=1, rows=1, ne=1.0),
        data=DataSummary(fingerprint="f", unseen_share=0.0),
    )


def plan(folder: Path, **seeds: str) -> None:
    """What the stub does for seeds ``s1``, ``s2``, ``s3``; the others finish."""
    (folder / "points" / "plan.json").write_text(json.dumps({key[1:]: value for key, value in seeds.items()}))


@contextmanager
def sweep(folder: Path, *, jobs: int = 1, grace_s: float = ENDS_S) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "driver.py", str(jobs), str(grace_s)], cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(folder: Path, *, jobs: int = 1) -> int:
    with sweep(folder, jobs=jobs) as process:
        return process.wait(ENDS_S)


def record(folder: Path) -> dict[int, dict[str, Any]]:
    points = json.loads((folder / "sweep.json").read_text())["points"]
    return {point["seed"]: point for point in points}


def states(folder: Path) -> list[tuple[str, str | None]]:
    return [(point["status"], point["reason"]) for point in record(folder).values()]


def calls(folder: Path) -> list[list[str]]:
    """Seed, mode and process of each start."""
    path = folder / "points" / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENDS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_points_run_in_their_order_and_are_skipped_later(folder: Path) -> None:
    assert run(folder) == 0
    assert states(folder) == [("finished", None)] * 3
    assert [call[:2] for call in calls(folder)] == [["1", "new"], ["2", "new"], ["3", "new"]]
    before = record(folder)
    assert run(folder) == 0
    assert len(calls(folder)) == 3
    assert record(folder) == before


def test_a_failure_keeps_its_reason_and_the_rest_goes_on(folder: Path) -> None:
    plan(folder, s1="fail", s2="die")
    assert run(folder) == 0
    assert states(folder) == [
        ("failed", "planned"),
        ("failed", "ended by SIGKILL; the log ends with: last words"),
        ("finished", None),
    ]
    plan(folder, s1="silent")
    assert run(folder) == 0  # failed points are tried again, and go on from what they have
    assert states(folder) == [
        ("failed", "ended without a summary; the log ends with: nothing was printed"),
        ("finished", None),
        ("finished", None),
    ]
    assert [call[:2] for call in calls(folder)[3:]] == [["1", "resumed"], ["2", "resumed"]]
    log = (folder / "points" / "p1.log").read_text()
    assert log.count("$ ") == 2  # both attempts
    assert "a line before" in log


def test_points_that_never_ran_go_before_those_that_failed(folder: Path) -> None:
    plan(folder, s1="fail", s2="wait")
    with sweep(folder) as process:
        wait_for(lambda: len(calls(folder)) == 2)
        process.send_signal(signal.SIGTERM)
        process.wait(ENDS_S)
    plan(folder)
    assert run(folder) == 0
    assert [call[0] for call in calls(folder)] == ["1", "2", "2", "3", "1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_and_leaves_them_to_the_next_call(folder: Path, number: signal.Signals) -> None:
    plan(folder, s2="wait", s3="wait")
    with sweep(folder, jobs=2) as process:
        wait_for(lambda: len(calls(folder)) == 3)
        process.send_signal(number)
        assert process.wait(ENDS_S) == 128 + number
    assert states(folder) == [("finished", None), ("pending", None), ("pending", None)]
    assert all(gone(pid) for _, _, pid in calls(folder))
    plan(folder)
    assert run(folder, jobs=2) == 0
    assert states(folder) == [("finished", None)] * 3


def test_a_run_that_does_not_listen_is_killed(folder: Path) -> None:
    plan(folder, s1="stubborn")
    with sweep(folder, grace_s=0.2) as process:
        wait_for((folder / "points" / "p1" / "deaf").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(ENDS_S) == 130
    assert all(gone(pid) for _, _, pid in calls(folder))


def test_a_second_signal_does_not_wait(folder: Path) -> None:
    plan(folder, s1="stubborn")
    with sweep(folder, grace_s=600) as process:
        wait_for((folder / "points" / "p1" / "deaf").exists)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # two signals at once would be one
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_S) == 130


def test_no_run_outlives_a_sweep_that_is_killed(folder: Path) -> None:
    """Nobody could see it go on; the next call waits for its end, since both would write into one folder."""
    plan(folder, s1="wait")
    with sweep(folder) as process:
        wait_for(lambda: len(calls(folder)) == 1)
        process.kill()
        process.wait()
    assert states(folder)[0] == ("running", None)
    plan(folder)
    assert run(folder) == 0
    assert gone(calls(folder)[0][2])
    assert [call[:2] for call in calls(folder)] == [["1", "new"], ["1", "resumed"], ["2", "new"], ["3", "new"]]
    assert states(folder) == [("finished", None)] * 3


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match=rf"process {os.getpid()} runs this sweep"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_what_a_user_would_type(tmp_path: Path, ranks: int) -> None:
    point = PointRecord(id="p1", arm="a", seed=1, overrides=("x=1", "seed=1"), folder="points/p1")
    launch = Launch(tmp_path, Path("c.yaml"), ranks, lock=0)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module"]
    start = [sys.executable, "-m", *(torchrun if ranks == 2 else []), "erase_rec", "train"]
    placed = [f"run.dir={tmp_path / 'points'}", "run.name=p1"]
    assert train_command(point, launch) == [*start, "--config", "c.yaml", "x=1", "seed=1", *placed]
    (tmp_path / "points" / "p1").mkdir(parents=True)
    (tmp_path / "points" / "p1" / "config.yaml").touch()
    assert train_command(point, launch) == [*start, "--resume", str(tmp_path / "points" / "p1")]


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="no record of a sweep"):
        SweepRecord.read(tmp_path)


def test_the_table_has_an_arm_a_line_and_means_over_its_finished_seeds(tmp_path: Path) -> None:
    names: Sequence[tuple[str, str]] = [("a1", "A"), ("b1", "B"), ("a2", "A"), ("b2", "B"), ("a3", "A")]
    points = [Point(name, arm, int(name[1]), ()) for name, arm in names]
    for name, ne, qps in (("a1", 0.8, 100.0), ("a2", 0.9, 300.0), ("b1", float("nan"), 5000.0)):
        folder = tmp_path / "points" / name
        folder.mkdir(parents=True)
        summary(ne, qps_p90=qps).write(folder)
    state = SweepRecord.of(points, tmp_path, name="s", config="c", command="x")
    state.points[3].status = "failed"
    state.points[4].status = "running"
    assert arm_table(state, Results(tmp_path)).rows == (
        ("A", "2", "0", "1", "0", "0.85000", "200"),
        ("B", "1", "1", "0", "0", "-", "5,000"),
    )
