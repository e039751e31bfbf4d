"""How far a run has come, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass

from erase_rec.config.schema import TrainConfig
from erase_rec.protocols import BatchLoader


@dataclass
class Position:
    """How far training has come.

    Attributes:
        step: finished steps.
        epoch: running epoch, from 0.
        epoch_step: finished steps of it.
        rows: rows trained on, over all ranks.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    rows: int = 0


def planned_steps(train: TrainConfig, loader: BatchLoader, position: Position) -> int:
    """The step at which ``train`` ends a run that is at ``position``.

    ``samples`` ends with the batch that reaches them. The epochs before ``position`` may have had another number of
    steps, of another number of ranks.
    """
    if train.steps is not None:
        return train.steps
    epochs, rest = train.epochs or 0, 0
    if train.samples is not None:
        epochs, rest = divmod(train.samples, loader.num_rows - loader.dropped_rows)
    steps = (epochs - position.epoch) * loader.steps_per_epoch() + -(-rest // loader.global_batch_size)
    return position.step - position.epoch_step + steps
