"""``erase-rec train`` and ``train.py``: the main job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loads torch, which the command line does only after it was checked
    from erase_rec.api.run import Run


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as train.steps=200 towers.cross.loss.weight=0.5.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A YAML file, looked up here and in the checkout's configs/.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue the run of this folder from its last checkpoint.")
    ] = None,
) -> None:
    """Train, evaluate, and write runs/ID/{config.yaml, metrics.jsonl, summary.json, events.*, checkpoints/}."""
    if (config is None) == (resume is None):
        raise UserError("give --config FILE to start a run, or --resume RUN_FOLDER to continue one")
    from erase_rec import Config, Trainer
    from erase_rec.distributed.failure import INTERRUPTED
    from erase_rec.distributed.stop import Stopped

    try:
        if resume is not None:
            trainer = Trainer.resume(resume, overrides or [])
        else:
            assert config is not None
            trainer = Trainer(Config.from_yaml(config, overrides or []))
        trainer.fit()
    except Stopped as told:
        raise typer.Exit(told.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if trainer.run.is_first:
        _conclude(trainer.run)


def _conclude(run: Run) -> None:
    """The result, for people."""
    from rich.console import Console

    from erase_rec.checkpoint import LAST_FILE, CheckpointManager
    from erase_rec.text_table import table_console

    assert run.folder is not None
    assert run.summary is not None
    summary = run.summary
    console = Console()
    if run.overlap is not None and run.overlap.overlap_share >= 0.005:
        for table in run.overlap.tables():
            table_console().print(table.rich())
    elif run.overlap is not None and run.overlap.towers:
        console.print(
            "early backward: nothing ran beside anything here; on a GPU, or with dispatch: non_blocking, it may"
        )
    console.print(summary.table())
    if run.bayes_ne is not None and not math.isnan(summary.eval.ne):
        console.print(
            f"irreducible NE of these held-out rows {run.bayes_ne:.4f}; the model is at {summary.eval.ne:.4f}, "
            f"{100 * (summary.eval.ne / run.bayes_ne - 1):.2f} % above it"
        )
    best = CheckpointManager(run.folder.checkpoints, keep=1).best()
    if best is not None and best.name != (run.folder.checkpoints / LAST_FILE).read_text(encoding="utf-8"):
        console.print(
            "the table is of the last step; eval, predict and export use the best checkpoint, "
            f"step {int(best.name.removeprefix('step_'))}",
            soft_wrap=True,
        )
    console.print(f"summary: {run.folder.path / 'summary.json'}", soft_wrap=True)
