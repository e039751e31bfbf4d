"""One training step as one callable: the plan's gradients, then the finiteness check and the updates."""

from __future__ import annotations

import torch
from torch import Tensor

from erase_rec.batch import Batch, StepOutput
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import FiniteGuard
from erase_rec.schedule.gradients import GradientProgram, StepState
from erase_rec.schedule.plan import Op

MAIN_LOSS = "over_arch"
"""Name of the main loss beside the towers' in messages and gradient norms."""
DENSE_BLOCK = "dense"
"""Block of all dense parameters."""


class ScheduledStep:
    """Implements :class:`erase_rec.protocols.TrainStep` for every plan.

    Dense parameters are updated with the optimizer's current learning rate, then each table once with the summed
    gradient of the pooled embeddings; both on the main stream, after every backward of the step.
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
            optimizer: over exactly ``gradients.dense_parameters()``, in the one block :data:`DENSE_BLOCK`.
            guard: refuses non-finite losses before the update.
            max_grad_norm: global norm that the dense gradients are clipped to.
        """
        self._gradients = gradients
        self._optimizer = optimizer
        self._guard = guard
        self._max_grad_norm = max_grad_norm
        self._parameters = gradients.dense_parameters()

    def device(self) -> torch.device:
        """The model's device."""
        return self._gradients.device

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """See :class:`erase_rec.protocols.TrainStep`."""
        norms: dict[str, Tensor] = {}

        def check(state: StepState, op: Op) -> None:
            self._guard.check({MAIN_LOSS: state.loss} | state.local_losses, batch.row_ids)
            if measure:
                norms.update(self._norms(state))

        def update(state: StepState, op: Op) -> None:
            self._update(state)

        state = self._gradients.run(batch, {"check": check, "update": update})
        return StepOutput(
            logit=state.logit.detach(),
            tower_logits={name: logit.detach() for name, logit in state.logits.items()},
            loss=state.loss.detach(),
            local_losses={name: loss.detach() for name, loss in state.local_losses.items()},
            grad_norms=norms,
        )

    def _update(self, state: StepState) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = state.gradients[name]
        if self._max_grad_norm is not None:
            self._optimizer.clip(DENSE_BLOCK, self._max_grad_norm)
        self._optimizer.step(DENSE_BLOCK)
        pooled_gradient = self._gradients.pooled_gradient(state)
        if pooled_gradient is not None:
            self._gradients.model.embeddings.backward_and_update(state.pooled, pooled_gradient)

    def _norms(self, state: StepState) -> dict[str, Tensor]:
        """Norm of each block's gradient before clipping, on the device."""
        blocks: dict[str, list[Tensor]] = {}
        for name, gradient in state.gradients.items():
            if gradient is not None:
                block = MAIN_LOSS if name.startswith("over_arch.") else name.split(".")[1]
                blocks.setdefault(block, []).append(gradient)
        pooled_gradient = self._gradients.pooled_gradient(state)
        if pooled_gradient is not None:
            blocks["embeddings"] = [pooled_gradient]
        return {block: _norm(gradients) for block, gradients in blocks.items()}


def _norm(gradients: list[Tensor]) -> Tensor:
    norms = torch.stack([gradient.float().square().sum() for gradient in gradients])
    return norms.sum().sqrt()
