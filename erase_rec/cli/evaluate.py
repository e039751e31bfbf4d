"""``erase-rec eval --checkpoint DIR``: scores held-out rows with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError


def command(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run folder (then its best checkpoint).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.eval=PATH.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write each row's label and predictions here.")] = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also say the model's NE without each tower.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a checkpoint, with its run's transforms and vocabularies, on the run's held-out rows or other files."""
    import pyarrow.parquet as pq
    from rich.console import Console

    from erase_rec.api.evaluation import evaluate

    found = evaluate(checkpoint, overrides or [], keep_scores=scores is not None, ablate=ablate)
    if not found.is_first:
        return
    for line in found.remarks:
        typer.echo(line, err=True)  # standard output holds the result alone
    if as_json:
        typer.echo(found.evaluation.model_dump_json(indent=2))
    else:
        Console().print(found.evaluation.table())
    if scores is not None:
        try:
            pq.write_table(found.scores, scores)
        except OSError as error:
            raise UserError(f"--scores: cannot write {scores}: {error.strerror or error}") from error
