"""Callbacks of a run on two ranks: the first rank calls them, all stop at one step, and one that raises ends all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

YAML = """
data: {kind: synthetic, params: {rows: 601, eval_rows: 101, dense: 1, sparse: 2}}
features: {dense: [I1], sparse_defaults: {num_embeddings: 50}, sparse: [C1, C2]}
embedding: {backend: torch, dim: 4}
towers: [{name: deep, kind: mlp, params: {hidden: [8]}, loss: {kind: bce}}]
schedule: {preset: erase}
train: {steps: 20, local_batch_size: 30, device: cpu, threads: 1, log_every_steps: 5}
run: {name: r}
"""
PROGRAM = """
import os, sys
sys.path.insert(0, {checkout!r})
from erase_rec import Callback, Config, Trainer

def say(*words):
    # In one piece: both ranks write into one pipe.
    os.write(1, (" ".join(map(str, ("rank", os.environ["RANK"], *words))) + "\\n").encode())

class Stop(Callback):
    def on_step(self, run):
        say("step", run.step)
        if run.step == 7:
            {act}

if __name__ == "__main__":
    found = Trainer(Config.from_yaml({config!r}), callbacks=[Stop()], progress=False).fit()
    say("ended", found.status, found.train.steps)
"""


def torchrun(checkout: Path, folder: Path, act: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    (folder / "config.yaml").write_text(YAML)
    program.write_text(PROGRAM.format(checkout=str(checkout), config=str(folder / "config.yaml"), act=act))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def test_a_stop_takes_effect_on_all_ranks_at_the_next_logged_step(checkout: Path, tmp_path: Path) -> None:
    result = torchrun(checkout, tmp_path, "run.stop('enough')")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rank 0 ended stopped_early 10" in result.stdout
    assert "rank 1 ended stopped_early 10" in result.stdout
    assert "rank 0 step 10" in result.stdout
    assert "rank 1 step" not in result.stdout


def test_a_callback_that_raises_ends_all_ranks_and_is_named(checkout: Path, tmp_path: Path) -> None:
    result = torchrun(checkout, tmp_path, "raise ZeroDivisionError('mine')")
    assert result.returncode != 0
    assert "error: rank 0: callback Stop.on_step raised ZeroDivisionError at step 7: mine; the run" in result.stderr
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["status"] == "failed"
