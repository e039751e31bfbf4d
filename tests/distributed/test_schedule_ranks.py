"""Every legal launch and reduction on 1, 2 and 3 ranks equals one process with the whole batch, at any pace."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from schedule_cases import (
    State,
    assert_same,
    make_batch,
    make_config,
    make_gradients,
    make_model,
    refusals,
    tower,
    train,
    train_plainly,
)

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.legality import REDUCTION_TABLE, Launch, Reduction
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World
from erase_rec.errors import ConfigError
from erase_rec.schedule.program import Op
from erase_rec.schedule.reduction import build, ddp
from erase_rec.schedule.reduction.bucket import BucketReduction
from erase_rec.schedule.streams import NullStreams, Streams

LAUNCHES: dict[Launch, dict[str, Any]] = {
    "aggregate backward": {"early_backward": False},
    "blocking": {"dispatch": "blocking"},
    "non_blocking": {"dispatch": "non_blocking"},
    "tower graph": {"cuda_graph": "tower"},
    "dense graph": {"cuda_graph": "dense"},
    "step graph": {"cuda_graph": "step"},
}
REDUCTIONS: dict[Reduction, dict[str, Any]] = {
    "ddp, FUP=True": {"reduction": "ddp", "find_unused_parameters": True},
    "ddp, FUP=False": {"reduction": "ddp", "find_unused_parameters": False},
    "ddp_per_tower": {"reduction": "ddp_per_tower"},
    "bucket": {"reduction": "bucket", "bucket_mib": 1e-4},
}
LEGAL_ON_CPU = [cell for cell, entry in REDUCTION_TABLE.items() if entry.legal and "graph" not in cell[0]]
TOWERS = [
    tower("deep"),
    tower("dot", "deep", loss=0.5, target="joint", stream="shared"),
    tower("cross", "dot", loss=0.5, detach=False, stream="main"),
    tower("mask", loss=None, frozen=True),
    tower("attention", "mask", loss=None, detach=False),
    tower("pairs", loss=2.0, target="joint", stream="shared"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Rounding of sums in another order, after four steps."""
VARIANTS: list[tuple[torch.dtype, str, int]] = [
    (torch.float64, "end", 1),
    (torch.float64, "per_tower", 3),
    (torch.float32, "per_tower", 1),
]
"""Precision, optimizer, micro-batches; of the four rows that each of three ranks has, three parts are uneven."""


def cell_config(cell: tuple[Launch, Reduction], dtype: torch.dtype, optimizer: str, micro_batches: int) -> Config:
    dense = {"kind": "sgd", "lr": 0.1, "momentum": 0.9} if dtype == torch.float32 else {"lr": 0.01, "eps": 1e-6}
    return make_config(
        TOWERS,
        schedule=LAUNCHES[cell[0]] | {"optimizer": optimizer},
        distributed=REDUCTIONS[cell[1]],
        optimizer={"dense": dense},
        train={"steps": 1, "micro_batches": micro_batches},
    )


def batches(dtype: torch.dtype = torch.float64, steps: int = 4) -> list[Any]:
    return [make_batch(seed, 12, dtype) for seed in range(steps)]


def in_world(body: Callable[[World], Any]) -> Any:
    with join_world(on_cuda=False, timeout_s=30, grouped=True) as world:
        return body(world)


@pytest.mark.parametrize("cell", REDUCTION_TABLE, ids=", ".join)
def test_the_table_is_enforced_when_a_configuration_is_read(cell: tuple[Launch, Reduction]) -> None:
    sections = {"schedule": LAUNCHES[cell[0]], "distributed": REDUCTIONS[cell[1]]}
    overrides = [f"{section}.{key}={value}" for section, keys in sections.items() for key, value in keys.items()]
    entry = REDUCTION_TABLE[cell]
    if entry.legal:
        load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog())
        return
    with pytest.raises(ConfigError) as raised:
        load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog())
    assert entry.note in str(raised.value)
    assert entry.way_out in str(raised.value)


def train_cells(world: World) -> list[State]:
    return [
        train(cell_config(cell, *variant), batches(variant[0]), variant[0], world)
        for cell, variant in product(LEGAL_ON_CPU, VARIANTS)
    ]


@pytest.mark.timeout(270)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_legal_cells_equal_one_process_with_the_whole_batch(run_ranks: Any, size: int) -> None:
    """Every parameter and table after four steps; and the same bits on every rank."""
    ranks = run_ranks(size, in_world, train_cells, timeout_s=240)
    expected: dict[tuple[bool, torch.dtype], State] = {}
    for number, (cell, variant) in enumerate(product(LEGAL_ON_CPU, VARIANTS)):
        config, dtype = cell_config(cell, *variant), variant[0]
        assert refusals(config) == []
        reference = (cell[0] == "aggregate backward", dtype)
        if reference not in expected:
            expected[reference] = train_plainly(config, batches(dtype), dtype)
        for states in ranks:
            assert_same(states[number], expected[reference], TOLERANCE[dtype])
            assert_same(states[number], ranks[0][number], 0)


OBJECTIVES = [
    tower("deep", head={"kind": "goodness", "params": {"threshold": 0.5}}),
    tower("dot", "deep", loss=0.5, target="joint", stream="shared"),
    tower("cross", loss=0.5, detach=False, stream="main"),
    tower("mask", loss=2.0, cut_at=1),
]
WITH_OBJECTIVES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (LAUNCHES["blocking"] | {"exact_every": 2}, REDUCTIONS["bucket"], 1),
    (LAUNCHES["non_blocking"] | {"exact_every": 3, "workers": 2}, REDUCTIONS["bucket"], 2),
    (LAUNCHES["blocking"], REDUCTIONS["ddp, FUP=True"], 1),
    (LAUNCHES["blocking"], REDUCTIONS["ddp_per_tower"], 1),
]


def objective_configs() -> list[Config]:
    return [
        make_config(
            OBJECTIVES,
            schedule=schedule,
            distributed=distributed,
            over_arch={"logits": "gated"},
            train={"steps": 1, "micro_batches": micro_batches},
        )
        for schedule, distributed, micro_batches in WITH_OBJECTIVES
    ]


def train_objectives(world: World) -> list[State]:
    return [train(config, batches(), world=world) for config in objective_configs()]


@pytest.mark.timeout(270)
def test_objectives_are_those_of_the_whole_batch_on_every_rank(run_ranks: Any) -> None:
    """Heads, cuts inside towers, gated logits; steps that cut nothing come in the same places."""
    ranks = run_ranks(2, in_world, train_objectives, timeout_s=240)
    for number, config in enumerate(objective_configs()):
        assert refusals(config) == []
        expected = train_plainly(config, batches())
        for states in ranks:
            assert_same(states[number], expected, TOLERANCE[torch.float64])
            assert_same(states[number], ranks[0][number], 0)


class Jitter:
    """Streams whose operations start and end late, each rank and thread at its own pace."""

    def __init__(self, inner: Streams, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)

    def begin(self, *, measure: bool = False) -> None:
        self._inner.begin(measure=measure)

    @contextmanager
    def run(self, op: Op) -> Iterator[None]:
        self._dawdle()
        with self._inner.run(op):
            yield
        self._dawdle()

    def current(self, name: str) -> AbstractContextManager[None]:
        return self._inner.current(name)

    def _dawdle(self) -> None:
        if self._random.random() < 0.25:
            time.sleep(self._random.uniform(0, 1e-3))


DETACHED = [
    tower("deep"),
    tower("dot", "deep", target="joint"),
    tower("cross", target="joint", loss=0.5, stream="main"),
    tower("pairs", loss=None, detach=False),
]
PACED: dict[str, list[dict[str, Any]]] = {
    "bucket": [
        LAUNCHES["aggregate backward"],
        LAUNCHES["blocking"],
        LAUNCHES["non_blocking"],
        LAUNCHES["non_blocking"] | {"workers": 3},
        LAUNCHES["non_blocking"] | {"workers": 3, "optimizer": "per_tower"},
    ],
    "ddp, FUP=True": [
        LAUNCHES["aggregate backward"],
        LAUNCHES["blocking"],
        LAUNCHES["non_blocking"],
        LAUNCHES["non_blocking"] | {"workers": 3},
    ],
    "ddp, FUP=False": [LAUNCHES["aggregate backward"], LAUNCHES["blocking"], LAUNCHES["non_blocking"]],
    "ddp_per_tower": [LAUNCHES["aggregate backward"], LAUNCHES["blocking"] | {"optimizer": "per_tower"}],
}


def train_at_any_pace(world: World) -> tuple[dict[str, list[State]], list[str]]:
    """States by reduction; and the digest of the log of collectives after each training."""
    states: dict[str, list[State]] = {name: [] for name in PACED}
    digests = []
    for name, schedules in PACED.items():
        for schedule in schedules:
            config = make_config(DETACHED, schedule=schedule, distributed=REDUCTIONS[name])  # type: ignore[index]
            streams = Jitter(NullStreams(), seed=world.rank)
            states[name].append(train(config, batches(steps=60), world=world, streams=streams))
            digests.append(world.collectives.digest())
    return states, digests


@pytest.mark.timeout(270)
def test_no_bit_depends_on_who_launches_or_when(run_ranks: Any) -> None:
    """Sixty steps on two ranks under delays: aggregate, blocking and non-blocking, one worker and three."""
    (first, first_log), (second, second_log) = run_ranks(2, in_world, train_at_any_pace, timeout_s=240)
    assert first_log == second_log, "the ranks ask for the same collectives in the same order"
    assert len(set(first_log)) > len(PACED["bucket"])
    for name, states in first.items():
        for state, other in zip(states, second[name], strict=True):
            assert_same(state, states[0], 0)
            assert_same(other, states[0], 0)


class ReduceWhereItIsMade(BucketReduction):
    """What must not be: the worker that has a tower's gradient starts its reduction."""

    def differentiate(self, loss: Any, leaves: Any, blocks: Any, **keys: Any) -> Any:
        found = super().differentiate(loss, leaves, blocks, **keys)
        if not keys["last"]:
            self.start(blocks[0])
        return found


def reduce_in_workers(world: World) -> tuple[str, list[str]]:
    config = make_config(DETACHED, schedule=LAUNCHES["non_blocking"], distributed=REDUCTIONS["bucket"])
    model = make_model(config, world=world)
    gradients = make_gradients(model, config, world, NullStreams())
    gradients.reduction = ReduceWhereItIsMade(gradients.blocks, world, chunk_mib=1)
    with pytest.raises(RuntimeError, match="only the main thread may") as raised:
        gradients.gradients(batches()[0])
    return str(raised.value), raised.value.__notes__


@pytest.mark.timeout(90)
def test_a_reduction_that_a_worker_starts_is_refused(run_ranks: Any) -> None:
    """Negative control of the log of collectives: what workers start comes in an order that timing decides."""
    for message, notes in run_ranks(2, in_world, reduce_in_workers):
        assert message.startswith("collective deep.0 was asked for by thread early-backward-0")
        assert notes[0] == "in early_backward of tower deep"


class WithoutHooks(ddp.DdpReduction):
    """One DDP with FUP=True whose early gradients come without hooks."""

    def differentiate(self, loss: Any, leaves: Any, blocks: Any, *, grad: Any, last: bool) -> Any:
        if last:
            return super().differentiate(loss, leaves, blocks, grad=grad, last=last)
        return self._without_hooks(loss, leaves, blocks, grad)


def train_with_less(world: World) -> list[str]:
    """How four steps end on one DDP, FUP=True without hooks and FUP=False without touching every parameter."""
    found = []
    for reduction, module, name, replacement in (
        ("ddp, FUP=True", build, "DdpReduction", WithoutHooks),
        ("ddp, FUP=False", ddp, "_touch", lambda loss, parameters: loss),
    ):
        config = make_config(DETACHED, distributed=REDUCTIONS[reduction])  # type: ignore[index]
        expected = train_plainly(config, batches())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, replacement)
            try:
                assert_same(train(config, batches(), world=world), expected, TOLERANCE[torch.float64])
            except (AssertionError, RuntimeError) as error:
                found.append(str(error).splitlines()[0])
    return found


@pytest.mark.timeout(90)
def test_neither_hooks_nor_the_touch_can_be_left_out(run_ranks: Any) -> None:
    """Negative control of the comparison with one process."""
    for drifted, stopped in run_ranks(2, in_world, train_with_less):
        assert drifted.startswith("towers.deep.")
        assert stopped.startswith("Expected to have finished reduction in the prior iteration")
