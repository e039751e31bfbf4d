"""One training step as one callable: the plan's gradients, then the finiteness check and the updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from erase_rec.batch import Batch, StepOutput
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import FiniteGuard, all_finite
from erase_rec.matmul_share import matmul_share
from erase_rec.protocols import ProgressiveMetrics
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.held_batch import aligned
from erase_rec.schedule.plan import MAIN_LOSS
from erase_rec.schedule.program import Op
from erase_rec.schedule.step_graphs import StepGraphs, launched
from erase_rec.schedule.step_state import StepState

DENSE_BLOCK = "dense"
"""The optimizer's one block where all dense parameters are clipped and updated together."""


class ScheduledStep:
    """Implements :class:`erase_rec.protocols.TrainStep` for every plan.

    Dense parameters are updated with the optimizer's current learning rate: each tower on its stream once its reduced
    gradient is there (``per_tower``), or all on the main stream after every backward. Then each table is updated once
    with the summed gradient of the pooled embeddings. Under ``per_tower`` a loss that is not finite stops every update,
    as otherwise: losses are checked once all are launched, before the first update.
    """

    def __init__(
        self,
        gradients: GradientProgram,
        optimizer: DenseOptimizer,
        guard: FiniteGuard,
        max_grad_norm: float | None = None,
        *,
        metrics: ProgressiveMetrics | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        """Binds gradients to their optimizers.

        Args:
            gradients: runs the plan.
            optimizer: over the blocks of ``gradients``; or, where the plan updates at the end, over
                ``gradients.dense_parameters()`` in the one block :data:`DENSE_BLOCK`.
            guard: refuses non-finite losses before the update.
            max_grad_norm: norm that the gradients of each of the optimizer's blocks are clipped to.
            metrics: take in each step's rows, as part of the step.
            graphs: capture and replay the part of the step that the plan puts into a graph; None: all of it is launched
                operation by operation.
        """
        self._gradients = gradients
        self._optimizer = optimizer
        self._guard = guard
        self._max_grad_norm = max_grad_norm
        self._metrics = metrics
        self._graphs = graphs

    def device(self) -> torch.device:
        """The model's device."""
        return self._gradients.device

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """See :class:`erase_rec.protocols.TrainStep`."""
        exact = self._gradients.plan.is_exact(self._guard.step)
        self._guard.poll()  # on CUDA the host waits here; before any work and any collective of this step
        if self._graphs is None:
            output = launched(self, batch, measure, exact)
            if self.device().type == "cuda":
                self._look_at(output, batch)
            return output
        output, done = self._graphs.run(batch, measure, exact, self)
        self._graphs.keep_until(self._look_at(output, batch, done))
        return output

    def _look_at(
        self, output: StepOutput, batch: Batch, done: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        return self._guard.check(output.finite, (MAIN_LOSS, *output.local_losses), batch.row_ids, done)

    def begin(self, batch: Batch, measure: bool, exact: bool) -> StepState:
        """See :class:`erase_rec.schedule.step_graphs.StepParts`."""
        return self._gradients.begin(batch if self._graphs is None else aligned(batch), measure=measure, exact=exact)

    def launch_before(self, state: StepState) -> None:
        """See :class:`erase_rec.schedule.step_graphs.StepParts`."""
        self._gradients.launch_before(state)

    def launch_captured(self, state: StepState, flags: Tensor | None = None) -> StepOutput:
        """See :class:`erase_rec.schedule.step_graphs.StepParts`."""
        norms: dict[str, Tensor] = {}

        def check(state: StepState, op: Op) -> None:
            state.output = _output(state, norms, flags)
            if self.device().type != "cuda":
                self._look_at(state.output, state.batch)

        def metrics(state: StepState, op: Op) -> None:
            if self._metrics is not None:
                self._metrics.update(state.output, state.batch.label)

        def update(state: StepState, op: Op) -> None:
            blocks = self._gradients.updated_blocks(op)
            gradients = {block: self._take_gradients(block) for block in blocks}
            if state.measure:
                norms.update({block: _norm(found.values()) for block, found in gradients.items()})
            together = {name: gradient for found in gradients.values() for name, gradient in found.items()}
            for block in blocks if self._gradients.plan.optimizer == "per_tower" else self._optimizer.blocks:
                self._optimizer.step(block, together, self._max_grad_norm)
            for block in blocks:
                self._gradients.finish(block)

        def table_gradient(state: StepState, op: Op) -> None:
            state.table_gradient = self._gradients.pooled_gradient(state)
            if state.measure and state.table_gradient is not None:
                norms["embeddings"] = _norm([state.table_gradient])

        def table_update(state: StepState, op: Op) -> None:
            table_gradient(state, op)
            self._update_tables(state, op)

        finish = {
            "check": check,
            "metrics": metrics,
            "update": update,
            "table_gradient": table_gradient,
            "table_update": table_update,
        }
        with matmul_share(self._gradients.plan.matmul_share, self.device()):
            self._gradients.launch_captured(state, finish)
        return state.output

    def launch_after(self, state: StepState) -> None:
        """See :class:`erase_rec.schedule.step_graphs.StepParts`."""
        self._gradients.launch_after(state, {"table_update": self._update_tables})

    def _update_tables(self, state: StepState, op: Op) -> None:
        if state.table_gradient is not None:
            embeddings = self._gradients.model.embeddings
            embeddings.backward_and_update(state.pooled, state.table_gradient, state.order)

    def _take_gradients(self, block: str) -> dict[str, Tensor | None]:
        self._gradients.wait(block)
        return {name: self._gradients.reduction.gradient(block, name) for name in self._gradients.blocks[block]}


def _output(state: StepState, norms: Mapping[str, Tensor], flags: Tensor | None) -> StepOutput:
    """What the step gives; ``norms`` is filled by later operations."""
    loss, local_losses = state.loss().detach(), state.local_losses()
    return StepOutput(
        logit=state.logit().detach(),
        tower_logits={name: state.tower_logit(name).detach() for name in state.micros[0].logits},
        loss=loss,
        finite=all_finite([loss, *local_losses.values()], flags),
        local_losses={name: each.detach() for name, each in local_losses.items()},
        grad_norms=norms,
    )


def _norm(gradients: Iterable[Tensor | None]) -> Tensor:
    """Norm over all that are there, on the device."""
    norms = torch.stack([gradient.float().square().sum() for gradient in gradients if gradient is not None])
    return norms.sum().sqrt()
