"""What one training step does, as data: blocks, losses, streams, dispatch, reduction, updates.

A :class:`Plan` is made from the configuration; :mod:`erase_rec.schedule.program` turns it into operations. Towers stand
side by side, or in chains: a tower may read the outputs of earlier ones, cut where those are detached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from erase_rec.config.parameters_beside import hindrance
from erase_rec.config.schema import Config, TowerConfig

MAIN = "main"
"""Name of the stream that lookup, over-arch, aggregate backward and table updates run on."""
BESIDE = "main:beside"
"""Name of the stream of work that nothing in a step waits for before its end: sorting ids, sums of metrics."""
MAIN_LOSS = "over_arch"
"""Name of the main loss beside the towers' in messages and gradient norms."""
OVER_ARCH = "over_arch"
"""Name of the over-arch's block beside the towers'."""

EmbeddingGradient = Literal["main", "local", "both", "none"]
Reduction = Literal["ddp", "ddp_per_tower", "bucket"]


@dataclass(frozen=True)
class LossPlan:
    """A declared local loss.

    Attributes:
        weight: its factor in the sum of losses.
        target: what it is computed on.
    """

    weight: float
    target: Literal["own", "joint"]


@dataclass(frozen=True)
class TowerPlan:
    """One tower.

    Attributes:
        name: the tower's name.
        stream: name of its stream; ``main`` for the main stream.
        detach: its output and logit are cut before the over-arch and before towers that read them.
        early: its backward from the local loss is launched before the over-arch's.
        loss: the local loss, or None.
        inputs: earlier towers whose outputs it reads.
        frozen: its parameters stay as they are.
    """

    name: str
    stream: str
    detach: bool
    early: bool
    loss: LossPlan | None
    inputs: tuple[str, ...] = ()
    frozen: bool = False


@dataclass(frozen=True)
class Plan:
    """A whole step.

    Attributes:
        towers: in configuration order, each after those that it reads.
        embedding_gradient: whose gradients reach the tables.
        dispatch: who calls an early backward: the main thread, or a worker.
        workers: number of workers.
        reduction: how gradients are averaged over ranks; None: not at all.
        find_unused_parameters: FUP of ``ddp``.
        optimizer: one update at the end, or one a tower on its stream.
        micro_batches: parts that a batch is cut into.
        cuda_graph: ``tower``: early towers are captured once and replayed; ``step``: the whole step is; ``dense``: all
            between the tables' lookup and their update is.
        launch_order: all towers in the order in which the host launches them, each after those that it reads;
            empty: as they stand.
        high_priority: towers whose streams' kernels the device starts before those of others.
        exact_every: every so many steps nothing is cut; None: never.
        parameters_beside: gradients that only a block's parameters need run beside its backward.
        may_run_beside: that is possible.
        matmul_share: share of a CUDA device's multiprocessors that matrix products' kernels are chosen for.
    """

    towers: tuple[TowerPlan, ...]
    embedding_gradient: EmbeddingGradient
    dispatch: Literal["blocking", "non_blocking"] = "blocking"
    workers: int = 1
    reduction: Reduction | None = None
    find_unused_parameters: bool = False
    optimizer: Literal["end", "per_tower"] = "end"
    micro_batches: int = 1
    cuda_graph: Literal["none", "tower", "dense", "step"] = "none"
    launch_order: tuple[str, ...] = ()
    high_priority: tuple[str, ...] = ()
    exact_every: int | None = None
    parameters_beside: bool = False
    may_run_beside: bool = False
    matmul_share: float = 1.0

    @classmethod
    def from_config(cls, config: Config, world_size: int = 1) -> Plan:
        """Reads the plan off a resolved configuration (presets applied, combinations checked)."""
        schedule, distributed = config.schedule, config.distributed
        assert schedule.early_backward is not None
        assert schedule.dispatch is not None
        assert schedule.embedding_gradient is not None
        assert schedule.optimizer is not None
        assert schedule.cuda_graph is not None
        return cls(
            towers=tuple(_tower_plan(tower, schedule.early_backward) for tower in config.towers),
            embedding_gradient=schedule.embedding_gradient,
            dispatch=schedule.dispatch,
            workers=schedule.workers,
            reduction=distributed.reduction or ("bucket" if world_size > 1 else None),
            find_unused_parameters=bool(distributed.find_unused_parameters),
            optimizer=schedule.optimizer,
            micro_batches=config.train.micro_batches,
            cuda_graph=schedule.cuda_graph,
            launch_order=schedule.launch_order,
            high_priority=schedule.high_priority,
            exact_every=schedule.exact_every,
            parameters_beside=schedule.parameters_beside,
            may_run_beside=hindrance(config) is None,
            matmul_share=schedule.matmul_share,
        )

    def is_exact(self, step: int) -> bool:
        """Whether nothing is cut in the step of that number, from 0: in the last of every ``exact_every``."""
        return self.exact_every is not None and (step + 1) % self.exact_every == 0

    def exact(self) -> Plan:
        """The plan of the steps in which nothing is cut: the same losses, towers and streams, and one backward."""
        towers = tuple(replace(tower, detach=False, early=False) for tower in self.towers)
        return replace(self, towers=towers, exact_every=None)

    def of_step(self, step: int) -> Plan:
        """The plan of the step of that number, from 0."""
        return self.exact() if self.is_exact(step) else self

    def tower(self, name: str) -> TowerPlan:
        """The plan of the tower of that name."""
        return next(tower for tower in self.towers if tower.name == name)

    def launched(self) -> tuple[TowerPlan, ...]:
        """The towers in the order in which the host launches them."""
        return tuple(map(self.tower, self.launch_order)) if self.launch_order else self.towers

    def trained(self) -> tuple[TowerPlan, ...]:
        """Towers whose parameters are updated."""
        return tuple(tower for tower in self.towers if not tower.frozen)

    def streams(self) -> tuple[str, ...]:
        """Names of the side streams, in order of first use."""
        towers = dict.fromkeys(tower.stream for tower in self.towers if tower.stream != MAIN)
        return (*towers, BESIDE) if towers else ()

    def preferred(self) -> frozenset[str]:
        """Names of the side streams whose kernels the device starts before those of others."""
        return frozenset(self.tower(name).stream for name in self.high_priority) - {MAIN}

    def beside(self) -> str:
        """Stream of work that nothing waits for before the step's end; the main one where that is the only stream."""
        return BESIDE if self.streams() else MAIN

    def losses_reaching(self, name: str) -> frozenset[str]:
        """Names of the losses (towers' and the main one) whose gradient flows into a tower's output or logit."""
        tower = self.tower(name)
        reaching = {name} if tower.loss is not None else set()
        if not tower.detach:
            reaching.add(MAIN_LOSS)
            for reader in self.towers:
                if name in reader.inputs:
                    reaching |= self.losses_reaching(reader.name)
        return frozenset(reaching)


def _tower_plan(tower: TowerConfig, early_backward: bool) -> TowerPlan:
    assert tower.detach is not None
    assert tower.stream is not None
    loss = None
    if tower.loss and tower.loss.weight > 0:
        loss = LossPlan(tower.loss.weight, tower.loss.target)
    return TowerPlan(
        name=tower.name,
        # A tower's own stream cannot collide with a shared one: tower names hold no colon.
        stream=f"tower:{tower.name}" if tower.stream == "own" else tower.stream,
        detach=tower.detach,
        early=early_backward and tower.detach and loss is not None,
        loss=loss,
        inputs=tower.inputs.towers,
        frozen=tower.frozen,
    )
