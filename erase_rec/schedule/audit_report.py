"""What an audit found, for the terminal, TensorBoard and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from erase_rec.schedule.plan import MAIN_LOSS
from erase_rec.text_table import TextTable


@dataclass(frozen=True)
class EarlyLaunch:
    """One early backward, as it was launched; host milliseconds from the step's start.

    Attributes:
        step: audited batch, from 0.
        tower: whose.
        micro: micro-batch.
        norm: norm of the gradient that it gave to the tower's parameters, losses' weights included.
        position: place in the order in which the host launched the step's operations, from 1.
        operations: how many the host launched.
        thread: name of the thread that launched it.
        forward_ms: when the tower's forward had been launched.
        launch_ms: when the launch began.
        end_ms: when the host had launched it (on the CPU: when it was done).
        over_arch_ms: when the launch of the over-arch's forward began.
    """

    step: int
    tower: str
    micro: int
    norm: float
    position: int
    operations: int
    thread: str
    forward_ms: float
    launch_ms: float
    end_ms: float
    over_arch_ms: float

    @property
    def before_over_arch(self) -> bool:
        """Whether it was launched before the over-arch's forward."""
        return self.launch_ms < self.over_arch_ms


@dataclass(frozen=True)
class AuditReport:
    """Which loss trains which block.

    Attributes:
        norms: ``norms[block][loss]``, norms of gradients, for blocks ``<tower>``, ``over_arch`` and ``embeddings`` and
            losses ``over_arch`` (the main loss) and ``<tower>``; a loss that does not reach a block is absent. Weights
            are included. Of several batches: the smallest.
        launches: each early backward.
        frozen: towers whose parameters are kept by configuration.
        kept: other parameters that do not ask for a gradient, such as heads whose logit nothing uses.
        never_trained: parameters that ask for a gradient and get none.
        untrained: detached towers that get no gradient from their own loss.
        findings: what contradicts the plan, one sentence each; empty when the model trains as declared.
        steps: audited batches.
        exact_every: every so many steps nothing is cut; None: never.
        exact_norms: ``norms`` of such a step.
    """

    norms: Mapping[str, Mapping[str, float]]
    launches: tuple[EarlyLaunch, ...]
    frozen: tuple[str, ...]
    kept: tuple[str, ...]
    never_trained: tuple[str, ...]
    untrained: tuple[str, ...]
    findings: tuple[str, ...]
    steps: int = 1
    exact_every: int | None = None
    exact_norms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the plan."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        fields = asdict(self)
        fields["launches"] = [asdict(each) | {"before_over_arch": each.before_over_arch} for each in self.launches]
        return {"passed": self.passed, **fields}

    def tables(self) -> list[TextTable]:
        """Who trains whom, and the last batch's early launches where there are any."""
        tables = [self._training_table("Which loss trains what", self.norms)]
        if self.exact_every is not None:
            title = f"Which loss trains what where nothing is cut, one step in {self.exact_every}"
            tables.append(self._training_table(title, self.exact_norms))
        if self.launches:
            tables.append(self._launch_table())
        return tables

    def verdict(self) -> list[str]:
        """The findings, or that there are none; a line each."""
        if self.passed:
            return ["audit passed: every block is trained by the losses that the configuration declares, and no other"]
        return [f"audit failed: {len(self.findings)} findings", *(f"- {finding}" for finding in self.findings)]

    def as_markdown(self) -> str:
        """For TensorBoard."""
        return "\n\n".join([*(table.markdown() for table in self.tables()), "\n".join(self.verdict())])

    def _training_table(self, title: str, norms: Mapping[str, Mapping[str, float]]) -> TextTable:
        rows = []
        for block, by_loss in norms.items():
            reached = [f"{_loss_label(loss, block)} {norm:.3g}" for loss, norm in by_loss.items()]
            state = "frozen" if block in self.frozen else "nothing"
            rows.append((block, ", ".join(reached) or state))
        if self.kept:
            rows.append(("kept as they are", ", ".join(self.kept)))
        norm = "gradient norm" if self.steps == 1 else f"smallest gradient norm of {self.steps} batches"
        return TextTable(title, ("block", f"trained by, {norm}"), tuple(rows))

    def _launch_table(self) -> TextTable:
        rows = tuple(
            (
                each.tower if not each.micro else f"{each.tower} @{each.micro}",
                f"{each.norm:.3g}",
                f"{each.position} of {each.operations}",
                f"{each.forward_ms:.2f}",
                f"{each.launch_ms:.2f}",
                f"{each.end_ms:.2f}",
                f"{'before' if each.before_over_arch else 'after'} {each.over_arch_ms:.2f}",
                each.thread,
            )
            for each in self.launches
            if each.step == self.steps - 1
        )
        header = (
            "tower",
            "gradient norm",
            "launched as",
            "forward launched, ms",
            "backward launched, ms",
            "ended, ms",
            "over-arch forward, ms",
            "thread",
        )
        return TextTable("Early backward launches, host time from the step's start", header, rows)


def _loss_label(loss: str, block: str) -> str:
    if loss == MAIN_LOSS:
        return "main loss"
    return "own loss" if loss == block else f"loss of {loss}"


def loss_name(loss: str) -> str:
    """How messages call a loss."""
    return "the main loss" if loss == MAIN_LOSS else f"the local loss of {loss}"


def merge(reports: Sequence[AuditReport]) -> AuditReport:
    """One report of several batches, with the smallest norms, every launch and every finding once."""
    first = reports[0]
    return AuditReport(
        _smallest([report.norms for report in reports]),
        tuple(launch for report in reports for launch in report.launches),
        first.frozen,
        first.kept,
        _united([report.never_trained for report in reports]),
        _united([report.untrained for report in reports]),
        _united([report.findings for report in reports]),
        len(reports),
        first.exact_every,
        _smallest([report.exact_norms for report in reports]),
    )


def _smallest(several: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The smallest norm of each block and loss."""
    norms: dict[str, dict[str, float]] = {block: {} for block in several[0]}
    for found in several:
        for block, by_loss in found.items():
            for loss, norm in by_loss.items():
                norms[block][loss] = min(norm, norms[block].get(loss, norm))
    return norms


def of_ranks(reports: Sequence[AuditReport]) -> AuditReport:
    """The first rank's report with every rank's findings."""
    return replace(reports[0], findings=_united([report.findings for report in reports]))


def _united(parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for part in parts for entry in part))
