"""What one training step does, as data: blocks, losses, streams, and who waits for whom.

A :class:`Plan` is made from the configuration; :func:`program` turns it into the list of operations that
:mod:`erase_rec.schedule.step` interprets. Early backward is nothing but the place of an operation in this list
and the events it waits for: ``early_backward:i`` needs its tower's forward (and, for the ``joint`` target, one
join of the logits), and nothing of the over-arch (ERASE, arXiv 2608.18469, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from erase_rec.config.schema import Config, TowerConfig

MAIN = "main"
"""Name of the stream that lookup, over-arch, aggregate backward and updates run on."""

OpKind = Literal["lookup", "forward", "logit_join", "early_backward", "over_arch", "backward", "check", "update"]
EmbeddingGradient = Literal["main", "local", "both", "none"]


@dataclass(frozen=True)
class LossPlan:
    """A declared local loss: its factor in the sum of losses and what it is computed on."""

    weight: float
    target: Literal["own", "joint"]


@dataclass(frozen=True)
class TowerPlan:
    """One tower.

    Attributes:
        name: the tower's name.
        stream: name of its stream; ``main`` for the main stream.
        detach: its output and logit are cut before the over-arch.
        early: its backward from the local loss is launched before the over-arch's.
        loss: the local loss, or None.
    """

    name: str
    stream: str
    detach: bool
    early: bool
    loss: LossPlan | None


@dataclass(frozen=True)
class Plan:
    """A whole step."""

    towers: tuple[TowerPlan, ...]
    embedding_gradient: EmbeddingGradient

    @classmethod
    def from_config(cls, config: Config) -> Plan:
        """Reads the plan off a resolved configuration (presets applied, combinations checked)."""
        assert config.schedule.early_backward is not None
        assert config.schedule.embedding_gradient is not None
        return cls(
            tuple(_tower_plan(tower, config.schedule.early_backward) for tower in config.towers),
            config.schedule.embedding_gradient,
        )

    def tower(self, name: str) -> TowerPlan:
        """The plan of the tower of that name."""
        return next(tower for tower in self.towers if tower.name == name)

    def streams(self) -> tuple[str, ...]:
        """Names of the side streams, in order of first use."""
        return tuple(dict.fromkeys(tower.stream for tower in self.towers if tower.stream != MAIN))


def _tower_plan(tower: TowerConfig, early_backward: bool) -> TowerPlan:
    assert tower.detach is not None
    assert tower.stream is not None
    loss = LossPlan(tower.loss.weight, tower.loss.target) if tower.loss and tower.loss.weight > 0 else None
    return TowerPlan(
        name=tower.name,
        # A tower's own stream cannot collide with a shared one: tower names hold no colon.
        stream=f"tower:{tower.name}" if tower.stream == "own" else tower.stream,
        detach=tower.detach,
        early=early_backward and tower.detach and loss is not None,
        loss=loss,
    )


@dataclass(frozen=True)
class Op:
    """One operation of a step.

    Attributes:
        kind: what is done.
        stream: where.
        tower: for which tower, where that applies.
        waits: keys of the operations that must have finished on the device first. Operations on one stream
            finish in order of launch, so a wait inside a stream costs nothing.
    """

    kind: OpKind
    stream: str = MAIN
    tower: str | None = None
    waits: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """``kind`` or ``kind:tower``; unique in a program."""
        return self.kind if self.tower is None else f"{self.kind}:{self.tower}"


def program(plan: Plan) -> tuple[Op, ...]:
    """The operations of one step in launch order.

    A tower with an early backward on its own logit is launched whole (forward, local loss, backward) before the
    next tower's forward. The ``joint`` target needs all logits of the batch, so those towers' backwards follow
    one ``logit_join``. The over-arch waits for the towers' forwards only; updates wait for everything.
    """
    ops = [Op("lookup")]
    forwards = tuple(f"forward:{tower.name}" for tower in plan.towers)
    joint_losses = [tower for tower in plan.towers if tower.loss and tower.loss.target == "joint"]
    for tower in plan.towers:
        ops.append(Op("forward", tower.stream, tower.name, ("lookup",)))
        if tower.early and tower not in joint_losses:
            ops.append(Op("early_backward", tower.stream, tower.name, (f"forward:{tower.name}",)))
    if joint_losses:
        ops.append(Op("logit_join", waits=forwards))
    for tower in joint_losses:
        if tower.early:
            waits = (f"forward:{tower.name}", "logit_join")
            ops.append(Op("early_backward", tower.stream, tower.name, waits))
    ops.append(Op("over_arch", waits=forwards))
    ops.append(Op("backward", waits=("over_arch", *(("logit_join",) if joint_losses else ()))))
    early = tuple(op.key for op in ops if op.kind == "early_backward")
    ops.append(Op("check", waits=("backward", *early)))
    ops.append(Op("update", waits=("check",)))
    return tuple(ops)
