"""The whole training step as one CUDA graph (``schedule.cuda_graph: step``), over all its streams.

Lookup, towers, local losses, early backwards, over-arch, the tables' and the dense optimizers and the sums of the
metrics are captured once and replayed with one launch. What a replay reads has a fixed address: a batch is copied into
:class:`HeldBatch`; learning rates and step counts are numbers on the device. Host numbers that a capture freezes
(those of a table optimizer that has them) are compared before each replay.

There are two held batches, each with captures of its own, used in turn. So the copy of a batch runs beside the step
before it, once the batch has arrived and the step before that one, the last to read the same held batch, is done.

What cannot be replayed is launched operation by operation, with the same result: batches of another number of rows,
and steps whose frozen numbers change from step to step. Each cause is said once, or ends the run (``strict``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from erase_rec.batch import Batch, StepOutput
from erase_rec.distributed.collective_log import Collective, CollectiveLog
from erase_rec.errors import UserError
from erase_rec.protocols import Embeddings
from erase_rec.schedule.measured_streams import MeasuredStreams, Measurement
from erase_rec.schedule.replays import Replays

WARM_UP_STEPS = 3
"""Steps of one number of rows, and as many that cut nothing, before they are captured: kernels are compiled (whole
blocks under ``model.compile``, which copies what no capture may) and libraries set themselves up."""
DENSE_ALIGNMENT = 8
"""Dense columns come with zero columns up to a multiple of it, which towers would have to add by themselves."""
SPARE_IDS = 1.25
"""Room for ids in a batch of bags, relative to the most that a batch has had."""

SLOTS = 2
"""Held batches: one is read while the other is filled."""

Launch = Callable[[Batch, bool, bool, Tensor | None], StepOutput]
"""(batch, measure, exact, where the output's ``finite`` is to be or None) -> output; synchronises no host."""
logger = logging.getLogger(__name__)


def aligned(batch: Batch) -> Batch:
    """``batch`` with as many dense columns as a capture of it has: what was compiled for one step fits the other."""
    missing = -batch.dense.shape[1] % DENSE_ALIGNMENT
    return replace(batch, dense=pad(batch.dense, (0, missing)), arrived=None) if missing else batch


class HeldBatch:
    """A batch at fixed addresses.

    Bags have room for more ids than they hold: what lies past the last bag changes nothing, as
    :class:`erase_rec.batch.SparseBatch` says.

    Attributes:
        batch: what a capture reads.
    """

    def __init__(self, like: Batch, room: int) -> None:
        """Buffers for batches with as many rows as ``like`` and at most ``room`` ids."""
        sparse = like.sparse
        rows, self._columns = like.dense.shape
        self.batch = Batch(
            like.dense.new_zeros(rows, self._columns + -self._columns % DENSE_ALIGNMENT),
            replace(
                sparse,
                values=sparse.values.new_zeros(room),
                lengths=sparse.lengths.clone(),
                weights=None if sparse.weights is None else sparse.weights.new_zeros(room),
            ),
            torch.empty_like(like.label),
            like.row_ids,
        )

    def takes(self, batch: Batch) -> bool:
        """Whether ``batch``, with as many rows, fits."""
        held = self.batch.sparse
        if batch.sparse.values.numel() > held.values.numel() or (batch.sparse.weights is None) != (
            held.weights is None
        ):
            return False
        return batch.sparse.single_valued or not held.single_valued

    def fill(self, batch: Batch) -> None:
        """Copies ``batch``, on the current stream."""
        held, sparse = self.batch, batch.sparse
        held.dense[:, : self._columns].copy_(batch.dense)
        held.label.copy_(batch.label)
        held.sparse.values[: sparse.values.numel()].copy_(sparse.values)
        if not held.sparse.single_valued:
            held.sparse.lengths.copy_(sparse.lengths)
        if held.sparse.weights is not None and sparse.weights is not None:
            held.sparse.weights[: sparse.weights.numel()].copy_(sparse.weights)


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    output: StepOutput
    collectives: list[Collective]
    measured: Measurement | None


@dataclass
class _Slot:
    """A held batch and the captures that read it.

    Attributes:
        held: what they read.
        flags: bool [losses at most], where they say which losses are finite. Apart from their other outputs, which
            the replay of another slot may overwrite: these are read beside it.
        free: event after which nobody reads ``held`` or ``flags``.
        captured: of each kind of step (measured, exact) that came up.
    """

    held: HeldBatch
    flags: Tensor
    free: Any
    captured: dict[tuple[bool, bool], _Captured] = field(default_factory=dict)


class StepGraphs:
    """Graphs of one number of rows: one a held batch of each kind of step, captured when it first comes up there.

    All share a memory pool: they are replayed one after the other on one stream. What each capture cost is logged.
    """

    def __init__(
        self,
        replays: Replays,
        streams: MeasuredStreams,
        embeddings: Embeddings,
        collectives: CollectiveLog,
        *,
        strict: bool = False,
    ) -> None:
        """Captures nothing yet.

        Args:
            replays: of the device.
            streams: that the step runs on.
            embeddings: which may read numbers of the host that a capture freezes, or not be captured at all.
            collectives: log of what ranks ask of each other.
            strict: a step that cannot be replayed after the first :data:`WARM_UP_STEPS` raises instead.
        """
        self._replays = replays
        self._streams = streams
        self._embeddings = embeddings
        self._collectives = collectives
        self._strict = strict
        self._seen: dict[tuple[int, bool], int] = {}
        self._most_ids = self._most_losses = 0
        self._slots: list[_Slot] = []
        self._newest: _Slot | None = None
        self._turn = 0
        self._frozen: tuple[float, ...] = ()
        self._before: tuple[float, ...] = ()
        self._said: set[str] = set()

    def run(self, batch: Batch, measure: bool, exact: bool, launch: Launch) -> tuple[StepOutput, Any]:
        """The step of ``batch``, replayed where that is possible; ``exact``: one in which nothing is cut.

        Returns:
            Its output, and of a replay the event of its end, else None. What a replay put out is valid until the next
            step; its ``finite`` until the step after that, and until the event that :meth:`keep_until` is given.

        Raises:
            UserError: it cannot be replayed, under ``strict``.
        """
        scalars, before = self._embeddings.frozen_scalars(), self._before
        self._before = scalars
        if not self._is_replayed(batch, exact, settled=scalars == before):
            self._newest = None
            output = launch(batch, measure, exact, None)
            self._most_losses = 1 + len(output.tower_logits)
            return output, None
        if not self._slots or not self._slots[0].held.takes(batch) or scalars != self._frozen:
            self._hold(batch, scalars)
        slot = self._newest = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        self._replays.copy(lambda: slot.held.fill(batch), after=(batch.arrived, slot.free))
        if (measure, exact) not in slot.captured:
            slot.captured[measure, exact] = self._capture(slot, measure, exact, launch)
        captured = slot.captured[measure, exact]
        captured.replay()
        slot.free = self._replays.mark()
        self._collectives.repeat(captured.collectives)
        if captured.measured is not None:
            self._streams.measured = captured.measured
        return captured.output, slot.free

    def keep_until(self, read: Any) -> None:
        """Of the step that was run last, ``finite`` stays until that event, which comes after the step's end."""
        if self._newest is not None:
            self._newest.free = read

    def _is_replayed(self, batch: Batch, exact: bool, *, settled: bool) -> bool:
        """Whether a step is; where it could not be for a reason worth saying, says it.

        Args:
            batch: its batch.
            exact: nothing is cut.
            settled: frozen numbers are those of the step before.
        """
        seen = self._seen[batch.size, exact] = self._seen.get((batch.size, exact), 0) + 1
        if not self._slots or batch.size == self._slots[0].held.batch.size:
            self._most_ids = max(self._most_ids, batch.sparse.values.numel())
            if seen <= WARM_UP_STEPS:
                return False
        cause = self._cannot(batch, settled=settled)
        if cause is not None:
            self._say(cause)
        return cause is None

    def _cannot(self, batch: Batch, *, settled: bool) -> str | None:
        """Why a step cannot be replayed."""
        if self._slots and batch.size != self._slots[0].held.batch.size:
            return f"batches of {batch.size} rows, where the captured step has {self._slots[0].held.batch.size}"
        problem = self._embeddings.capture_problem(batch.sparse)
        if problem is not None:
            return problem
        if not settled:
            return (
                "the tables' optimizer reads numbers of the host that change in every step (its learning rate or "
                "Adam's count); choose optimizer.lr_schedule.kind=constant, or another optimizer.sparse.kind"
            )
        return None

    def _say(self, cause: str) -> None:
        if self._strict:
            raise UserError(f"schedule.cuda_graph: step, schedule.strict: cannot be replayed: {cause}")
        if cause not in self._said:
            self._said.add(cause)
            logger.warning("schedule.cuda_graph: step runs uncaptured: %s", cause)

    def _hold(self, batch: Batch, scalars: tuple[float, ...]) -> None:
        """Starts anew, with addresses for batches like this one."""
        bags = not batch.sparse.single_valued
        room = int(self._most_ids * SPARE_IDS) if bags else self._most_ids
        self._slots.clear()  # frees the pool of the captures before
        self._newest = None
        self._replays.forget()
        for _ in range(SLOTS):
            flags = batch.label.new_empty(self._most_losses, dtype=torch.bool)
            held = HeldBatch(batch, room)
            self._slots.append(_Slot(held, flags, free=self._replays.mark()))
        self._frozen, self._turn = scalars, 0

    def _capture(self, slot: _Slot, measure: bool, exact: bool, launch: Launch) -> _Captured:
        start_s = time.perf_counter()
        with self._collectives.capturing() as collectives:
            replay, output = self._replays.capture(lambda: launch(slot.held.batch, measure, exact, slot.flags))
        kind = f"{'measured' if measure else 'plain'} step{' that cuts nothing' if exact else ''}"
        logger.info("schedule.cuda_graph: step: captured a %s in %.2f s", kind, time.perf_counter() - start_s)
        measured = replace(self._streams.measured, start_s=None) if measure else None
        return _Captured(replay, output, collectives, measured)
