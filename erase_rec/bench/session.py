"""One batch size of a benchmark: builds and warms its arms, lets them take turns, then looks at each on the device.

Profiling comes after all timed turns, so that no turn runs beside it. Everything that belongs to a batch size is
dropped at its end.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from erase_rec.batch import Batch
from erase_rec.bench.arms import PlannedArm
from erase_rec.bench.batches import told
from erase_rec.bench.device_work import profiled, report
from erase_rec.bench.floor import Ceilings, Counted, floor
from erase_rec.bench.result import GIB, DeviceUse, Row
from erase_rec.bench.turns import UNTIMED_STEPS, FloatArray, Turn, host_ms, mean_ms, take_turns, timed_turn
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.protocols import TrainStep

PROFILED_STEPS = 10
HOST_STEPS = 20

Speed = Callable[[FloatArray, FloatArray], tuple[float, float, float]]
"""(reference's mean step time of each turn, this one's) -> speed relative to it: low, mid, high."""


@dataclass(frozen=True)
class BuiltArm:
    """A step that trains, not yet warm.

    Attributes:
        step: the step.
        parts: what must live as long as it.
        tables_bytes: its tables with their optimizer's state.
        tables_shared: the tables were there before it was built.
        expect: is told of each batch a step ahead; None: nobody wants to know.
    """

    step: TrainStep
    parts: object
    tables_bytes: int
    tables_shared: bool
    expect: Callable[[Batch], None] | None = None


class Workshop(Protocol):
    """Builds what a configuration names."""

    def build(self, planned: PlannedArm) -> BuiltArm:
        """A new step.

        Raises:
            UserError: it cannot be had here.
        """
        ...

    def counted(self, planned: PlannedArm) -> Counted:
        """What a step of the arm does, counted on a small one."""
        ...

    def batches(self, size: int) -> Iterator[Batch]:
        """Endless full batches on the device; to be closed where it is a generator."""
        ...


@dataclass(frozen=True)
class Settings:
    """How a benchmark measures.

    Attributes:
        workload: its name.
        device: where it runs.
        repeats: turns of each arm.
        steps: timed steps of a turn.
        warmup: steps of each arm before the first turn; captures and compilation happen there.
        ceilings: of the device.
        feature_dims: embedding dimension of each sparse feature.
        speed: interval of a speed ratio from paired turns.
    """

    workload: str
    device: torch.device
    repeats: int
    steps: int
    warmup: int
    ceilings: Ceilings
    feature_dims: Sequence[int]
    speed: Speed


@dataclass(frozen=True)
class _Warm:
    row: Row
    planned: PlannedArm
    arm: BuiltArm
    batches: Iterator[Batch]
    peak_bytes: int

    def turn(self, steps: int) -> Turn:
        batches = told(self.batches, UNTIMED_STEPS + steps, self.arm.expect)
        timed_turn(self.arm.step, batches, UNTIMED_STEPS)
        return timed_turn(self.arm.step, batches, steps)


def measure(planned: Sequence[PlannedArm], workshop: Workshop, world: World, settings: Settings) -> list[Row]:
    """Rows of one batch size, in the arms' order; the first that runs is followed by its A/A pair.

    On several ranks every rank calls it with the same arms; each measures itself.
    """
    warm: list[_Warm] = []
    rows: list[Row] = []
    try:
        for each in planned:
            row = Row.of(settings.workload, each, world.size)
            if row.refused is not None:
                rows.append(row)
                continue
            twice = [row] if warm else [row, replace(row, arm=f"{row.arm} (A/A)", repeats=row.arm)]
            for made in twice:
                rows.append(_warmed(made, each, workshop, world, settings, warm))
        turns = take_turns([partial(arm.turn, settings.steps) for arm in warm], settings.repeats)
        means = {arm.row.arm: mean_ms(taken) for arm, taken in zip(warm, turns, strict=True)}
        for arm, taken in zip(warm, turns, strict=True):
            ratios = _ratios(arm.row.arm, means, settings.speed)
            rows[rows.index(arm.row)] = _finished(
                replace(arm.row.timed(taken), ratio_to=ratios), arm, workshop, settings
            )
        rows = _staggered(rows, world)
    finally:
        for arm in warm:
            _close(arm.batches)
        warm.clear()
        free(settings.device)
    return rows


def free(device: torch.device) -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _warmed(
    row: Row, planned: PlannedArm, workshop: Workshop, world: World, settings: Settings, warm: list[_Warm]
) -> Row:
    """Builds and warms an arm and adds it to ``warm``; or the row with the reason why not."""
    on_cuda = settings.device.type == "cuda"
    before = 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)
        before = torch.cuda.memory_allocated(settings.device)
    # A rank that alone runs out of memory cannot go on beside the others.
    refusals: tuple[type[Exception], ...] = (UserError, torch.OutOfMemoryError) if world.size == 1 else (UserError,)
    batches = workshop.batches(planned.batch)
    try:
        arm = workshop.build(planned)
        timed_turn(arm.step, batches, settings.warmup)
    except refusals as error:
        _close(batches)
        row = replace(row, refused=" ".join(str(error).split()))
        del error  # its traceback holds what was built
        free(settings.device)
        return row
    peak = torch.cuda.max_memory_allocated(settings.device) - before if on_cuda else 0
    warm.append(_Warm(row, planned, arm, batches, peak + (arm.tables_bytes if arm.tables_shared else 0)))
    return row


def _ratios(
    arm: str, means: Mapping[str, FloatArray], speed: Speed
) -> dict[str, tuple[float | None, float, float | None]]:
    found: dict[str, tuple[float | None, float, float | None]] = {}
    for other, reference in means.items():
        if other != arm:
            low, mid, high = speed(reference, means[arm])
            found[other] = (low if math.isfinite(low) else None, mid, high if math.isfinite(high) else None)
    return found


def _finished(row: Row, warm: _Warm, workshop: Workshop, settings: Settings) -> Row:
    """With the floor; on CUDA also with launch time and kernels."""
    config = warm.planned.config
    assert config is not None
    counted = workshop.counted(warm.planned)
    row = row.above(floor(config, counted, next(warm.batches), settings.feature_dims, settings.ceilings))
    return _on_device(row, warm) if settings.device.type == "cuda" else row


def _on_device(row: Row, warm: _Warm) -> Row:
    """Launch time and kernels of an arm."""
    step, batches = warm.arm.step, warm.batches

    def run() -> None:
        for batch in told(batches, PROFILED_STEPS, warm.arm.expect):
            step(batch)

    host = host_ms(step, batches, HOST_STEPS, torch.cuda.synchronize)
    use = DeviceUse(host, warm.peak_bytes / GIB, warm.arm.tables_bytes / GIB, report(profiled(run), PROFILED_STEPS))
    return row.using(use)


def _staggered(rows: Sequence[Row], world: World) -> list[Row]:
    """With the differences between ranks; collective."""
    times_RA = world.gather_objects("bench.collectives", [row.collective_ms for row in rows])
    found = []
    for row, times_R in zip(rows, zip(*times_RA, strict=True), strict=True):
        measured = [value for value in times_R if value is not None]
        found.append(replace(row, stagger_ms=max(measured) - min(measured)) if measured else row)
    return found


def _close(batches: Iterator[Batch]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()  # stops a loader's threads
