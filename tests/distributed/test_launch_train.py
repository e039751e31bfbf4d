"""``torchrun --nproc-per-node N train.py``: whole runs on several ranks, their resumption, their end by failure.

Where torchrun is not what is tested, ranks are warm processes with its environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_process

from erase_rec.checkpoint import CheckpointManager, load, stored_layout

pytestmark = pytest.mark.timeout(300)

ROWS = 601
"""With steps of 60 rows: ten full steps, and one row over, which two and three ranks drop and one does not."""
SMALL = [
    "data.params={rows: 601, eval_rows: 301}",
    "embedding.backend=torch",
    "train.threads=1",
    "train.log_every_steps=5",
    "eval.local_batch_size=50",
    "distributed.check_every=3",
    "run.name=r",
]


def steps(count: int) -> list[str]:
    return ["train.epochs=null", f"train.steps={count}"]


def fails_under_torchrun(folder: Path, program: Path, *arguments: str) -> Any:
    """Two ranks that torchrun starts, and sees end by a failure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    return result


def run(folder: Path, program: Path, ranks: int, *arguments: str, expect: int = 0) -> Any:
    return warm_process.run(folder, str(program), *arguments, ranks=ranks, expect=expect)


def overridden(ranks: int, *overrides: str) -> list[str]:
    """Arguments of small runs; the last of a key counts."""
    given = [*SMALL, f"train.local_batch_size={60 // ranks}", *overrides]
    settings = dict(each.split("=", 1) for each in given)
    return ["--config", "ctr_erase.yaml", *(f"{key}={value}" for key, value in settings.items())]


def start(checkout: Path, folder: Path, ranks: int, *overrides: str, expect: int = 0) -> Any:
    folder.mkdir(exist_ok=True)
    return run(folder, checkout / "train.py", ranks, *overridden(ranks, *overrides), expect=expect)


def summary(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "runs" / "r" / "summary.json").read_text())
    return loaded


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint."""
    path, _ = CheckpointManager(folder / "runs" / "r" / "checkpoints", keep=2).latest()
    assert path is not None
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, held)
    return held


def test_ranks_train_as_one_process_does(checkout: Path, tmp_path: Path) -> None:
    alone = tmp_path / "1"
    start(checkout, alone, 1, *steps(10))
    expected = tensors(alone)
    for ranks in (2, 3):
        folder = tmp_path / str(ranks)
        result = start(checkout, folder, ranks)
        said = result.stdout
        assert said.count("run folder") == 1, "one rank speaks"
        assert f"{ranks} ranks; a step is 60 rows, {60 // ranks} a rank" in said
        assert "1 of the training rows, others in each epoch, are left out" in said
        assert [path.name for path in (folder / "runs").iterdir()] == ["r"]
        found = summary(folder)
        assert found["status"] == "completed"
        assert found["train"]["steps"] == 10
        assert found["train"]["rows"] == 600
        assert found["eval"]["rows"] == 301
        assert found["throughput"]["global_batch_size"] == 60
        assert found["throughput"]["ranks"] == ranks
        for name, value in tensors(folder).items():
            if name.startswith(("model/", "tables/")):
                # float32 sums of the same gradients in another order, through ten steps of Adam.
                assert torch.allclose(value, expected[name], rtol=1e-3, atol=2e-5), name
        assert found["train"]["ne"] == pytest.approx(summary(alone)["train"]["ne"], rel=1e-5)
        assert found["eval"]["ne"] == pytest.approx(summary(alone)["eval"]["ne"], rel=1e-4)


def test_a_resumed_run_goes_on_bit_for_bit(checkout: Path, tmp_path: Path) -> None:
    of_a_rank = ["over_arch.dropout=0.2", "towers.deep.params.batch_norm=true"]  # draws and statistics of its own
    given = [*of_a_rank, "train.checkpoint_every_steps=3", "train.eval_every_steps=4"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start(checkout, whole, 2, *given, *steps(12))
    start(checkout, cut, 2, *given, *steps(5))  # where a window ends, between two checkpoints
    workers = "data.workers=2"  # no batch depends on them
    run(cut, checkout / "train.py", 2, "--resume", "runs/r", "train.steps=12", workers)
    expected, found = tensors(whole), tensors(cut)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert expected["rng/cpu"].shape[0] == 2
    assert not torch.equal(expected["rng/cpu"][0], expected["rng/cpu"][1]), "ranks draw different numbers"
    for key in ("eval", "train", "towers"):
        assert summary(whole)[key] == summary(cut)[key]


def test_the_end_of_an_epoch_fits_any_number_of_ranks(checkout: Path, tmp_path: Path) -> None:
    start(checkout, tmp_path, 2)
    result = run(tmp_path, checkout / "train.py", 3, "--resume", "runs/r", "train.epochs=2")
    assert "resuming from runs/r/checkpoints/step_00000010" in result.stdout
    found = summary(tmp_path)
    # A step of three ranks is 90 rows: six full steps and one of 60 after the ten of two ranks.
    assert found["train"]["steps"] == 17
    assert found["train"]["rows"] == 1200
    run(tmp_path, checkout / "train.py", 1, "--resume", "runs/r", "train.epochs=3")
    assert summary(tmp_path)["train"]["steps"] == 17 + 21
    assert summary(tmp_path)["train"]["rows"] == 1200 + 601


AUDITED = """
import os, sys
sys.path.insert(0, {checkout!r})
from erase_rec.training_loop import TrainingLoop

def noted(self, batch):
    train_on(self, batch)
    with open("rows-" + os.environ.get("RANK", "0") + ".txt", "a") as file:
        print(self.position.epoch, *batch.row_ids.tolist(), file=file)

train_on = TrainingLoop._train_on
TrainingLoop._train_on = noted
import train
train.run(train.app)
"""


def test_an_epoch_goes_on_with_another_number_of_ranks(checkout: Path, tmp_path: Path) -> None:
    """Two ranks, then one, then three take the rows of one epoch: each row once, but one that three cannot share."""
    program = tmp_path / "audited.py"
    program.write_text(AUDITED.format(checkout=str(checkout)))
    run(tmp_path, program, 2, *overridden(2, *steps(5)))  # 300 rows
    run(tmp_path, program, 1, "--resume", "runs/r", "train.steps=9")  # 120 more
    result = run(tmp_path, program, 3, "--resume", "runs/r", "train.steps=12")  # 90 + 90, and 90 of the next epoch
    assert "1 of the rows that are left of epoch 1 are left out of it" in result.stdout
    lines = [line.split() for path in tmp_path.glob("rows-*.txt") for line in path.read_text().splitlines()]
    trained = {epoch: [row for line in lines if line[0] == epoch for row in line[1:]] for epoch in ("0", "1")}
    assert len(trained["0"]) == len(set(trained["0"])) == 600
    assert len(trained["1"]) == len(set(trained["1"])) == 90
    assert summary(tmp_path)["train"]["rows"] == 690
    assert summary(tmp_path)["train"]["steps"] == 12


FAILING = """
import os, sys
sys.path.insert(0, {checkout!r})
from models.towers import dcn_v2

def fail(self, dense, sparse):
    self.calls = getattr(self, "calls", 0) + 1
    if os.environ["RANK"] == "1" and self.calls > 5:  # the audit of the first batch calls it twice, then three steps do
        raise ValueError("planted")
    return forward(self, dense, sparse)

forward = dcn_v2.DCNv2Tower.forward
dcn_v2.DCNv2Tower.forward = fail
import train
train.run(train.app)
"""


def test_a_tower_that_raises_on_one_rank_ends_all(checkout: Path, tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING.format(checkout=str(checkout)))
    result = fails_under_torchrun(tmp_path, program, *overridden(2))
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: rank 1: ValueError: planted (in forward of tower cross)"]
    assert summary(tmp_path)["status"] == "failed"
    assert summary(tmp_path)["train"]["steps"] == 3


SKIPPING = """
import os, sys
sys.path.insert(0, {checkout!r})
from erase_rec.distributed.world import World

def mean_or_not(self, group, tensor):
    skipped = os.environ["RANK"] == "1" and self.collectives.step == 4 and group == "mask.0"
    return mean(self, group, tensor.clone() if skipped else tensor)

mean = World.mean
World.mean = mean_or_not
import train
train.run(train.app)
"""


@pytest.mark.parametrize(("check_every", "seen_at"), [(3, 6), (100, 8)])
def test_a_rank_that_skips_one_reduction_is_found(
    checkout: Path, tmp_path: Path, check_every: int, seen_at: int
) -> None:
    """At the next comparison, or at the end of a run that is too short for one."""
    program = tmp_path / "skipping.py"
    program.write_text(SKIPPING.format(checkout=str(checkout)))
    arguments = overridden(2, *steps(8), f"distributed.check_every={check_every}")
    result = run(tmp_path, program, 2, *arguments, expect=1)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"step {seen_at}: the ranks' parameters differ: tower mask (rank 0 | rank 1)" in errors[0]


def test_a_loss_that_is_not_finite_ends_all_ranks_with_code_2(checkout: Path, tmp_path: Path) -> None:
    result = fails_under_torchrun(tmp_path, checkout / "train.py", *overridden(2, "optimizer.dense.lr=1e30"))
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "nan or infinite on the rows" in errors[0]
    assert "exitcode  : 2 " in result.stderr
    assert '/train.py", line' not in result.stderr, "a user's mistake needs no traceback"
    assert summary(tmp_path)["status"] == "failed"


def test_a_mistake_in_the_data_is_said_once(checkout: Path, tmp_path: Path) -> None:
    result = start(checkout, tmp_path, 3, "data.params={rows: 2, eval_rows: 5}", expect=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "data.train: 2 rows cannot be shared by 3 ranks" in errors[0]
    assert not (tmp_path / "runs").exists()


def test_evaluation_runs_on_several_ranks(checkout: Path, tmp_path: Path) -> None:
    start(checkout, tmp_path, 2, "eval.scores=true")
    command = ["-m", "erase_rec", "eval", "--checkpoint", "runs/r", "--json"]
    expected, found = (json.loads(warm_process.run(tmp_path, *command, ranks=ranks).stdout) for ranks in (1, 3))
    assert found["eval"]["rows"] == expected["eval"]["rows"] == 301
    assert found["eval"]["auc"] == expected["eval"]["auc"] == summary(tmp_path)["eval"]["auc"]
