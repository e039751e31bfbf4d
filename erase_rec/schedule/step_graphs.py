"""A training step as one CUDA graph over all its streams: the whole of it, or all but the tables.

``schedule.cuda_graph: step``: lookup, towers, local losses, early backwards, over-arch, the tables' and the dense
optimizers and the sums of the metrics are captured once and replayed with one launch. ``dense``: the lookup before and
the tables' update after are launched operation by operation, as where ranks tell each other through their hosts what
they exchange; everything between is replayed (:class:`erase_rec.schedule.program.Parts`).

What a replay reads has a fixed address: a batch, and with ``dense`` what its lookup gave, is copied
(:mod:`erase_rec.schedule.held_batch`); learning rates and step counts are numbers on the device. Host numbers that a
capture freezes (those of a table optimizer that has them) are compared before each replay.

There are two held batches, each with captures of its own, used in turn. So the copy of a batch runs beside the step
before it, once the batch has arrived and the step before that one, the last to read the same held batch, is done.

What cannot be replayed is launched operation by operation, with the same result: batches of another number of rows,
and steps whose frozen numbers change from step to step. Each cause is said once, or ends the run (``strict``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from erase_rec.batch import Batch, StepOutput
from erase_rec.distributed.collective_log import Collective, CollectiveLog
from erase_rec.errors import UserError
from erase_rec.protocols import Embeddings
from erase_rec.schedule.held_batch import HeldBatch
from erase_rec.schedule.measured_streams import MeasuredStreams, Measurement
from erase_rec.schedule.replays import Replays
from erase_rec.schedule.step_state import StepState

WARM_UP_STEPS = 3
"""Steps of one number of rows, and as many that cut nothing, before they are captured: kernels are compiled (whole
blocks under ``model.compile``, which copies what no capture may) and libraries set themselves up."""
SPARE_IDS = 1.25
"""Room for ids in a batch of bags, relative to the most that a batch has had."""

SLOTS = 2
"""Held batches: one is read while the other is filled."""

Holds = Literal["step", "dense"]
"""What a graph holds, as ``schedule.cuda_graph`` says."""
logger = logging.getLogger(__name__)


class StepParts(Protocol):
    """Launches a step part by part, in the order of these methods; synchronises no host outside of tables' work."""

    def begin(self, batch: Batch, measure: bool, exact: bool) -> StepState:
        """The start of a step over ``batch`` whose main stream is the current one; launches nothing."""
        ...

    def launch_before(self, state: StepState) -> None:
        """Launches what comes before the part that a graph holds, which reads ``state.pooled`` of it."""
        ...

    def launch_captured(self, state: StepState, flags: Tensor | None = None) -> StepOutput:
        """Launches the part that a graph holds; leaves ``state.table_gradient``.

        Args:
            state: of the step.
            flags: bool [losses], where the output's ``finite`` is to be; None: anywhere.
        """
        ...

    def launch_after(self, state: StepState) -> None:
        """Launches what comes after it."""
        ...


def launched(parts: StepParts, batch: Batch, measure: bool, exact: bool) -> StepOutput:
    """A step that is launched operation by operation."""
    state = parts.begin(batch, measure, exact)
    parts.launch_before(state)
    output = parts.launch_captured(state)
    parts.launch_after(state)
    return output


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    output: StepOutput
    table_gradient: Tensor | None
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
        holds: Holds = "step",
        strict: bool = False,
    ) -> None:
        """Captures nothing yet.

        Args:
            replays: of the device.
            streams: that the step runs on.
            embeddings: whose work in a ``step`` may read numbers of the host, or not be captured at all.
            collectives: log of what ranks ask of each other.
            holds: what a graph holds; the plan's program leaves the same part to it.
            strict: a step that cannot be replayed after the first :data:`WARM_UP_STEPS` raises instead.
        """
        self._replays = replays
        self._streams = streams
        self._embeddings = embeddings
        self._collectives = collectives
        self._holds: Holds = holds
        self._strict = strict
        self._seen: dict[tuple[int, bool], int] = {}
        self._most_ids = self._most_losses = 0
        self._slots: list[_Slot] = []
        self._newest: _Slot | None = None
        self._turn = 0
        self._frozen: tuple[float, ...] = ()
        self._before: tuple[float, ...] = ()
        self._said: set[str] = set()

    def run(self, batch: Batch, measure: bool, exact: bool, parts: StepParts) -> tuple[StepOutput, Any]:
        """The step of ``batch``, replayed where that is possible; ``exact``: one in which nothing is cut.

        Returns:
            Its output, and of a replay the event of its end, else None. What a replay put out is valid until the next
            step; its ``finite`` until the step after that, and until the event that :meth:`keep_until` is given.

        Raises:
            UserError: it cannot be replayed, under ``strict``.
        """
        scalars, before = self._embeddings.frozen_scalars() if self._holds == "step" else (), self._before
        self._before = scalars
        if not self._is_replayed(batch, exact, settled=scalars == before):
            self._newest = None
            output = launched(parts, batch, measure, exact)
            self._most_losses = 1 + len(output.tower_logits)
            return output, None
        state = parts.begin(batch, measure, exact)
        parts.launch_before(state)
        if not self._slots or not self._slots[0].held.takes(batch) or scalars != self._frozen:
            self._hold(batch, state.pooled if self._holds == "dense" else None, scalars)
        slot = self._newest = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        captured = self._replay(slot, batch, state, parts)
        state.table_gradient = captured.table_gradient
        parts.launch_after(state)
        return captured.output, slot.free

    def _replay(self, slot: _Slot, batch: Batch, state: StepState, parts: StepParts) -> _Captured:
        """Fills the held batch and replays its capture, which is made where this kind of step is new to it."""
        held, kind = slot.held, (state.measure, state.exact)
        measured = self._streams.measured
        self._replays.copy(lambda: held.fill(batch), after=(batch.arrived, slot.free))
        if held.pooled is not None:
            self._replays.on_main(lambda: held.take(state.pooled))
        if kind not in slot.captured:
            slot.captured[kind] = self._capture(slot, state, parts)
        captured = slot.captured[kind]
        launch_s = time.perf_counter()
        captured.replay()
        slot.free = self._replays.mark()
        self._collectives.repeat(captured.collectives)
        self._streams.resume(None if captured.measured is None else measured.then(captured.measured, launch_s))
        return captured

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
        if self._holds == "dense":
            return None
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
            raise UserError(f"schedule.cuda_graph: {self._holds}, schedule.strict: cannot be replayed: {cause}")
        if cause not in self._said:
            self._said.add(cause)
            logger.warning("schedule.cuda_graph: %s runs uncaptured: %s", self._holds, cause)

    def _hold(self, batch: Batch, pooled: Tensor | None, scalars: tuple[float, ...]) -> None:
        """Starts anew, with addresses for batches like this one."""
        bags = not batch.sparse.single_valued
        room = int(self._most_ids * SPARE_IDS) if bags else self._most_ids
        self._slots.clear()  # frees the pool of the captures before
        self._newest = None
        self._replays.forget()
        for _ in range(SLOTS):
            flags = batch.label.new_empty(self._most_losses, dtype=torch.bool)
            held = HeldBatch(batch, room, pooled)
            self._slots.append(_Slot(held, flags, free=self._replays.mark()))
        self._frozen, self._turn = scalars, 0

    def _capture(self, slot: _Slot, like: StepState, parts: StepParts) -> _Captured:
        """Captures a step of the kind of ``like`` over the held batch."""
        start_s = time.perf_counter()
        measure, exact = like.measure, like.exact

        def launch() -> tuple[StepOutput, Tensor | None]:
            state = parts.begin(slot.held.batch, measure, exact)
            if slot.held.pooled is not None:
                state.pooled = slot.held.pooled
            output = parts.launch_captured(state, slot.flags)
            # A whole step has used its gradient up.
            return output, state.table_gradient if self._holds == "dense" else None

        with self._collectives.capturing() as collectives:
            replay, (output, gradient) = self._replays.capture(launch)
        kind = f"{'measured' if measure else 'plain'} step{' that cuts nothing' if exact else ''}"
        logger.info(
            "schedule.cuda_graph: %s: captured a %s in %.2f s", self._holds, kind, time.perf_counter() - start_s
        )
        return _Captured(replay, output, gradient, collectives, self._streams.measured if measure else None)
