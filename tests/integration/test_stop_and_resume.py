"""A lone process that is told to stop writes a checkpoint between two steps, and goes on bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from erase_rec import Config, Trainer
from erase_rec.batch import Batch
from erase_rec.checkpoint import CheckpointManager, load, read_state, stored_layout
from erase_rec.distributed.stop import Stopped
from erase_rec.training_loop import TrainingLoop

SMALL = (
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [8], out_dim: 4}}]",
    "embedding={dim: 4, backend: torch}",
    "over_arch={hidden: [4], dropout: 0.1}",
    "data.params={rows: 240, eval_rows: 120}",
    "train.local_batch_size=20",
    "train.epochs=2",
    "train.threads=1",
    "train.device=cpu",
    "eval.local_batch_size=20",
)


def config(folder: Path, *overrides: str) -> Config:
    return Config.from_yaml("ctr_erase.yaml", [*SMALL, f"run.dir={folder}", *overrides])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path, _ = CheckpointManager(folder / "checkpoints", keep=1).latest()
    assert path is not None
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, held)
    return held


def told(monkeypatch: pytest.MonkeyPatch, *, step: int | None = None, held_out: int | None = None) -> None:
    """Lets the process be told in a step, from 0, or when it has scored so many held-out batches."""
    train_on, batches = TrainingLoop._train_on, TrainingLoop._held_out
    scored = 0

    def trained(loop: TrainingLoop, batch: Batch) -> None:
        if loop.position.step == step:
            signal.raise_signal(signal.SIGTERM)
        train_on(loop, batch)

    def evaluated(loop: TrainingLoop) -> Generator[Batch]:
        nonlocal scored
        for batch in batches(loop):
            yield batch
            scored += 1
            if scored == held_out:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingLoop, "_train_on", trained)
    monkeypatch.setattr(TrainingLoop, "_held_out", evaluated)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = Trainer(config(tmp_path_factory.mktemp("whole")), progress=False)
    trainer.fit()
    return trainer


# Evaluations come after steps 12 and 24, with six batches each.
@pytest.mark.parametrize(
    ("place", "stopped_at", "evaluation_is_due", "override"),
    [
        ({"step": 6}, 7, False, "train.checkpoint_async=false"),
        ({"step": 6}, 7, False, "train.checkpoint_async=true"),
        ({"held_out": 3}, 12, True, "train.checkpoint_async=false"),
        ({"held_out": 9}, 24, True, "train.checkpoint_async=true"),
    ],
)
def test_a_stopped_run_goes_on(
    whole: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: dict[str, Any],
    stopped_at: int,
    evaluation_is_due: bool,
    override: str,
) -> None:
    trainer = Trainer(config(tmp_path, override), progress=False)
    with monkeypatch.context() as patch:
        told(patch, **place)
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            trainer.fit()
    newest, _ = CheckpointManager(trainer.folder / "checkpoints", keep=1).latest()
    assert newest is not None
    assert newest.name == f"step_{stopped_at:08d}"
    assert read_state(newest)["evaluation_is_due"] == evaluation_is_due
    assert trainer.summary.status == "interrupted"
    assert trainer.summary.train.steps == stopped_at

    resumed = Trainer.resume(trainer.folder, progress=False)
    resumed.fit()
    assert resumed.summary.model_dump(exclude={"throughput"}) == whole.summary.model_dump(exclude={"throughput"})
    expected, found = tensors(whole.folder), tensors(resumed.folder)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    history = resumed.history
    assert history.index.is_unique
    assert list(history["eval/ne"].dropna()) == list(whole.history["eval/ne"].dropna())
