"""Chooses what runs where in a captured step, by measuring: order, priorities, what runs beside, shares of the device.

On a device that several streams share, what limits a step is the chain of its slowest tower, and that chain is as long
as the other towers' kernels hold it up. Which of a few placements is fastest depends on model, batch and device, so a
few are captured and timed, interleaved, before training; of the best one then a few shares of the device. No placement
changes a number that is computed, but for the rounding of matrix products under another share.

While that is done learning rates are 0, and whatever else a step moves (optimizers' states, running statistics, random
generators) is put back afterwards: training starts where it would have started without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Self

import torch
from pydantic import BaseModel
from torch import Tensor

from erase_rec.batch import Batch
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.protocols import CTRModel, TrainStep
from erase_rec.schedule.measured_streams import Interval, MeasuredStreams
from erase_rec.schedule.plan import MAIN, Plan
from erase_rec.throughput import StepTimer, clock_for

ROUNDS = 5
STEPS = 20
WARM_UP = 6
"""Steps of a placement before it is timed; it is captured within them."""
SHARES = (0.5, 0.33, 0.12)
"""Values of ``schedule.matmul_share`` to try. On an H200, kernels for an eighth of the device are the fastest at 1024
rows a step, those for a third at 4096."""
WORTH = 0.005
"""Share of the step time that another placement must save to be chosen over the configured one."""


class Choice(BaseModel, frozen=True):
    """A placement: the keys of ``schedule`` of these names."""

    launch_order: tuple[str, ...]
    high_priority: tuple[str, ...]
    parameters_beside: bool = False
    matmul_share: float = 1.0

    def of(self, plan: Plan) -> Plan:
        """``plan`` with this placement."""
        return replace(plan, **self.model_dump())


class Tuning(BaseModel, frozen=True):
    """What was measured and chosen.

    Attributes:
        choice: the placement to train with.
        measured: placements with their median step time in milliseconds, the configured one first.
    """

    choice: Choice
    measured: tuple[tuple[Choice, float], ...]

    @classmethod
    def by(cls, measured: Sequence[tuple[Choice, float]]) -> Self:
        """The fastest; the first, unless another saves :data:`WORTH`."""
        configured, configured_ms = measured[0]
        fastest, fastest_ms = min(measured, key=lambda each: each[1])
        choice = fastest if fastest_ms < (1 - WORTH) * configured_ms else configured
        return cls(choice=choice, measured=tuple(measured))

    def sentence(self) -> str:
        """For people."""
        times = {choice: step_ms for choice, step_ms in self.measured}
        configured_ms = self.measured[0][1]
        if self.choice == self.measured[0][0]:
            return f"autotune: the configured placement stays, {configured_ms:.3f} ms a step"
        return (
            f"autotune: {times[self.choice]:.3f} ms a step instead of {configured_ms:.3f} with "
            f"schedule.launch_order=[{','.join(self.choice.launch_order)}] "
            f"schedule.high_priority=[{','.join(self.choice.high_priority)}] "
            f"schedule.parameters_beside={str(self.choice.parameters_beside).lower()} "
            f"schedule.matmul_share={self.choice.matmul_share:g}"
        )


def candidates(plan: Plan, tower_ms: Mapping[str, float]) -> list[Choice]:
    """Placements worth a try, the configured one first.

    Args:
        plan: as configured.
        tower_ms: time of each tower's operations in a step.
    """
    names = [tower.name for tower in plan.towers]
    slow_first = sorted(names, key=lambda name: -tower_ms[name])
    as_it_stands, *orders = (_after_inputs(plan, order) for order in (names, slow_first, slow_first[::-1]))
    movable = [name for name in slow_first if plan.tower(name).stream != MAIN]
    preferred = [tuple(movable[:count]) for count in range(min(4, len(movable)))]
    preferred.append(tuple(movable[:-1]))
    beside = (False, True) if plan.may_run_beside else (False,)
    found = [
        Choice(launch_order=as_it_stands, high_priority=first, parameters_beside=each)
        for each in beside
        for first in preferred
    ]
    # Where priorities say whose kernels come first, the order of launches hardly matters.
    found += [Choice(launch_order=order, high_priority=first) for order in orders for first in preferred[:2]]
    return list(dict.fromkeys(found))


def autotune(
    plan: Plan,
    batches: Sequence[Batch],
    make_step: Callable[[Plan], tuple[TrainStep, MeasuredStreams]],
    world: World,
) -> Tuning:
    """Measures placements of ``plan``; on several ranks the first rank's times decide. Collective.

    Args:
        plan: as configured.
        batches: one or more full batches on the device.
        make_step: a step of a plan, whose learning rates are 0.
        world: the ranks.
    """
    step, streams = make_step(plan)
    _timed(step, batches, WARM_UP)
    step(batches[0], measure=True)
    tower_ms = _tower_ms(plan, streams.intervals())
    choices = world.broadcast_object("autotune.choices", candidates(plan, tower_ms))
    measured = _measured(choices, plan, batches, make_step, world)
    best = Tuning.by(measured).choice
    shares = [best.model_copy(update={"matmul_share": share}) for share in (best.matmul_share, *SHARES)]
    again = _measured(shares, plan, batches, make_step, world)
    # Against what was measured beside it: times of the two rounds are not to be compared.
    faster = Tuning.by(again)
    return Tuning(choice=faster.choice, measured=(*measured, *again[1:]))


def _measured(
    choices: Sequence[Choice],
    plan: Plan,
    batches: Sequence[Batch],
    make_step: Callable[[Plan], tuple[TrainStep, MeasuredStreams]],
    world: World,
) -> list[tuple[Choice, float]]:
    """Median step times in milliseconds, interleaved."""
    steps = [make_step(choice.of(plan))[0] for choice in choices]
    for each in steps:
        _timed(each, batches, WARM_UP)
    turns: list[list[float]] = [[] for _ in steps]
    for turn in range(ROUNDS):
        order = range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps)))
        for index in order:
            turns[index].append(_timed(steps[index], batches, STEPS))
    times = world.broadcast_object("autotune.times", [median(found) for found in turns])
    return list(zip(choices, times, strict=True))


@contextmanager
def nothing_learnt(model: CTRModel, optimizer: DenseOptimizer, device: torch.device) -> Iterator[None]:
    """Steps inside leave model, optimizers and random generators as they were; learning rates are 0 meanwhile.

    Whoever trains afterwards sets the rates.
    """
    moved = _moved_by_steps(model, optimizer)
    kept = {name: value.clone() for name, value in moved.items()}
    generators = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    optimizer.set_lr(0.0)
    model.embeddings.set_lr(0.0)
    try:
        yield
    finally:
        for name, value in moved.items():
            value.copy_(kept[name])
        optimizer.refresh()
        model.embeddings.load_optimizer_state(_tables_state(kept, model))
        torch.set_rng_state(generators[0])
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1], device)


def _moved_by_steps(model: CTRModel, optimizer: DenseOptimizer) -> dict[str, Tensor]:
    """What a step moves at learning rate 0, but for the tables' weights, which it leaves."""
    tables = {
        f"tables/{table}/{name}": value
        for table, entries in model.embeddings.optimizer_state().items()
        for name, value in entries.items()
    }
    # Only whole steps are measured, and steps of tables that are spread over ranks are not captured whole.
    whole = {name: value for name, value in tables.items() if not isinstance(value, Shards)}
    assert whole.keys() == tables.keys()
    return whole | {
        **{f"model/{name}": value for name, value in model.dense_state().items()},
        **{f"masters/{name}": value for name, value in optimizer.masters().items()},
        **{f"optimizer/{name}": value for name, value in optimizer.state().items()},
    }


def _tables_state(kept: Mapping[str, Tensor], model: CTRModel) -> dict[str, dict[str, Tensor]]:
    state = model.embeddings.optimizer_state()
    return {table: {name: kept[f"tables/{table}/{name}"] for name in entries} for table, entries in state.items()}


def _timed(step: TrainStep, batches: Sequence[Batch], count: int) -> float:
    """Mean step time in milliseconds."""
    timer = StepTimer(clock_for(step.device()), warmup_steps=0)
    timer.resume()
    for index in range(count):
        batch = batches[index % len(batches)]
        step(batch)
        timer.step(batch.size)
    return timer.total().step_ms


def _tower_ms(plan: Plan, intervals: Sequence[Interval]) -> dict[str, float]:
    """Time of each tower's operations; what is not a tower's own, such as an aggregate backward, is in none."""
    times = dict.fromkeys((tower.name for tower in plan.towers), 0.0)
    for interval in intervals:
        if interval.op.tower is not None:
            times[interval.op.tower] += interval.duration_ms
    return times


def _after_inputs(plan: Plan, order: Sequence[str]) -> tuple[str, ...]:
    """``order``, moved so that each tower comes after those that it reads."""
    left = list(order)
    placed: list[str] = []
    while left:
        following = next(name for name in left if set(plan.tower(name).inputs) <= set(placed))
        left.remove(following)
        placed.append(following)
    return tuple(placed)
