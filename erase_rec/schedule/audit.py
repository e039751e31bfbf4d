"""Which loss trains which parameter, found by asking autograd on a real batch.

The main doubt about early backward is whether a detached tower gets any gradient, and from which loss. The audit
answers it for a running model and a plan, independent of the code that runs the schedule: it runs the towers and
the over-arch itself, differentiates each loss alone, and holds the result against the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch
from erase_rec.protocols import CTRModel, LocalLoss
from erase_rec.schedule.gradients import named_parameters
from erase_rec.schedule.plan import Plan

MAIN_LOSS = "main"
OVER_ARCH = "over_arch"
EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class AuditReport:
    """Norms of the gradient that each loss gives to each block.

    Attributes:
        norms: ``norms[block][loss]`` for blocks ``<tower>``, ``over_arch`` and ``embeddings`` and losses
            ``main`` and ``<tower>``; a loss that does not reach a block is absent. Weights are included.
        never_trained: dense parameters that no loss reaches.
        findings: what contradicts the plan, one sentence each; empty when the model trains as declared.
    """

    norms: Mapping[str, Mapping[str, float]]
    never_trained: tuple[str, ...]
    findings: tuple[str, ...]


def audit(model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch) -> AuditReport:
    """Differentiates every loss of the plan alone on ``batch``; changes no parameter.

    Synchronises the host. Runs in the model's precision without autocast.
    """
    pooled = model.embeddings(batch.sparse).detach().requires_grad_()
    outputs: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    for tower in plan.towers:
        outputs[tower.name], logits[tower.name] = model.tower(tower.name)(batch.dense, pooled)
    scalars = _losses(model, plan, losses, batch, outputs, logits)
    parameters = {tower.name: named_parameters(model.tower(tower.name), tower.name) for tower in plan.towers}
    parameters[OVER_ARCH] = named_parameters(model.over_arch, OVER_ARCH)

    norms: dict[str, dict[str, float]] = {block: {} for block in (*parameters, EMBEDDINGS)}
    reached: set[str] = set()
    for loss_name, scalar in scalars.items():
        for block, named in parameters.items():
            gradients = torch.autograd.grad(scalar, list(named.values()), retain_graph=True, allow_unused=True)
            reached |= {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
            _put(norms[block], loss_name, gradients)
        if _reaches_tables(plan, loss_name):
            _put(
                norms[EMBEDDINGS],
                loss_name,
                torch.autograd.grad(scalar, [pooled], retain_graph=True, allow_unused=True),
            )
    never = tuple(name for named in parameters.values() for name in named if name not in reached)
    return AuditReport(norms, never, tuple(_findings(plan, norms, never)))


def _losses(
    model: CTRModel,
    plan: Plan,
    losses: Mapping[str, LocalLoss],
    batch: Batch,
    outputs: Mapping[str, Tensor],
    logits: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Weighted local losses and the main loss, with the plan's cuts."""
    scalars: dict[str, Tensor] = {}
    for tower in plan.towers:
        if tower.loss is not None and tower.name in losses:
            logit = logits[tower.name]
            if tower.loss.target == "joint":
                logit = logit + sum(other.detach() for name, other in logits.items() if name != tower.name)
            scalars[tower.name] = tower.loss.weight * losses[tower.name](logit, batch.label)
    cut = {tower.name: tower.detach for tower in plan.towers}
    logit = model.over_arch(
        [output.detach() if cut[name] else output for name, output in outputs.items()],
        [logit.detach() if cut[name] else logit for name, logit in logits.items()],
    )
    scalars[MAIN_LOSS] = binary_cross_entropy_with_logits(logit, batch.label.to(logit.dtype))
    return scalars


def _reaches_tables(plan: Plan, loss_name: str) -> bool:
    allowed = {"both": {"main", "local"}, "main": {"main"}, "local": {"local"}, "none": set()}
    return ("main" if loss_name == MAIN_LOSS else "local") in allowed[plan.embedding_gradient]


def _put(norms: dict[str, float], loss_name: str, gradients: tuple[Tensor | None, ...]) -> None:
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    if squares:
        norms[loss_name] = float(torch.stack(squares).sum().sqrt())


def _findings(plan: Plan, norms: Mapping[str, Mapping[str, float]], never: tuple[str, ...]) -> list[str]:
    findings = []
    for tower in plan.towers:
        by_loss = norms[tower.name]
        if tower.detach and by_loss.get(tower.name, 0.0) == 0.0:
            findings.append(f"tower {tower.name} is detached and gets no gradient from its own local loss")
        foreign = sorted(loss for loss in by_loss if loss not in {tower.name, MAIN_LOSS})
        if tower.detach and MAIN_LOSS in by_loss:
            foreign.append(MAIN_LOSS)
        findings += [f"the loss of {loss} leaks into tower {tower.name}" for loss in foreign]
        if not tower.detach and MAIN_LOSS not in by_loss:
            findings.append(f"tower {tower.name} is not detached and gets no gradient from the main loss")
    local_in_over_arch = sorted(loss for loss in norms[OVER_ARCH] if loss != MAIN_LOSS)
    findings += [f"the loss of {loss} leaks into the over-arch" for loss in local_in_over_arch]
    findings += [f"parameter {name} is trained by no loss" for name in never]
    if plan.embedding_gradient != "none" and not norms[EMBEDDINGS]:
        findings.append("no loss reaches the embedding tables")
    return findings
