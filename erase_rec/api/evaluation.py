"""Held-out rows scored with a checkpoint: what ``Trainer.evaluate`` and ``erase-rec eval`` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import torch

from data.dataset import bad_row_remarks, build_eval, load_features
from data.frames import FrameSource
from erase_rec.api.assembly import ContentCatalog, join_ranks, scorer, trained_model
from erase_rec.api.base_rate import base_rate_of_run
from erase_rec.config.load import load_config
from erase_rec.errors import UserError
from erase_rec.health import tower_warnings
from erase_rec.run_folder import RunFolder
from erase_rec.summary import Evaluation, summarize_eval
from eval.evaluator import PooledEvaluator

OTHER_ROWS = ("data.eval=", "data.eval_fraction=")
CHANGEABLE = (*OTHER_ROWS, "data.workers=", "eval.", "train.device=", "train.threads=", "embedding.backend=")
"""Overrides that leave model and transforms as they were trained."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and what belongs to it.

    Attributes:
        evaluation: metrics of the model and of each tower.
        scores: label and predictions of each row, where they were kept.
        remarks: what a user should know of the rows, a line each.
        is_first: whether this is the first rank, which speaks for all.
    """

    evaluation: Evaluation
    scores: pa.Table | None
    remarks: Sequence[str]
    is_first: bool


def evaluate(
    checkpoint: Path,
    overrides: Sequence[str] = (),
    *,
    train: pd.DataFrame | None = None,
    eval: pd.DataFrame | None = None,
    keep_scores: bool = False,
    ablate: bool = False,
) -> Evaluated:
    """Scores rows with a checkpoint, with its run's transforms and vocabularies; of a run folder with the best one.

    Args:
        checkpoint: a checkpoint, or a run folder.
        overrides: ``key=value`` texts that leave the model as it is, such as ``data.eval=PATH``.
        train: the DataFrame of a run that held out some of its rows.
        eval: rows to evaluate; None: those that the run held out.
        keep_scores: also return label and predictions of each row.
        ablate: also say the model's NE without each tower.

    Raises:
        UserError: an override would change the model, or there is no whole checkpoint, or the rows cannot be read.
    """
    for change in overrides:
        if not change.startswith(CHANGEABLE):
            raise UserError(f"eval: {change.partition('=')[0]} is fixed by the checkpoint; start a run to change it")
    folder = RunFolder.of_checkpoint(checkpoint)
    changes = list(overrides)
    if eval is not None or any(change.startswith(OTHER_ROWS) for change in changes):
        changes.append("data.prepared=null")  # the rows are no longer those of the run's prepared folder
    config = load_config(folder.config, changes, catalog=ContentCatalog()).config
    rate = base_rate_of_run(config, load_config(folder.config, catalog=ContentCatalog()).config, folder)
    with join_ranks(config) as (world, machine):
        features = load_features(folder.features)
        held_out = build_eval(
            config,
            features,
            rank=world.rank,
            world_size=world.size,
            pin=machine.pins,
            train_source=None if train is None else FrameSource(train),
            eval_source=None if eval is None else FrameSource(eval, split="eval"),
        )
        model = trained_model(config, features.table_rows, folder.checkpoint(checkpoint), machine)
        with torch.no_grad():
            result = PooledEvaluator(model.tower_names(), world, lambda: rate).evaluate(
                scorer(model, machine, terms=True, ablate=ablate), held_out.loader.batches(0), keep_scores=keep_scores
            )
        model.embeddings.verify()
    evaluation, towers = summarize_eval(result)
    remarks = [*held_out.unseen_remarks(), *bad_row_remarks(held_out.bad_rows)]
    remarks += [f"warning: {sentence}" for sentence in tower_warnings(result)]
    return Evaluated(Evaluation(eval=evaluation, towers=towers), result.scores, remarks, world.is_first)
