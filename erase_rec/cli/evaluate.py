"""``erase-rec eval --checkpoint DIR``: scores held-out rows with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError

OTHER_ROWS = ("data.eval=", "data.eval_fraction=")
CHANGEABLE = (*OTHER_ROWS, "data.workers=", "eval.", "train.device=", "train.threads=", "embedding.backend=")
"""Overrides that leave model and transforms as they were trained."""


def command(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a run folder (then its best checkpoint).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.eval=PATH.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write each row's label and predictions here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a checkpoint, with its run's transforms and vocabularies, on the run's held-out rows or other files."""
    changes = overrides or []
    for change in changes:
        if not change.startswith(CHANGEABLE):
            raise UserError(f"eval: {change.partition('=')[0]} is fixed by the checkpoint; start a run to change it")
    import pyarrow.parquet as pq
    import torch
    from pydantic import BaseModel
    from rich.console import Console

    from data.dataset import bad_row_remarks, build_eval, load_features
    from erase_rec.api.assembly import ContentCatalog, join_ranks, scorer, trained_model
    from erase_rec.config.load import load_config
    from erase_rec.run_folder import RunFolder
    from erase_rec.summary import EvalSummary, TowerSummary, metrics_table, summarize_eval
    from eval.evaluator import PooledEvaluator

    class Report(BaseModel):
        """The part of ``summary.json`` that an evaluation can fill."""

        eval: EvalSummary
        towers: dict[str, TowerSummary]

    folder = RunFolder.of_checkpoint(checkpoint)
    if any(change.startswith(OTHER_ROWS) for change in changes):
        changes = [*changes, "data.prepared=null"]  # the rows are no longer those of the run's prepared folder
    config = load_config(str(folder.config), changes, catalog=ContentCatalog()).config
    with join_ranks(config) as (world, machine):
        features = load_features(folder.features)
        held_out = build_eval(config, features, rank=world.rank, world_size=world.size, pin=machine.pins)
        model = trained_model(config, features.table_rows, folder.checkpoint(checkpoint), machine)
        with torch.no_grad():
            result = PooledEvaluator(model.tower_names(), world).evaluate(
                scorer(model, machine), held_out.loader.batches(0), keep_scores=scores is not None
            )
        model.embeddings.verify()
        is_first = world.is_first
    if not is_first:
        return
    for line in (*held_out.unseen_remarks(), *bad_row_remarks(held_out.bad_rows)):
        typer.echo(line, err=True)  # standard output holds the result alone
    evaluation, towers = summarize_eval(result)
    if as_json:
        typer.echo(Report(eval=evaluation, towers=towers).model_dump_json(indent=2))
    else:
        Console().print(metrics_table(evaluation, towers))
    if scores is not None:
        try:
            pq.write_table(result.scores, scores)
        except OSError as error:
            raise UserError(f"--scores: cannot write {scores}: {error.strerror or error}") from error
