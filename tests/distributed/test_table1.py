"""Every row of the paper's table, on two ranks under torchrun: trains what one process does with twice the batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from erase_rec.checkpoint import CheckpointManager, load, stored_layout
from erase_rec.cli import train
from erase_rec.cli.assembly import ContentCatalog
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.schedule.plan import Plan

ROWS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "table1").glob("*.yaml"))
STEPS, GLOBAL_BATCH_SIZE = 6, 100
SMALL = [
    "data.params={rows: 1000, eval_rows: 200}",
    "embedding.backend=torch",
    "train.device=cpu",
    "train.threads=1",
    "train.epochs=null",
    f"train.steps={STEPS}",
    "distributed.check_every=1",
    "optimizer.lr_schedule.warmup_steps=0",
    # Adam divides by the size of the gradient, so that a gradient near zero would show its rounding in full.
    "optimizer.dense.kind=sgd",
    "optimizer.dense.lr=0.1",
]
TOLERANCE = 1e-6
"""float32: sums over two halves of a batch are rounded in another order than over the whole; six steps of it."""


def arguments(row: str, folder: Path, ranks: int) -> list[str]:
    share = f"train.local_batch_size={GLOBAL_BATCH_SIZE // ranks}"
    return ["--config", f"table1/{row}.yaml", *SMALL, share, f"run.dir={folder}", f"run.name={ranks}"]


def run_alone(row: str, folder: Path) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(train.command)
    result = CliRunner().invoke(app, arguments(row, folder, 1), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def run_on_two(row: str, folder: Path, checkout: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(checkout / "train.py"), *arguments(row, folder, 2)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def trained(folder: Path) -> dict[str, Tensor]:
    """Parameters and tables of a run's last checkpoint."""
    path, _ = CheckpointManager(folder / "checkpoints", keep=2).latest()
    assert path is not None
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, held)
    return {name: value for name, value in held.items() if name.startswith(("model/", "tables/"))}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS)
def test_two_ranks_train_what_one_process_does(checkout: Path, tmp_path: Path, row: str) -> None:
    """The replicas are compared after every step; a rank whose parameters differ would end the run."""
    said = run_on_two(row, tmp_path, checkout)
    assert [path.name for path in tmp_path.iterdir()] == ["2"], "one rank writes"
    assert said.count("no CUDA graphs; the towers run uncaptured") == (1 if row in {"row1", "erase"} else 0)
    summary = json.loads((tmp_path / "2" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["train"]["steps"] == STEPS
    assert summary["train"]["rows"] == STEPS * GLOBAL_BATCH_SIZE
    assert summary["throughput"]["ranks"] == 2
    run_alone(row, tmp_path)
    found, expected = trained(tmp_path / "2"), trained(tmp_path / "1")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE), name


def loaded(row: str) -> Config:
    return load_config(f"table1/{row}.yaml", catalog=ContentCatalog()).config


def test_the_rows_differ_in_their_order_of_work_alone() -> None:
    """Data, model, batch and optimizers are the same; the exact arms have no local losses."""
    configs = {row: loaded(row) for row in ROWS}
    ordered = {"detach", "stream", "loss"}
    assert len(configs) == 8
    plain = configs["erase"].model_dump(exclude={"schedule", "distributed", "towers"})
    for row, config in configs.items():
        assert config.model_dump(exclude={"schedule", "distributed", "towers"}) == plain, row
        for tower, other in zip(config.towers, configs["erase"].towers, strict=True):
            assert tower.model_dump(exclude=ordered) == other.model_dump(exclude=ordered), (row, tower.name)
            assert tower.detach == (row not in {"baseline", "exact_streams"})
            assert tower.loss == (other.loss if tower.detach else None)


def test_each_row_is_what_the_paper_says() -> None:
    found = {
        row: (
            config.schedule.early_backward,
            config.schedule.dispatch,
            config.schedule.cuda_graph,
            config.distributed.reduction,
            config.distributed.find_unused_parameters,
        )
        for row, config in ((row, loaded(row)) for row in ROWS)
    }
    assert found == {
        "baseline": (False, "blocking", "none", "ddp", False),
        "row3": (True, "blocking", "none", "ddp", False),
        "row2": (True, "blocking", "none", "ddp", True),
        "row1": (True, "non_blocking", "tower", "ddp", False),
        "row0_nonblocking": (True, "non_blocking", "none", "ddp", True),
        "row0_blocking": (True, "blocking", "none", "ddp", True),
        "exact_streams": (False, "blocking", "none", None, None),
        "erase": (True, "blocking", "tower", None, None),
    }
    assert Plan.from_config(loaded("row0_blocking")) == Plan.from_config(loaded("row2"))
