"""Proves which loss trains which parameter, and that the schedule does what its plan says.

The main doubt about early backward is whether a detached tower gets any gradient, and from which loss. The audit
answers it twice. It differentiates each loss alone (:mod:`erase_rec.schedule.loss_gradients`) and holds the result
against the plan, independent of the code that runs the schedule. Then it runs the schedule, up to the gradients, and
holds those against its own: what bypasses the checks of the configuration shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from erase_rec.batch import Batch
from erase_rec.errors import UserError
from erase_rec.protocols import CTRModel, LocalLoss
from erase_rec.run_log import RunLog
from erase_rec.schedule.audit_report import AuditReport, EarlyLaunch, loss_name
from erase_rec.schedule.gradients import GradientProgram, Gradients, trained_blocks
from erase_rec.schedule.loss_gradients import EMBEDDINGS, LossGradients, all_blocks, gradient_norm, loss_gradients
from erase_rec.schedule.measured_streams import Interval, MeasuredStreams
from erase_rec.schedule.plan import MAIN_LOSS, OVER_ARCH, Plan, TowerPlan
from erase_rec.schedule.program import Op
from erase_rec.schedule.reduction.reduction import Blocks, NoReduction
from erase_rec.schedule.streams import accumulators_elsewhere, make_streams

TOLERANCE = 1e-3
"""Largest difference between the schedule's gradient and the losses' own, relative to the block's norm. Other orders
of summation, micro-batches and TF32 differ by less; a loss, a micro-batch or a cut that is missing differs by more."""
BF16_TOLERANCE = 2e-2
"""The same in bf16, whose every rounding is up to 0.4 %."""


def audit(model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch, *, step: int = 0) -> AuditReport:
    """Differentiates every loss of the plan alone on ``batch``, then runs the plan; changes nothing.

    Where some steps cut nothing, both kinds of step are audited on the batch.

    Runs in the model's precision and in evaluation mode, because both passes must see the same model: no dropout, and
    running statistics are used and kept. Synchronises the host. On several ranks the tables are looked up as in
    training, so every rank takes part.

    Args:
        model: in training mode; left so.
        plan: what the model is said to do.
        losses: the local losses.
        batch: rows on the model's device.
        step: number of the audited batch, for the report.
    """
    report = _audit_of(model, plan, losses, batch, step)
    if plan.exact_every is None:
        return report
    exact = _audit_of(model, plan.exact(), losses, batch, step)
    findings = (*report.findings, *(f"in a step that cuts nothing: {finding}" for finding in exact.findings))
    return replace(report, exact_every=plan.exact_every, exact_norms=exact.norms, findings=findings)


def _audit_of(model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch, step: int) -> AuditReport:
    """One kind of step."""
    undeclared = [tower.name for tower in plan.towers if tower.loss is not None and tower.name not in losses]
    findings = [f"tower {name} has a local loss in the plan and none in the program" for name in undeclared]
    launches: tuple[EarlyLaunch, ...] = ()
    model.train(False)
    try:
        with accumulators_elsewhere():  # those of a DDP are on the streams of the training step
            own = loss_gradients(model, plan, losses, batch)
            if not undeclared:  # without it the program cannot run
                launches, differences = _run_schedule(model, plan, losses, batch, own, step)
                findings += differences
    finally:
        model.train(True)
    return AuditReport(
        norms=own.norms,
        launches=launches,
        frozen=tuple(tower.name for tower in plan.towers if tower.frozen),
        kept=tuple(
            name
            for block, named in all_blocks(model, plan).items()
            for name, parameter in named.items()
            if not parameter.requires_grad and (block == OVER_ARCH or not plan.tower(block).frozen)
        ),
        never_trained=_never_trained(own),
        untrained=tuple(tower.name for tower in plan.towers if _untrained(tower, own)),
        findings=(*_contradictions(plan, own), *findings),
    )


def startup_audit(
    model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch, log: RunLog
) -> AuditReport:
    """Audits the first batch of a run and logs the text ``audit``; every rank takes part.

    Raises:
        UserError: a detached tower gets no gradient from its own loss.
    """
    report = audit(model, plan, losses, batch)
    log.text("audit", report.as_markdown())
    if report.untrained:
        raise UserError(
            f"detached towers that get no gradient from their own local loss: {', '.join(report.untrained)}; "
            "they would never be trained: give each a loss with a weight above 0, or set its detach to false"
        )
    return report


def _run_schedule(
    model: CTRModel, plan: Plan, losses: Mapping[str, LocalLoss], batch: Batch, own: LossGradients, step: int
) -> tuple[tuple[EarlyLaunch, ...], list[str]]:
    """The plan's program without reduction and update: its early launches, and where its gradients are others."""
    device = batch.label.device
    streams = MeasuredStreams(make_streams(plan.streams(), device), device)
    reduction = _RecordingReduction(trained_blocks(model, plan))
    program = GradientProgram(model, plan, losses, streams, device=device, reduction=reduction)
    gradients = program.gradients(batch)
    launches = tuple(_early_launches(streams.intervals(), reduction.norms, step))
    launched = {launch.tower for launch in launches}
    missing = [
        f"tower {tower.name} is to launch its backward early and never did"
        for tower in plan.towers
        if tower.early and tower.name not in launched
    ]
    return launches, [*missing, *_differences(all_blocks(model, plan), own, gradients)]


class _RecordingReduction(NoReduction):
    """Reduces nothing; keeps the norm of what each backward gave to a block, in order of micro-batches."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.norms: dict[str, list[Tensor | None]] = {block: [] for block in blocks}

    def _add(self, block: str, found: Mapping[str, Tensor | None]) -> None:
        super()._add(block, found)
        self.norms[block].append(gradient_norm(found.values()))


def _early_launches(
    intervals: Sequence[Interval], norms: Mapping[str, Sequence[Tensor | None]], step: int
) -> Iterator[EarlyLaunch]:
    by_key = {interval.op.key: interval for interval in intervals}
    for position, interval in enumerate(intervals, start=1):
        op = interval.op
        if op.kind != "early_backward" or op.tower is None:
            continue
        given = norms[op.tower][op.micro : op.micro + 1]  # empty where a backward gave nothing
        yield EarlyLaunch(
            step=step,
            tower=op.tower,
            micro=op.micro,
            norm=sum(float(norm) for norm in given if norm is not None),
            position=position,
            operations=len(intervals),
            thread=interval.thread,
            forward_ms=by_key[op.key.replace(op.kind, "forward")].launched_ms,
            launch_ms=interval.launch_ms,
            end_ms=interval.launched_ms,
            over_arch_ms=by_key[Op("over_arch", micro=op.micro).key].launch_ms,
        )


def _differences(blocks: Blocks, own: LossGradients, found: Gradients) -> Iterator[str]:
    """Where the schedule's gradients are not the losses' own."""
    for block, named in blocks.items():
        trained = [name for name, parameter in named.items() if parameter.requires_grad]
        yield from _compare(
            "the over-arch" if block == OVER_ARCH else f"tower {block}",
            {name: own.parameters[name] for name in trained},
            {name: found.parameters.get(name) for name in trained},
        )
    yield from _compare("the embeddings", {"pooled embeddings": own.pooled}, {"pooled embeddings": found.pooled})


def _compare(where: str, own: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> Iterator[str]:
    pairs = [(name, expected, found[name]) for name, expected in own.items()]
    missing = [name for name, expected, got in pairs if expected is not None and got is None and bool(expected.any())]
    extra = [name for name, expected, got in pairs if expected is None and got is not None and bool(got.any())]
    if missing:
        yield f"{where}: the schedule gives no gradient to {', '.join(missing)}"
    if extra:
        yield f"{where}: the schedule gives a gradient to {', '.join(extra)}, which no loss reaches"
    both = [(expected, got) for _, expected, got in pairs if expected is not None and got is not None]
    difference = gradient_norm([expected - got for expected, got in both])
    norm = gradient_norm([expected for expected, _ in both])
    in_bf16 = any(expected.dtype == torch.bfloat16 for expected, _ in both)
    tolerance = BF16_TOLERANCE if in_bf16 else TOLERANCE
    if difference is not None and norm is not None and float(difference) > tolerance * float(norm):
        share = 100 * float(difference) / float(norm)
        yield f"{where}: the schedule's gradient differs from that of the losses by {share:.3g} % of its norm"


def _untrained(tower: TowerPlan, own: LossGradients) -> bool:
    return tower.detach and not tower.frozen and own.norms[tower.name].get(tower.name, 0.0) == 0.0


def _never_trained(own: LossGradients) -> tuple[str, ...]:
    return tuple(name for name, gradient in own.parameters.items() if gradient is None)


def _contradictions(plan: Plan, own: LossGradients) -> Iterator[str]:
    """Where the losses' gradients are not what the plan says."""
    for tower in plan.towers:
        reached = own.norms[tower.name]
        expected = frozenset[str]() if tower.frozen else plan.losses_reaching(tower.name)
        if _untrained(tower, own):
            yield f"tower {tower.name} is detached and gets no gradient from its own local loss"
            expected -= {tower.name}
        for loss in sorted(reached.keys() - expected - {tower.name}):
            yield f"{loss_name(loss)} leaks into tower {tower.name}"
        if tower.frozen and tower.name in reached:
            yield f"tower {tower.name} is frozen and its local loss trains it"
        for loss in sorted(loss for loss in expected if reached.get(loss, 0.0) == 0.0):
            yield f"tower {tower.name} gets no gradient from {loss_name(loss)}"
    for loss in sorted(own.norms[OVER_ARCH].keys() - {MAIN_LOSS}):
        yield f"{loss_name(loss)} leaks into the over-arch"
    if own.norms[OVER_ARCH].get(MAIN_LOSS, 0.0) == 0.0:
        yield "the over-arch gets no gradient from the main loss"
    if never := _never_trained(own):
        yield f"no loss trains {', '.join(never)}"
    if plan.embedding_gradient != "none" and not own.norms[EMBEDDINGS]:
        yield "no loss reaches the embedding tables"
