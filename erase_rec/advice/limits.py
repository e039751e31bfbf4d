"""Which tower limits a step: measured times of its operations, through the order that its program guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.overlap import critical_path
from erase_rec.schedule.program import Op


@dataclass(frozen=True)
class TowerLimit:
    """What one tower has to do with the length of a step.

    Attributes:
        name: of the tower.
        chain_ms: its forward, loss, backward and update, one after the other.
        share: ``chain_ms`` over the longest chain of the step.
        path_without_ms: the step's longest chain if all of that took no time.
        gain_if_gone: how many times as fast a step of that length is: no change to this tower alone gains more.
    """

    name: str
    chain_ms: float
    share: float
    path_without_ms: float
    gain_if_gone: float


@dataclass(frozen=True)
class Limits:
    """The longest chain of a step, and what each tower has to do with it.

    Attributes:
        arm: name of the way to train.
        path: keys of the chain's operations.
        path_ms: its time.
        towers: the one with most to gain first, then the longest.
    """

    arm: str
    path: tuple[str, ...]
    path_ms: float
    towers: tuple[TowerLimit, ...]


def as_launched(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The program where there are no streams: what a thread launches runs in order, whatever its stream."""
    return tuple(replace(op, stream=f"thread {op.worker}") for op in ops)


def median_durations(steps: Sequence[Sequence[Interval]]) -> dict[str, float]:
    """Median time of each operation over measured steps, milliseconds by key."""
    found: dict[str, list[float]] = {}
    for intervals in steps:
        for interval in intervals:
            found.setdefault(interval.op.key, []).append(interval.duration_ms)
    return {key: median(times) for key, times in found.items()}


def tower_limits(arm: str, ops: Sequence[Op], duration_ms: Mapping[str, float]) -> Limits:
    """The longest chain of ``ops`` with these durations, with all towers and without each of them."""
    path, path_ms = critical_path(ops, duration_ms)
    towers = []
    for name in dict.fromkeys(op.tower for op in ops if op.tower is not None):
        own = {op.key for op in ops if op.tower == name}
        chain_ms = sum(duration_ms.get(key, 0.0) for key in own)
        _, without_ms = critical_path(ops, {key: time for key, time in duration_ms.items() if key not in own})
        share = chain_ms / path_ms if path_ms else 0.0
        gain = path_ms / without_ms if without_ms else 1.0
        towers.append(TowerLimit(name, chain_ms, share, without_ms, gain))
    towers.sort(key=lambda tower: (-tower.gain_if_gone, -tower.chain_ms))
    return Limits(arm, path, path_ms, tuple(towers))
