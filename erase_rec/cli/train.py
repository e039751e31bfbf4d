"""``erase-rec train`` and ``train.py``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError


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
    """Train a model, evaluate it and write runs/ID/{config.yaml, metrics.jsonl, summary.json, events.*, checkpoints/}."""
    if (config is None) == (resume is None):
        raise UserError("give --config FILE to start a run, or --resume RUN_FOLDER to continue one")
    from erase_rec.cli.assembly import start_run, resume_run  # loads torch, after the command line was checked

    if resume is not None:
        resume_run(resume, overrides or [])
    else:
        assert config is not None
        start_run(config, overrides or [])
