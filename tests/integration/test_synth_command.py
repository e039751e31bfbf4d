"""``erase-rec synth`` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import Ended, call


def synth(cwd: Path, *arguments: str, expect: int = 0) -> Ended:
    return call(cwd, "synth", *arguments, expect=expect)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_files_and_their_summary(tmp_path: Path) -> None:
    said = synth(tmp_path, "--rows", "70_000", "--out", "log", "--files", "2", "--workers", "2").stdout
    assert names(tmp_path / "log") == ["eval.tsv", "synth.json", "train-00000.tsv", "train-00001.tsv"]
    summary = json.loads((tmp_path / "log" / "synth.json").read_text())
    assert (summary["train"]["rows"], summary["eval"]["rows"]) == (70_000, 7_000)
    assert "log/eval.tsv: 7,000 rows" in said
    assert f"{summary['eval']['bayes_ne']:.5f}" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id-column"], "error: --id-column: lines of the criteo format have 40 fields"),
        (["--files", "3"], "error: --files: 2000 rows are made in 1 blocks"),
        (["--rows", "0"], "--rows"),
        (["--format", "libsvm"], "libsvm"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path: Path, arguments: list[str], message: str) -> None:
    said = synth(tmp_path, "--rows", "2000", "--out", "log", *arguments, expect=2).stderr
    assert message in said
    assert "Traceback" not in said
    assert names(tmp_path) == []


def test_a_folder_in_use_needs_force(tmp_path: Path) -> None:
    synth(tmp_path, "--rows", "2000", "--out", "log")
    before = (tmp_path / "log" / "train-00000.tsv").read_bytes()
    said = synth(tmp_path, "--rows", "1000", "--out", "log", expect=2).stderr
    assert "error: --out log: the folder is not empty" in said
    assert (tmp_path / "log" / "train-00000.tsv").read_bytes() == before
    synth(tmp_path, "--rows", "1000", "--out", "log", "--format", "csv", "--force")
    assert names(tmp_path / "log") == ["eval.csv", "synth.json", "train-00000.csv"]


def test_an_interrupt_leaves_no_partial_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "erase_rec", "synth", "--rows", "50_000_000", "--out", "log", "--workers", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    partial = tmp_path / "log" / "train-00000.tsv.partial"
    give_up_s = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process gets it
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert names(tmp_path / "log") == []
