"""What content implements. The engine knows these shapes and nothing else of models, data and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, Scores, SparseBatch, StepOutput
from erase_rec.distributed.shards import Held

LocalLoss = Callable[[Tensor, Tensor], Tensor]
"""(logit [B], label [B]) -> scalar, mean over the batch. The logit already holds the target's other terms."""


class Embeddings(Protocol):
    """Embedding tables with their own optimizer; weights and its state are float32 whatever dtype comes out.

    The step calls ``forward`` once, then ``order`` once, cuts the result into detached leaves, sums the leaves'
    gradients and calls ``backward_and_update`` once, so each table is updated once a step. ``forward`` of one step must
    be followed by at most one ``backward_and_update``. All work runs on the current stream of its call; the caller
    orders the streams.
    """

    @property
    def feature_dims(self) -> Sequence[int]:
        """Embedding dimension of each sparse feature, in feature order."""
        ...

    def __call__(self, sparse: SparseBatch) -> Tensor:
        """Pooled embeddings [B, sum of dims], feature by feature, in the dtype that the model computes in.

        Empty bags are zero.
        """
        ...

    def order(self, sparse: SparseBatch) -> Any:
        """What the update needs of the ids alone, such as their sorted order; None where the update does it by itself.

        Called after the training forward of the same ``sparse``; may run on another stream than the lookup's, beside
        it. The result goes to ``backward_and_update``, whose stream must have waited for it.
        """
        ...

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: Any) -> None:
        """Backward from ``pooled`` with ``gradient`` and the tables' optimizer step.

        Args:
            pooled: what the training forward returned, the same tensor.
            gradient: of ``pooled``'s shape, in its dtype or float32.
            order: what ``order`` returned for the same batch.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the updates that run after it on the current stream.

        A rate on the device (see ``frozen_scalars``) is written by a copy there, and only where it changed.
        """
        ...

    def frozen_scalars(self) -> tuple[float, ...]:
        """Numbers of the host that the next update reads; a captured update would keep them. Empty where none."""
        ...

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """Why lookup, order and update of such a batch cannot be captured into a CUDA graph; None where they can."""
        ...

    def verify(self) -> None:
        """Refuses ids outside their tables that no lookup has refused; every lookup since the last call counts.

        Synchronises the host where lookups leave the check to the device; elsewhere does nothing.

        Raises:
            IdRangeError: a ``UserError`` that names feature, id and rows of the table.
        """
        ...

    def expect(self, batch: Batch | None) -> None:
        """Says whose training lookup follows the next one, so that its ids can be sent ahead; may be collective.

        Every rank says it at the same place, once a batch and in order. ``batch`` is on the device (or on its way, see
        ``Batch.arrived``) and the lookup gets the same ``batch.sparse``; another lookup in between is as ever.

        Args:
            batch: of the lookup after the next; None: what was expected does not come. Waits for what was begun.
        """
        ...

    def idle(self) -> None:
        """Takes part in the other ranks' lookup in evaluation, for a rank that has no rows in it; may be collective."""
        ...

    def tables(self) -> Mapping[str, Held]:
        """Weight of each table by feature name, float32 [rows, dim]; shares storage with the parameters.

        Where ranks hold parts of a table, this rank's.
        """
        ...

    def optimizer_state(self) -> Mapping[str, Mapping[str, Held]]:
        """Optimizer state by feature name; parts share storage, others may be copied by ``load_optimizer_state``."""
        ...

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Held]]) -> None:
        """Takes over what ``optimizer_state`` gave, in place."""
        ...


class TowerBlock(Protocol):
    """A tower with its input selection and its local head; an ``nn.Module``."""

    out_dim: int
    inputs: Sequence[str]
    """Earlier towers whose outputs it reads."""

    def __call__(self, dense: Tensor, pooled: Tensor, outputs: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """Output [B, out_dim] and local logit [B] from dense [B, N], pooled [B, E] and other towers' outputs.

        ``outputs`` are those of ``inputs``, in that order, already cut where they are to be.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The tower's and the head's parameters."""
        ...


class OverArch(Protocol):
    """Joins the towers; an ``nn.Module``."""

    def __call__(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """Logit [B] from the towers' outputs and local logits, in tower order, already cut where detached."""
        ...

    def terms(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor | None:
        """What each tower's logit adds to the logit, [T, B]; None where logits are not added."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The over-arch's parameters."""
        ...


class CTRModel(Protocol):
    """Embeddings, towers and over-arch; an ``nn.Module`` whose parts the schedule runs one by one."""

    embeddings: Embeddings
    over_arch: OverArch

    def tower(self, name: str) -> TowerBlock:
        """The block of that name."""
        ...

    def tower_names(self) -> Sequence[str]:
        """Names in configuration order."""
        ...

    def dense_state(self) -> dict[str, Tensor]:
        """State of everything but the tables: ``towers.<name>...`` and ``over_arch...``."""
        ...

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what ``dense_state`` gave, strictly."""
        ...

    def train(self, mode: bool = True) -> Any:
        """As ``nn.Module.train``."""
        ...


class BatchLoader(Protocol):
    """Deterministic batches of one split on one rank."""

    num_rows: int
    """Rows of the split over all ranks."""
    global_batch_size: int
    """Rows of a full step over all ranks."""
    base_rate: float
    """Share of positive labels over all ranks."""

    def steps_left(self, start_row: int = 0) -> int:
        """Batches on this rank, as many as on every other, from ``start_row`` to the end of an epoch.

        The last may be short. ``start_row`` counts the rows of the epoch's order, over all ranks, that came before.
        """
        ...

    def dropped_rows(self, start_row: int = 0) -> int:
        """Rows that no rank takes in an epoch that goes on at ``start_row``, so that all ranks take as many."""
        ...

    def batches(self, epoch: int, start_row: int = 0, *, endless: bool = False) -> Iterator[Batch]:
        """This rank's batches of ``epoch`` (from 0) from ``start_row`` on; host memory, pinned when asked for.

        The order of an epoch's rows depends on the epoch alone: neither on ``start_row`` nor on the number of ranks.

        Args:
            epoch: from 0.
            start_row: as for :meth:`steps_left`.
            endless: all later epochs follow.
        """
        ...

    def locate(self, row_ids: Tensor) -> list[str]:
        """``file:line`` (or ``file row n``) of each row id."""
        ...


@dataclass(frozen=True)
class EvalResult:
    """Metrics of one evaluation over all rows; undefined values are nan.

    ``towers`` holds ``{name: {"ne": ..., "auc": ...}}``, and of a tower's part in the model ``share`` (of the sums over
    rows of the absolute terms of the logit), ``ne_without`` (the model's NE without the tower) and ``correlation`` (the
    largest absolute one of its logit with another tower's, which ``most_like`` names), as far as known; ``extra`` holds
    further registered metrics; ``scores`` the rows themselves (a ``pyarrow.Table``) where they were asked for.
    """

    ne: float
    auc: float
    logloss: float
    calibration: float
    base_rate: float
    rows: int
    towers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    most_like: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    scores: pa.Table | None = None


class Evaluator(Protocol):
    """Scores held-out rows."""

    def evaluate(
        self,
        score: Callable[[Batch], Scores],
        batches: Iterable[Batch],
        keep_scores: bool = False,
    ) -> EvalResult:
        """Runs ``score`` over this rank's ``batches`` and pools the rows of all ranks; collective.

        Neither batch size nor ranks change which rows count. Every rank returns the result, and the first one the
        scores, too.
        """
        ...


class ProgressiveMetrics(Protocol):
    """Metrics while training: each row is scored before the update that learns from it."""

    def update(self, output: StepOutput, label: Tensor) -> None:
        """Adds a step's rows. No host synchronisation: sums stay on the step's device."""
        ...

    def window(self, *, closes: bool = True) -> dict[str, float]:
        """``train/ne``, ``train/base_rate``, ``tower/<name>/ne`` of all ranks in the open window; collective.

        Synchronises the host. ``closes``: the next row begins a new one.
        """
        ...

    def lifetime(self) -> dict[str, float]:
        """The same tags over the whole run; collective. Synchronises the host."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Sums, for the checkpoint that the first rank writes; collective."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what ``state_dict`` gave."""
        ...


class TrainStep(Protocol):
    """One training step as one callable: every schedule is interchangeable behind it."""

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """Forward, backward, reduction and updates for ``batch``, which is on the model's device.

        Args:
            batch: rows on the model's device.
            measure: also compute gradient norms (before clipping).

        Raises:
            NonFiniteLossError: a loss is nan or infinite; parameters are untouched.
        """
        ...

    def device(self) -> torch.device:
        """Where batches must be."""
        ...
