"""What one step makes, until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from erase_rec.batch import Batch, StepOutput


@dataclass
class MicroState:
    """What the towers and the over-arch make of some rows of a batch.

    Attributes:
        rows: which.
        share: of the batch's rows.
        local_losses: before their weights.
        weighted_losses: as they are differentiated.
    """

    rows: slice
    share: float
    dense: Tensor = field(init=False)
    label: Tensor = field(init=False)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    logit_sum: Tensor | None = None
    local_losses: dict[str, Tensor] = field(default_factory=dict)
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)
    logit: Tensor = field(init=False)
    loss: Tensor = field(init=False)
    leaf_gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class StepState:
    """Everything that one step makes. Kept until the step ends, because streams still read it.

    Attributes:
        exact: nothing is cut.
        measure: operations are timed, and gradients' norms taken.
        pooled: [B, E], what the lookup gave.
        order: what the tables' update needs of the ids alone.
        tower_input: [B, E], what towers read; cut from ``pooled``.
        table_gradient: [B, E], of ``pooled``; None where no loss reaches it.
    """

    batch: Batch
    micros: list[MicroState]
    exact: bool = False
    measure: bool = False
    pooled: Tensor = field(init=False)
    output: StepOutput = field(init=False)
    order: Any = None
    tower_input: Tensor = field(init=False)
    table_gradient: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, micro_batches: int, *, exact: bool = False, measure: bool = False) -> StepState:
        """The start of a step; its micro-batches are as even as can be."""
        parts = micro_rows(batch.size, micro_batches)
        micros = [MicroState(rows, (rows.stop - rows.start) / batch.size) for rows in parts]
        return cls(batch, micros, exact, measure)

    def logit(self) -> Tensor:
        """Logit of each row, [B]."""
        return whole([micro.logit for micro in self.micros])

    def tower_logit(self, tower: str) -> Tensor:
        """A tower's logit of each row, [B]."""
        return whole([micro.logits[tower] for micro in self.micros])

    def loss(self) -> Tensor:
        """The main loss, mean over the batch."""
        return _mean([(micro.share, micro.loss) for micro in self.micros])

    def local_losses(self) -> dict[str, Tensor]:
        """Local losses, mean over the batch."""
        names = self.micros[0].local_losses
        return {name: _mean([(micro.share, micro.local_losses[name]) for micro in self.micros]) for name in names}


def micro_rows(rows: int, micro_batches: int) -> list[slice]:
    """Which rows of a batch each of its parts has."""
    bounds = [rows * part // micro_batches for part in range(micro_batches + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def total_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Sum in the given order; None of nothing."""
    total: Tensor | None = None
    for tensor in tensors:
        total = tensor if total is None else total + tensor
    return total


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a batch, joined."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _mean(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    total = total_of([share * value for share, value in parts])
    assert total is not None
    return total
