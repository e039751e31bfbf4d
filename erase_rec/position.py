"""How far a run has come, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass

from erase_rec.config.schema import TrainConfig
from erase_rec.protocols import BatchLoader


@dataclass(frozen=True)
class Position:
    """How far training has come.

    Attributes:
        step: finished steps.
        epoch: running epoch, from 0.
        epoch_rows: rows of its order trained on, over all ranks.
        rows: rows trained on in the whole run, over all ranks.
    """

    step: int = 0
    epoch: int = 0
    epoch_rows: int = 0
    rows: int = 0

    def after(self, rows: int) -> Position:
        """The position one step of ``rows`` rows, over all ranks, later."""
        return Position(self.step + 1, self.epoch, self.epoch_rows + rows, self.rows + rows)

    def ends_epoch(self, loader: BatchLoader) -> bool:
        """Whether the running epoch has no step left."""
        return loader.steps_left(self.epoch_rows) == 0

    def normal(self, loader: BatchLoader) -> Position:
        """The same position, a finished epoch being the start of the next."""
        return Position(self.step, self.epoch + 1, 0, self.rows) if self.ends_epoch(loader) else self


def planned_steps(train: TrainConfig, loader: BatchLoader, position: Position) -> int:
    """The step at which ``train`` ends a run that is at ``position``.

    ``samples`` ends with the batch that reaches them. What came before ``position`` may have taken another number of
    steps, of another number of ranks.
    """
    if train.steps is not None:
        return train.steps
    left = loader.steps_left(position.epoch_rows)
    if train.epochs is not None:
        whole = train.epochs - position.epoch - 1
        return position.step + (left + whole * loader.steps_left() if whole >= 0 else 0)
    assert train.samples is not None, "the configuration's rules demand steps, epochs or samples"
    samples = max(0, train.samples - position.rows)
    usable = loader.num_rows - position.epoch_rows - loader.dropped_rows(position.epoch_rows)
    if samples <= usable:
        return position.step - -samples // loader.global_batch_size
    epochs, rest = divmod(samples - usable, loader.num_rows - loader.dropped_rows())
    return position.step + left + epochs * loader.steps_left() - -rest // loader.global_batch_size
