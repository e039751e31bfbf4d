"""``erase-rec eval --checkpoint DIR``: scores held-out rows with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run folder (then its best checkpoint).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as data.eval=PATH or eval.scores=true.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a checkpoint with its run's transforms and vocabularies, on the run's held-out rows or on other files."""
    from erase_rec.cli.assembly import evaluate_checkpoint  # loads torch

    report = evaluate_checkpoint(checkpoint, overrides or [])
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        report.print_table()
