"""Runs of ``configs/table1``: a row alone and on two ranks, and what it trained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from erase_rec.checkpoint import CheckpointManager, load, stored_layout
from erase_rec.cli import train

CHECKOUT = Path(__file__).parents[2]
ROWS = sorted(path.stem for path in (CHECKOUT / "configs" / "table1").glob("*.yaml"))


@dataclass(frozen=True)
class Setting:
    """Where and how long the rows run."""

    device: str
    steps: int
    global_batch_size: int

    def arguments(self, row: str, folder: Path, ranks: int) -> list[str]:
        """Of ``train.py``; the replicas are compared after every step."""
        return [
            "--config",
            f"table1/{row}.yaml",
            f"data.params={{rows: {self.steps * self.global_batch_size}, eval_rows: 200}}",
            f"train.device={self.device}",
            "train.threads=1",
            "train.epochs=null",
            f"train.steps={self.steps}",
            "distributed.check_every=1",
            "optimizer.lr_schedule.warmup_steps=0",
            # Adam and Adagrad divide by the size of the gradient: one near zero would show its rounding in full.
            "optimizer.dense.kind=sgd",
            "optimizer.dense.lr=0.1",
            "optimizer.sparse.kind=sgd",
            "optimizer.sparse.lr=0.5",
            f"train.local_batch_size={self.global_batch_size // ranks}",
            f"run.dir={folder}",
            f"run.name={ranks}",
            *(["embedding.backend=torch"] if self.device == "cpu" else []),
        ]

    def run_here(self, row: str, folder: Path, ranks: int) -> str:
        """In this process, which is the only one or one of ``ranks``; what it printed."""
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(train.command)
        result = CliRunner().invoke(app, self.arguments(row, folder, ranks), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return str(result.output)

    def run_on_ranks(self, row: str, folder: Path, ranks: int) -> str:
        """Under torchrun; everything that it printed."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, str(CHECKOUT / "train.py"), *self.arguments(row, folder, ranks)]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[str]:
    """Tensors that differ by more than ``tolerance``, relative or absolute, and by how much."""
    assert found.keys() == expected.keys()
    return [
        f"{name}: {float((found[name] - value).abs().max()):.2e} of {float(value.abs().max()):.2e}"
        for name, value in expected.items()
        if not torch.allclose(found[name], value, rtol=tolerance, atol=tolerance)
    ]


def trained(folder: Path) -> dict[str, Tensor]:
    """Parameters and tables of a run's last checkpoint."""
    path, _ = CheckpointManager(folder / "checkpoints", keep=2).latest()
    assert path is not None
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, held)
    return {name: value for name, value in held.items() if name.startswith(("model/", "tables/"))}
