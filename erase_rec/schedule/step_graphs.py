"""The whole training step as one CUDA graph (``schedule.cuda_graph: step``), over all its streams.

Lookup, towers, local losses, early backwards, over-arch, the tables' and the dense optimizers and the sums of the
metrics are captured once and replayed with one launch. What a replay reads has a fixed address: a batch is copied into
:class:`HeldBatch`; learning rates and step counts are numbers on the device. Host numbers that a capture freezes
(those of a table optimizer that has them) are compared before each replay.

What cannot be replayed is launched operation by operation, with the same result: batches of another number of rows,
and steps whose frozen numbers change from step to step. Each cause is said once, or ends the run (``strict``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from erase_rec.batch import Batch, StepOutput
from erase_rec.distributed.collective_log import Collective, CollectiveLog
from erase_rec.errors import UserError
from erase_rec.protocols import Embeddings
from erase_rec.schedule.measured_streams import MeasuredStreams, Measurement

WARM_UP_STEPS = 3
"""Steps of one number of rows before it is captured: kernels are compiled and libraries set themselves up."""
DENSE_ALIGNMENT = 8
"""Dense columns are held with zero columns up to a multiple of it, which towers would have to add by themselves."""
SPARE_IDS = 1.25
"""Room for ids in a batch of bags, relative to the most that a batch has had."""

Launch = Callable[[Batch, bool, bool], StepOutput]
"""(batch, measure, exact) -> output; synchronises no host."""
logger = logging.getLogger(__name__)


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
    graph: torch.cuda.CUDAGraph
    output: StepOutput
    collectives: list[Collective]
    measured: Measurement | None


class StepGraphs:
    """Graphs of one number of rows, one of plain steps and one of measured ones, of each kind of step that comes up.

    All share a memory pool: they are replayed one after the other on one stream.
    """

    def __init__(
        self,
        device: torch.device,
        streams: MeasuredStreams,
        embeddings: Embeddings,
        collectives: CollectiveLog,
        *,
        strict: bool = False,
    ) -> None:
        """Captures nothing yet.

        Args:
            device: a CUDA device.
            streams: that the step runs on.
            embeddings: which may read numbers of the host that a capture freezes, or not be captured at all.
            collectives: log of what ranks ask of each other.
            strict: a step that cannot be replayed after the first :data:`WARM_UP_STEPS` raises instead.
        """
        self._streams = streams
        self._embeddings = embeddings
        self._collectives = collectives
        self._strict = strict
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default stream cannot capture
        self._seen: dict[int, int] = {}
        self._most_ids = 0
        self._held: HeldBatch | None = None
        self._frozen: tuple[float, ...] = ()
        self._before: tuple[float, ...] = ()
        self._captured: dict[tuple[bool, bool], _Captured] = {}
        self._said: set[str] = set()
        self._pool: Any = None

    def run(self, batch: Batch, measure: bool, exact: bool, launch: Launch) -> StepOutput:
        """The step of ``batch``, replayed where that is possible; ``exact``: one in which nothing is cut.

        Raises:
            UserError: it cannot be replayed, under ``strict``.
        """
        scalars, before = self._embeddings.frozen_scalars(), self._before
        self._before = scalars
        seen = self._seen[batch.size] = self._seen.get(batch.size, 0) + 1
        if self._held is None or batch.size == self._held.batch.size:
            self._most_ids = max(self._most_ids, batch.sparse.values.numel())
        if self._held is None and seen <= WARM_UP_STEPS:
            return launch(batch, measure, exact)
        cause = self._cannot(batch, settled=scalars == before)
        if cause is not None:
            self._say(cause)
            return launch(batch, measure, exact)
        if self._held is None or not self._held.takes(batch) or scalars != self._frozen:
            self._hold(batch, scalars)
        assert self._held is not None
        self._held.fill(batch)
        if (measure, exact) not in self._captured:
            self._capture(self._held, exact, launch)
        return self._replay(measure, exact)

    def _cannot(self, batch: Batch, *, settled: bool) -> str | None:
        """Why a step cannot be replayed."""
        if self._held is not None and batch.size != self._held.batch.size:
            return f"batches of {batch.size} rows, where the captured step has {self._held.batch.size}"
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
        self._captured.clear()  # frees the pool of the capture before
        self._held = HeldBatch(batch, room)
        self._frozen, self._pool = scalars, None

    def _capture(self, held: HeldBatch, exact: bool, launch: Launch) -> None:
        """Captures the plain and the measured step of a kind."""
        for measure in (False, True):
            graph = torch.cuda.CUDAGraph()
            # thread_local: the loader's threads go on to use the device's allocator meanwhile.
            with (
                self._collectives.capturing() as collectives,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = launch(held.batch, measure, exact)
            self._pool = graph.pool()
            measured = replace(self._streams.measured, start_s=None) if measure else None
            self._captured[measure, exact] = _Captured(graph, output, collectives, measured)

    def _replay(self, measure: bool, exact: bool) -> StepOutput:
        captured = self._captured[measure, exact]
        captured.graph.replay()
        self._collectives.repeat(captured.collectives)
        if captured.measured is not None:
            self._streams.measured = captured.measured
        return captured.output
