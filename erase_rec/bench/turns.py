"""Arms take turns: who is timed when, for how long, and what the turns' times say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from erase_rec.batch import Batch
from erase_rec.protocols import TrainStep
from erase_rec.throughput import clock_for

FloatArray = NDArray[np.float64]

UNTIMED_STEPS = 2
"""Steps at the start of a turn that are not counted: another arm has just used the caches."""


@dataclass(frozen=True)
class Turn:
    """Some consecutive steps of one arm.

    Attributes:
        step_ms: time of each, from the end of the one before to its own end.
        wait_ms: time that each waited for its batch, on the same clock: on CUDA the device stood still.
    """

    step_ms: FloatArray
    wait_ms: FloatArray


def timed_turn(step: TrainStep, batches: Iterator[Batch], count: int) -> Turn:
    """Times ``count`` steps: device events on CUDA, the host's clock on the CPU. Synchronises the host at its end."""
    clock = clock_for(step.device())
    marks, fed = [clock.mark()], []
    for _ in range(count):
        batch = next(batches)
        fed.append(clock.mark())
        step(batch)
        marks.append(clock.mark())
    seconds = [clock.seconds(first, then) for first, then in pairwise(marks)]
    waits = [clock.seconds(end, there) for end, there in zip(marks[:-1], fed, strict=True)]
    return Turn(1e3 * np.array(seconds), 1e3 * np.array(waits))


def take_turns(turns: Sequence[Callable[[], Turn]], repeats: int) -> list[list[Turn]]:
    """Lets every arm have ``repeats`` turns in the order A B .. B A, so that a drift meets all alike.

    Returns:
        The turns of each arm, in time order: the k-th turns of all arms lie side by side in time.
    """
    taken: list[list[Turn]] = [[] for _ in turns]
    for repeat in range(repeats):
        order = range(len(turns)) if repeat % 2 == 0 else reversed(range(len(turns)))
        for index in order:
            taken[index].append(turns[index]())
    return taken


def mean_ms(turns: Sequence[Turn]) -> FloatArray:
    """Mean step time of each turn."""
    return np.array([turn.step_ms.mean() for turn in turns])


def host_ms(step: TrainStep, batches: Iterator[Batch], count: int, synchronize: Callable[[], None]) -> float:
    """Median host time of a step's call on an idle device: what the host needs if it never waits."""
    times = []
    for _ in range(count):
        batch = next(batches)
        synchronize()
        start = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - start)
    synchronize()
    return 1e3 * float(np.median(times))


def verdict(step_ms: float, host_ms: float, wait_ms: float, idle_share: float) -> str:
    """What bounds a step: its batch, the host that launches it, or the device.

    ``data-bound`` where it waits for its batch for a tenth of its time or more; else ``host-bound`` where the device is
    idle for a tenth of it or more and launching it takes nine tenths of it or more; else ``device-bound``, be it by
    kernels or by the gaps between them.
    """
    if wait_ms >= 0.1 * step_ms:
        return "data-bound"
    return "host-bound" if idle_share >= 0.1 and host_ms >= 0.9 * step_ms else "device-bound"
