"""A kind of step: what of its plan is the same in every step of it, worked out once."""

from __future__ import annotations

from dataclasses import replace

from erase_rec.schedule.plan import OVER_ARCH, Plan, TowerPlan
from erase_rec.schedule.program import Parts, parts, program
from erase_rec.schedule.tower_graphs import Graphs


class Way:
    """A kind of step: the configured one, or the one in which nothing is cut."""

    def __init__(self, plan: Plan, graphs: Graphs) -> None:
        self.plan, self.graphs = plan, graphs
        self.towers = {tower.name: tower for tower in plan.towers}
        self.late_losses = [tower.name for tower in plan.towers if tower.loss is not None and not tower.early]
        self.train_tables = {tower.name for tower in plan.towers if leaf_needs_gradient(plan, tower)}
        self._parts: dict[int, Parts] = {}

    def parts(self, micro_batches: int) -> Parts:
        """The operations of a step over so many micro-batches."""
        if micro_batches not in self._parts:
            self._parts[micro_batches] = parts(program(replace(self.plan, micro_batches=micro_batches)))
        return self._parts[micro_batches]


def leaf_needs_gradient(plan: Plan, tower: TowerPlan) -> bool:
    """Whether a loss that may train the tables reaches this tower."""
    losses = plan.losses_reaching(tower.name)
    allowed = plan.embedding_gradient
    return (allowed in {"main", "both"} and OVER_ARCH in losses) or (
        allowed in {"local", "both"} and bool(losses - {OVER_ARCH})
    )
