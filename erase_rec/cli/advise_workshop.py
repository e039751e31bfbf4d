"""Measures what ``erase-rec advise`` reports: the benchmark's arms and turns on the user's own rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from data.dataset import Datasets, build_datasets, loader_threads
from erase_rec import environment
from erase_rec.advice.candidates import Plans
from erase_rec.advice.decision import Decision, decide, fastest
from erase_rec.advice.facts import DataCheck, KnownNe, memory_of
from erase_rec.advice.limits import Limits, as_launched, median_durations, tower_limits
from erase_rec.advice.ne_sweep import sweep_commands
from erase_rec.advice.report import Advice
from erase_rec.advice.turns_in_time import Pace, pace
from erase_rec.api.assembly import Machine, join_ranks
from erase_rec.batch import Batch, StepOutput
from erase_rec.bench.arms import Arm, PlannedArm
from erase_rec.bench.batches import RandomRows, rotated
from erase_rec.bench.floor import Ceilings, Counted
from erase_rec.bench.result import Row
from erase_rec.bench.session import BuiltArm, Settings, measure
from erase_rec.bench.turns import UNTIMED_STEPS, Turn, mean_ms, take_turns, timed_turn
from erase_rec.cli.bench import speed_interval
from erase_rec.cli.bench_workshop import RESIDENT_BATCHES, ContentWorkshop, Source, feature_dims
from erase_rec.config.schema import Config
from erase_rec.errors import UserError
from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import program
from erase_rec.training_loop import Parts

PILOT_STEPS = 2
DATA_TURNS = 3
MEASURED_STEPS = 5
"""Steps whose operations are timed; the median of each counts."""
LOADER_WINDOWS = 2
"""Windows of rows that the loader makes for its own speed: it makes the batches of one together."""


@dataclass
class OwnRows:
    """Implements :class:`erase_rec.bench.session.Workshop` with real rows on the device, and keeps what it built.

    Attributes:
        content: builds.
        kept: full batches on the device.
        built: arms by name, to be looked at after the turns.
    """

    content: ContentWorkshop
    kept: Sequence[Batch]
    built: dict[str, BuiltArm] = field(default_factory=dict)

    def build(self, planned: PlannedArm) -> BuiltArm:
        """See :class:`erase_rec.bench.session.Workshop`."""
        self.built[planned.arm.name] = self.content.build(planned)
        return self.built[planned.arm.name]

    def counted(self, planned: PlannedArm) -> Counted:
        """See :class:`erase_rec.bench.session.Workshop`."""
        return self.content.counted(planned)

    def batches(self, size: int) -> Iterator[Batch]:
        """See :class:`erase_rec.bench.session.Workshop`."""
        return rotated(self.kept)


def measured_advice(
    name: str, overrides: Sequence[str], plans: Plans, ne: KnownNe | None, *, started_s: float, seconds: float
) -> Advice:
    """Lets the ways take turns, decides, and looks closer at what was chosen.

    Args:
        name: of the configuration, as on the command line.
        overrides: of the command line.
        plans: the ways.
        ne: what is known of NE.
        started_s: when the command began, :func:`time.monotonic`.
        seconds: what all of it may take; a model too slow for that gets the fewest turns that make an interval.

    Raises:
        UserError: no way could be run, or the data are not as they must be.
    """
    config = next((arm.config for arm in plans.arms if arm.config is not None), None)
    if config is None:
        reasons = "; ".join(dict.fromkeys(f"{each.arm.name}: {each.refusal}" for each in plans.arms))
        raise UserError(f"advise: no way to train goes with this configuration: {reasons}")
    with join_ranks(config) as (world, machine):
        datasets = build_datasets(config, rank=0, world_size=1, pin=machine.pins)
        random = RandomRows.of(config, datasets.table_rows, exponent=0, seed=config.seed)
        content = ContentWorkshop(datasets, random, machine, world, Source(resident=False, zipf=0))
        workshop = OwnRows(content, _kept_batches(config, datasets, machine))
        found = _in_time(plans, workshop, machine, started_s + seconds)
        rows = measure(plans.arms, workshop, world, _settings(name, config, machine, found))
        decision = decide(rows, plans.reference, None if ne is None else ne.verdict)
        limits = _limits(rows, workshop, machine)
        data = _data(decision, config, workshop, found)
        memory = [
            memory_of(row, workshop.built[row.arm].tables_bytes)
            for row in rows
            if row.refused is None and row.repeats is None
        ]
        return Advice(
            name, overrides, machine.name(), plans.reference, decision, rows, data, memory, limits, ne,
            _ne_commands(name, overrides, plans, decision), machine.device.type == "cuda", _about(found, started_s),
        )  # fmt: skip


class _NoStep:
    """Implements :class:`erase_rec.protocols.TrainStep` and does nothing: what is timed is the loader."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def device(self) -> torch.device:
        return self._device

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        return StepOutput(logit=batch.label, tower_logits={}, loss=batch.label, finite=batch.label)

    def kept(self) -> dict[str, torch.Tensor]:
        return {}


def _kept_batches(config: Config, datasets: Datasets, machine: Machine) -> list[Batch]:
    """The first full batches of training, on the device."""
    size, rows = config.train.local_batch_size, datasets.train.num_rows
    if rows < size:
        raise UserError(
            f"advise: {rows:,} training rows do not fill a batch of train.local_batch_size: {size:,}; give more rows, "
            f"or use train.local_batch_size={max(rows, 1)}"
        )
    every = datasets.train.batches(0)
    try:
        first = itertools.islice(every, min(RESIDENT_BATCHES, rows // size))
        return [batch.to(machine.device) for batch in first]
    finally:
        every.close()  # type: ignore[attr-defined]  # stops the loader's threads


def _in_time(plans: Plans, workshop: OwnRows, machine: Machine, deadline_s: float) -> Pace:
    """How many turns fit: by a few steps of the first way that is launched kernel by kernel, the slowest kind."""
    on_cuda = machine.device.type == "cuda"
    eager = [arm for arm in plans.arms if arm.config is not None and arm.config.schedule.cuda_graph == "none"]
    step_s = 0.0
    for arm in eager:
        try:
            built = workshop.content.build(arm)
        except UserError:  # said of its row, once it takes its turn
            continue
        batches = workshop.batches(arm.batch)
        timed_turn(built.step, batches, 1)
        step_s = 1e-3 * float(np.median(timed_turn(built.step, batches, PILOT_STEPS).step_ms))
        break
    ways = sum(arm.config is not None for arm in plans.arms) if on_cuda else len(eager)
    return pace(deadline_s - time.monotonic(), step_s, ways + 1, on_cuda=on_cuda)


def _settings(name: str, config: Config, machine: Machine, found: Pace) -> Settings:
    ceilings = Ceilings.measure(machine.device, machine.dtype)
    return Settings(
        Path(name).stem,
        machine.device,
        found.repeats,
        found.steps,
        found.warmup,
        ceilings,
        feature_dims(config),
        speed_interval,
    )


def _data(decision: Decision, config: Config, workshop: OwnRows, found: Pace) -> DataCheck:
    """The recommended way on kept batches and on the loader's, in turns; then the loader by itself."""
    row = decision.recommended
    step, loader = workshop.built[row.arm].step, workshop.content.batches(row.batch)

    def turn(batches: Iterator[Batch]) -> Turn:
        timed_turn(step, batches, UNTIMED_STEPS)
        return timed_turn(step, batches, found.steps)

    kept = workshop.batches(row.batch)
    resident, loaded = take_turns([lambda: turn(kept), lambda: turn(loader)], DATA_TURNS)
    _close(loader)
    alone = workshop.content.batches(row.batch)
    full = workshop.content.datasets.train.num_rows // row.batch
    count = min(full, max(1, LOADER_WINDOWS * config.data.shuffle_window // row.batch))
    made = timed_turn(_NoStep(step.device()), alone, count)
    _close(alone)
    return DataCheck(
        resident_ms=float(mean_ms(resident).mean()),
        loader_step_ms=float(mean_ms(loaded).mean()),
        measured_wait_ms=float(np.mean([turn.wait_ms.mean() for turn in loaded])),
        alone_ms=float(made.wait_ms.mean()),
        batches=count,
        workers=loader_threads(config, on_cuda=workshop.content.machine.pins),
    )


def _limits(rows: Sequence[Row], workshop: OwnRows, machine: Machine) -> Limits | None:
    """Operations of the fastest way with an early backward, whose towers can be told apart."""
    row = fastest([row for row in rows if row.family == "early" and row.refused is None and row.repeats is None])
    if row is None:
        return None
    parts = workshop.built[row.arm].parts
    assert isinstance(parts, Parts)
    batches = workshop.batches(row.batch)
    ops = program(parts.plan)
    steps: list[Sequence[Interval]] = []
    while len(steps) < MEASURED_STEPS:
        cut = not parts.plan.is_exact(parts.guard.step)  # now and then a step may cut nothing
        parts.step(next(batches), measure=True)
        if cut:
            steps.append(parts.streams.intervals())
    return tower_limits(row.arm, ops if machine.device.type == "cuda" else as_launched(ops), median_durations(steps))


def _ne_commands(name: str, overrides: Sequence[str], plans: Plans, decision: Decision) -> str | None:
    if decision.exact is None or decision.cut is None:
        return None
    arms: dict[str, Arm] = {planned.arm.name: planned.arm for planned in plans.arms}
    return sweep_commands(name, overrides, arms[decision.exact.arm], arms[decision.cut.arm])


def _about(found: Pace, started_s: float) -> dict[str, object]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment.describe(),
        "turns": asdict(found),
        "seconds": time.monotonic() - started_s,
    }


def _close(batches: Iterator[Batch]) -> None:
    batches.close()  # type: ignore[attr-defined]  # stops the loader's threads
