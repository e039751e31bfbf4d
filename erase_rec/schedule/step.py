"""One training step as one callable: the plan's gradients, then the finiteness check and the updates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from erase_rec.batch import Batch, StepOutput
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import FiniteGuard
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.plan import MAIN_LOSS
from erase_rec.schedule.program import Op
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
    ) -> None:
        """Binds gradients to their optimizers.

        Args:
            gradients: runs the plan.
            optimizer: over the blocks of ``gradients``; or, where the plan updates at the end, over
                ``gradients.dense_parameters()`` in the one block :data:`DENSE_BLOCK`.
            guard: refuses non-finite losses before the update.
            max_grad_norm: norm that the gradients of each of the optimizer's blocks are clipped to.
        """
        self._gradients = gradients
        self._optimizer = optimizer
        self._guard = guard
        self._max_grad_norm = max_grad_norm

    def device(self) -> torch.device:
        """The model's device."""
        return self._gradients.device

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """See :class:`erase_rec.protocols.TrainStep`."""
        self._guard.drain()  # host synchronisation on CUDA, before any work and any collective of this step
        norms: dict[str, Tensor] = {}

        def check(state: StepState, op: Op) -> None:
            self._guard.check({MAIN_LOSS: state.loss()} | state.local_losses(), batch.row_ids)

        def update(state: StepState, op: Op) -> None:
            blocks = self._gradients.updated_blocks(op)
            self._take_gradients(blocks)
            if measure:
                norms.update({block: _norm(self._of_block(block)) for block in blocks})
            self._update(blocks if self._gradients.plan.optimizer == "per_tower" else self._optimizer.blocks)
            for block in blocks:
                self._gradients.finish(block)

        def table_update(state: StepState, op: Op) -> None:
            gradient = self._gradients.pooled_gradient(state)
            if gradient is None:
                return
            if measure:
                norms["embeddings"] = _norm([gradient])
            self._gradients.model.embeddings.backward_and_update(state.pooled, gradient)

        state = self._gradients.run(batch, {"check": check, "update": update, "table_update": table_update})
        return StepOutput(
            logit=state.logit().detach(),
            tower_logits={name: self._gradients.own(state.tower_logit(name)) for name in state.micros[0].logits},
            loss=state.loss().detach(),
            local_losses={name: self._gradients.own(loss) for name, loss in state.local_losses().items()},
            grad_norms=norms,
        )

    def _take_gradients(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            self._gradients.wait(block)
            for name, parameter in self._gradients.blocks[block].items():
                parameter.grad = self._gradients.reduction.gradient(block, name)

    def _of_block(self, block: str) -> list[Tensor]:
        found = [parameter.grad for parameter in self._gradients.blocks[block].values()]
        return [gradient for gradient in found if gradient is not None]

    def _update(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            if self._max_grad_norm is not None:
                self._optimizer.clip(block, self._max_grad_norm)
            self._optimizer.step(block)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Norm over all, on the device."""
    norms = torch.stack([gradient.float().square().sum() for gradient in gradients])
    return norms.sum().sqrt()
