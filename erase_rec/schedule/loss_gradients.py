"""The gradient of each loss alone, by plain autograd: what an audit holds a schedule against.

Nothing here runs a plan's program. Towers and over-arch are called one after the other, cut where the plan says so, and
each loss is differentiated by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch
from erase_rec.protocols import CTRModel, LocalLoss
from erase_rec.schedule.gradients import named_parameters
from erase_rec.schedule.plan import MAIN_LOSS, OVER_ARCH, Plan

EMBEDDINGS = "embeddings"
"""Name of the tables' block beside the towers' and the over-arch's."""


@dataclass
class LossGradients:
    """Gradients of a batch's losses.

    Attributes:
        norms: ``norms[block][loss]``; a loss that does not reach a block is absent.
        parameters: sum over the losses, by parameter that asks for a gradient; None where no loss reaches.
        pooled: [B, E], sum over the losses that the plan lets through to the tables; None where it lets none.
    """

    norms: dict[str, dict[str, float]]
    parameters: dict[str, Tensor | None]
    pooled: Tensor | None = None


def all_blocks(model: CTRModel, plan: Plan) -> dict[str, dict[str, nn.Parameter]]:
    """All dense parameters, trained or not, by block and by the names that gradients go by."""
    blocks = {tower.name: named_parameters(model.tower(tower.name), f"towers.{tower.name}") for tower in plan.towers}
    return blocks | {OVER_ARCH: named_parameters(model.over_arch, OVER_ARCH)}


def loss_gradients(model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch) -> LossGradients:
    """Differentiates each loss alone. Synchronises the host.

    Args:
        model: in the mode that the caller chose.
        plan: cuts, targets and weights.
        losses: the local losses; one that is missing contributes nothing.
        batch: rows on the model's device.
    """
    with torch.no_grad():
        pooled = model.embeddings(batch.sparse)
    pooled = pooled.detach().requires_grad_()
    blocks = {
        block: {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        for block, named in all_blocks(model, plan).items()
    }
    result = LossGradients({block: {} for block in (*blocks, EMBEDDINGS)}, {})
    result.parameters.update((name, None) for named in blocks.values() for name in named)
    for loss, scalar in _losses(model, plan, losses, batch, pooled).items():
        for block, named in blocks.items():
            found = _gradients(scalar, list(named.values()))
            _put(result.norms[block], loss, found)
            for name, gradient in zip(named, found, strict=True):
                result.parameters[name] = _added(result.parameters[name], gradient)
        if _reaches_tables(plan, loss):
            found = _gradients(scalar, [pooled])
            _put(result.norms[EMBEDDINGS], loss, found)
            result.pooled = _added(result.pooled, found[0])
    return result


def gradient_norm(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Norm over all that are there, float64 on the device; None where none is."""
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    return torch.stack(squares).sum().sqrt() if squares else None


def _gradients(scalar: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    if not scalar.requires_grad or not inputs:
        return [None] * len(inputs)
    found: Sequence[Tensor | None] = torch.autograd.grad(scalar, inputs, retain_graph=True, allow_unused=True)
    return found


def _losses(
    model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch, pooled: Tensor
) -> dict[str, Tensor]:
    """Weighted local losses and the main loss, with the plan's cuts."""
    outputs: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    cut = {tower.name: tower.detach for tower in plan.towers}

    def read(values: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        return [values[name].detach() if cut[name] else values[name] for name in names]

    for tower in plan.towers:
        block = model.tower(tower.name)
        outputs[tower.name], logits[tower.name] = block(batch.dense, pooled, read(outputs, tower.inputs))
    scalars: dict[str, Tensor] = {}
    for tower in plan.towers:
        if tower.loss is not None and tower.name in losses:
            logit = logits[tower.name]
            if tower.loss.target == "joint":
                logit = logit + sum(other.detach() for name, other in logits.items() if name != tower.name)
            scalars[tower.name] = tower.loss.weight * losses[tower.name](logit, batch.label)
    names = list(outputs)
    logit = model.over_arch(read(outputs, names), read(logits, names))
    scalars[MAIN_LOSS] = binary_cross_entropy_with_logits(logit, batch.label.to(logit.dtype))
    return scalars


def _reaches_tables(plan: Plan, loss: str) -> bool:
    allowed = {"both": {"main", "local"}, "main": {"main"}, "local": {"local"}, "none": set()}
    return ("main" if loss == MAIN_LOSS else "local") in allowed[plan.embedding_gradient]


def _put(norms: dict[str, float], loss: str, gradients: Sequence[Tensor | None]) -> None:
    norm = gradient_norm(gradients)
    if norm is not None:
        norms[loss] = float(norm)


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient
