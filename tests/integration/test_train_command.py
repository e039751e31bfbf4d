"""What ``erase-rec train`` says at its end."""

from __future__ import annotations

from pathlib import Path

from in_process import call

SMALL = (
    "data.params={rows: 600, eval_rows: 600}",
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [16], out_dim: 8}}]",
    "embedding={dim: 8, backend: torch}",
    "over_arch={hidden: [8]}",
    "train.local_batch_size=100",
    "train.threads=1",
    "train.device=cpu",
    "train.steps=60",
)
SAID = "eval, predict and export use the best checkpoint, step "


def test_an_earlier_best_checkpoint_is_named(tmp_path: Path) -> None:
    # Ten passes over 600 rows at this rate learn them by heart: held-out NE falls, then rises.
    ended = call(
        tmp_path, "train", "--config", "ctr_erase.yaml", *SMALL,
        "run.name=overfits", "optimizer.dense.lr=0.02", "train.eval_every_steps=6",
    )  # fmt: skip
    best = (tmp_path / "runs" / "overfits" / "checkpoints" / "best").read_text()
    assert best != "step_00000060"
    assert f"{SAID}{int(best.removeprefix('step_'))}\n" in ended.stdout


def test_nothing_is_said_where_the_last_checkpoint_is_the_best(tmp_path: Path) -> None:
    ended = call(
        tmp_path, "train", "--config", "ctr_erase.yaml", *SMALL, "run.name=r", "train.eval_every_steps=60"
    )  # fmt: skip
    assert "held-out metrics" in ended.stdout
    assert SAID not in ended.stdout
