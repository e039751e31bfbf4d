"""A plan as the list of operations of one step, in the order in which the host launches them.

Early backward is nothing but the place of an operation in this list and the events it waits for:
``early_backward:i`` needs its tower's local loss, which needs its tower's forward (and, for the ``joint`` target, one
join of the logits), and nothing of the over-arch (ERASE, arXiv 2608.18469, section 3).

Where tables stay outside a captured step (``cuda_graph: dense``) their operations frame the others: what lies from
``enter`` to ``leave`` reads the pooled embeddings, leaves their gradient behind, and is captured (:func:`parts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from erase_rec.schedule.plan import MAIN, Plan, TowerPlan

OpKind = Literal[
    "lookup",
    "order",
    "enter",
    "forward",
    "logit_join",
    "local_loss",
    "early_backward",
    "over_arch",
    "join",
    "check",
    "metrics",
    "backward",
    "reduce",
    "update",
    "table_gradient",
    "table_update",
    "leave",
    "end",
]


@dataclass(frozen=True)
class Op:
    """One operation of a step.

    Attributes:
        kind: what is done.
        stream: where.
        tower: for which tower, where that applies.
        waits: keys of the operations that must have finished on the device first. Operations on one stream
            finish in order of launch, so a wait inside a stream costs nothing.
        micro: for which micro-batch.
        worker: number of the worker thread that launches it; 0: the main thread.
        joins: keys of operations that a worker must have launched before the host goes on to this one. The event of
            an operation that is not launched yet cannot be waited for.
    """

    kind: OpKind
    stream: str = MAIN
    tower: str | None = None
    waits: tuple[str, ...] = ()
    micro: int = 0
    worker: int = 0
    joins: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """``kind`` or ``kind:tower``, with ``@m`` from the second micro-batch on; unique in a program."""
        name = self.kind if self.tower is None else f"{self.kind}:{self.tower}"
        return name if self.micro == 0 else f"{name}@{self.micro}"


class Parts(NamedTuple):
    """A program in the parts that a step graph tells apart, one after the other on the main stream.

    Attributes:
        before: launched operation by operation: what tables do first, where they stay outside.
        captured: what the graph holds; its last operation joins all streams on the main one.
        after: launched operation by operation: what tables do with their gradient.
    """

    before: tuple[Op, ...]
    captured: tuple[Op, ...]
    after: tuple[Op, ...]


def parts(ops: Sequence[Op]) -> Parts:
    """What lies before ``enter``, from it to ``leave``, and after; without them all is to be captured."""
    kinds = [op.kind for op in ops]
    start = kinds.index("enter") if "enter" in kinds else 0
    stop = kinds.index("leave") + 1 if "leave" in kinds else len(kinds)
    return Parts(tuple(ops[:start]), tuple(ops[start:stop]), tuple(ops[stop:]))


def program(plan: Plan) -> tuple[Op, ...]:
    """The operations of one step in launch order.

    A tower with an early backward on its own logit is launched whole (forward, local loss, backward, and with
    ``bucket`` its reduction) before the next tower's forward. The ``joint`` target needs all logits of the batch, so
    those towers' losses follow one ``logit_join``. The over-arch waits for the towers' forwards only, and the main
    thread's backward for nothing of the towers' early backwards, except under ``ddp``: its one reducer reads every
    gradient there. Reductions of backwards that a worker launches are issued once the over-arch is launched: the
    earliest point that is the same on all ranks whatever the workers' pace.
    """
    return _Builder(plan).build()


class _Builder:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ops: list[Op] = []
        self._launched_by_worker: set[str] = set()
        self._last = plan.micro_batches - 1
        self._towers = plan.launched()
        self._early = [tower for tower in self._towers if tower.early]
        self._by_worker = plan.dispatch == "non_blocking"
        self._tables_apart = plan.cuda_graph == "dense"
        self._input = "enter" if self._tables_apart else "lookup"

    def build(self) -> tuple[Op, ...]:
        self._add("lookup")
        if self._plan.embedding_gradient != "none":
            self._add("order", waits=["lookup"], stream=self._plan.beside())
        if self._tables_apart:
            self._add("enter", waits=["lookup"])
        for micro in range(self._plan.micro_batches):
            self._forward(micro)
            if micro < self._last:
                self._backward(micro)
        self._between_forward_and_backward()
        self._backward(self._last)
        self._after_backward()
        return tuple(self._ops)

    def _add(
        self,
        kind: OpKind,
        tower: TowerPlan | None = None,
        waits: Iterable[str] = (),
        *,
        micro: int = 0,
        stream: str | None = None,
        worker: int = 0,
    ) -> str:
        waits = tuple(waits)
        joins = () if worker else tuple(key for key in waits if key in self._launched_by_worker)
        name = None if tower is None else tower.name
        where = stream or (MAIN if tower is None else tower.stream)
        op = Op(kind, where, name, waits, micro, worker, joins)
        if worker:
            self._launched_by_worker.add(op.key)
        self._ops.append(op)
        return op.key

    def _keys(self, kind: OpKind, towers: Iterable[TowerPlan], micro: int) -> list[str]:
        return [Op(kind, tower=tower.name, micro=micro).key for tower in towers]

    def _forward(self, micro: int) -> None:
        """Towers, local losses, early backwards and the over-arch of one micro-batch."""
        joint = [tower for tower in self._towers if tower.loss and tower.loss.target == "joint"]
        for tower in self._towers:
            sources = [self._plan.tower(name) for name in tower.inputs]
            self._add("forward", tower, [self._input, *self._keys("forward", sources, micro)], micro=micro)
            if tower.loss is not None and tower not in joint:
                self._loss(tower, micro)
        forwards = self._keys("forward", self._plan.towers, micro)
        if joint:
            joined = self._add("logit_join", waits=forwards, micro=micro)
            for tower in joint:
                self._loss(tower, micro, joined)
        self._add("over_arch", waits=forwards, micro=micro)

    def _loss(self, tower: TowerPlan, micro: int, *waits: str) -> None:
        forward = self._keys("forward", [tower], micro)
        loss = self._add("local_loss", tower, [*forward, *waits], micro=micro)
        if not tower.early:
            return
        worker = 1 + self._early.index(tower) % self._plan.workers if self._by_worker else 0
        self._add("early_backward", tower, [loss], micro=micro, worker=worker)
        if micro == self._last and not worker:
            self._reduce(tower)

    def _reduce(self, tower: TowerPlan) -> None:
        if self._plan.reduction == "bucket":
            waits = self._early_keys([tower]) if tower.early else [self._backward_key()]
            self._add("reduce", tower, waits, stream=tower.stream if tower.early else MAIN)

    def _between_forward_and_backward(self) -> None:
        """What is launched once the last over-arch is."""
        with_loss = [tower for tower in self._plan.towers if tower.loss is not None]
        losses = [Op("over_arch", micro=micro).key for micro in range(self._plan.micro_batches)]
        for micro in range(self._plan.micro_batches):
            losses += self._keys("local_loss", with_loss, micro)
        if self._plan.reduction == "ddp":
            self._add("join", waits=self._early_keys(self._early))
        self._add("check", waits=losses)
        self._add("metrics", waits=["check"], stream=self._plan.beside())
        if self._by_worker:
            for tower in self._early:
                self._reduce(tower)
        if self._plan.optimizer == "per_tower" and self._plan.reduction != "ddp":
            for tower in self._early:
                self._add("update", tower, self._reduced([tower]))

    def _backward(self, micro: int) -> None:
        """Aggregate backward: the over-arch and every tower that is not early."""
        rest = [tower for tower in self._plan.towers if tower.loss is not None and not tower.early]
        self._add(
            "backward", waits=[Op("over_arch", micro=micro).key, *self._keys("local_loss", rest, micro)], micro=micro
        )

    def _after_backward(self) -> None:
        late = [tower for tower in self._plan.trained() if not tower.early]
        for tower in late:
            self._reduce(tower)
        rest = self._backward_key()
        if self._plan.reduction == "bucket":
            rest = self._add("reduce", waits=[rest])
        trained = list(self._plan.trained())
        updates: list[str] = []
        if self._plan.optimizer == "per_tower":
            with_ddp = self._plan.reduction == "ddp"
            for tower in trained if with_ddp else late:
                self._add("update", tower, self._reduced([tower]))
            updates = self._keys("update", trained, 0)
            self._add("update", waits=[rest])
        else:
            self._add("update", waits=[*self._reduced(trained), rest])
        order = ["order"] if self._plan.embedding_gradient != "none" else []
        backwards = [self._backward_key(), *self._early_keys(self._early)]
        if self._tables_apart:
            self._add("table_gradient", waits=backwards)
            left = self._add("leave", waits=[*updates, "metrics"])
            self._add("table_update", waits=[left, *order])
            self._add("end", waits=[left])
            return
        self._add("table_update", waits=[*backwards, *order])
        self._add("end", waits=[*updates, "metrics"])

    def _reduced(self, towers: Sequence[TowerPlan]) -> list[str]:
        """Operations after which the gradients of ``towers`` are the mean over the ranks (NCCL: its wait is queued)."""
        if self._plan.reduction == "bucket":
            return self._keys("reduce", towers, 0)
        late = [self._backward_key()]
        if self._plan.reduction == "ddp":
            return late
        early = [tower for tower in towers if tower.early]
        return self._early_keys(early) + (late if len(early) < len(towers) else [])

    def _early_keys(self, towers: Iterable[TowerPlan]) -> list[str]:
        """Of every micro-batch, so that a worker's error is met wherever it happened."""
        return [key for micro in range(self._plan.micro_batches) for key in self._keys("early_backward", towers, micro)]

    def _backward_key(self) -> str:
        return Op("backward", micro=self._last).key


def guaranteed_order(ops: Sequence[Op]) -> Mapping[str, frozenset[str]]:
    """For each operation the keys of those that must have finished on the device when it starts.

    The guarantees are those of CUDA: events waited for, and order of launch within a stream. The order in which a
    worker launches relative to the main thread is guaranteed only by hand-over (what main launched before it handed an
    operation to a worker) and by joins. What a step graph holds of a side stream is in no order with what that stream
    is given outside of it.
    """
    before: dict[str, frozenset[str]] = {}
    joined: set[str] = set()
    captured = {op.key for op in parts(ops).captured}
    for position, op in enumerate(ops):
        joined |= set(op.joins)
        direct = set(op.waits)
        for earlier in ops[:position]:
            ordered = earlier.worker in {0, op.worker} or earlier.key in joined
            together = op.stream == MAIN or (earlier.key in captured) == (op.key in captured)
            if earlier.stream == op.stream and ordered and together:
                direct.add(earlier.key)
        before[op.key] = frozenset(direct).union(*(before[key] for key in direct))
    return before
