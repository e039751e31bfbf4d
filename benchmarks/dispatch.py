"""Who launches an early backward, and where DDP accumulates: step time, host time and overlap of each way.

    python benchmarks/dispatch.py --config bench/h200.yaml train.local_batch_size=4096 --out dispatch.json

One process with a process group of one rank. All ways train one model shape on the same resident batches and take turns
(A B .. B A); afterwards some of their steps are measured operation by operation. Host times are those of the launches
alone, without the wait for the step before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.dataset import Datasets, build_datasets
from erase_rec import environment
from erase_rec.api.assembly import ContentCatalog, Machine, make_optimizer
from erase_rec.batch import Batch
from erase_rec.bench.batches import RandomRows, rotated
from erase_rec.bench.turns import timed_turn
from erase_rec.cli.bench import speed_interval
from erase_rec.cli.main import run
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World
from erase_rec.finite import FiniteGuard
from erase_rec.protocols import Embeddings
from erase_rec.schedule.dispatch import BlockingDispatch, WorkerDispatch
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.overlap import overlap_report
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.program import program
from erase_rec.schedule.reduction.build import make_reduction
from erase_rec.schedule.step import ScheduledStep
from erase_rec.schedule.streams import NullStreams, make_streams
from models.ctr_model import build_local_losses, build_model
from models.embeddings.build import build_embeddings

WARM_UP_STEPS = 20
MEASURED_STEPS = 20
RESIDENT_BATCHES = 8
DDP_FUP = ("distributed.reduction=ddp", "distributed.find_unused_parameters=true")
DDP = ("distributed.reduction=ddp", "distributed.find_unused_parameters=false")


@dataclass(frozen=True)
class Way:
    """One way to run the model.

    Attributes:
        name: shown.
        overrides: of the configuration.
        engine_threads: whether the autograd engine runs backwards on threads of its own.
        ddp_on_default_stream: DDP is built as user code builds it, with every accumulator on the default stream.
    """

    name: str
    overrides: tuple[str, ...]
    engine_threads: bool = True
    ddp_on_default_stream: bool = False


EARLY = "schedule.preset=erase"
TOGETHER = "schedule.optimizer=end"
LAUNCHED = (EARLY, "schedule.dispatch=blocking", "schedule.cuda_graph=none")
BLOCKING = (*LAUNCHED, TOGETHER)
NON_BLOCKING = (EARLY, "schedule.dispatch=non_blocking", "schedule.cuda_graph=none", TOGETHER)
BLOCKING_GRAPHS = (EARLY, "schedule.dispatch=blocking", "schedule.cuda_graph=tower", TOGETHER)
NON_BLOCKING_GRAPHS = (EARLY, "schedule.dispatch=non_blocking", "schedule.cuda_graph=tower", TOGETHER)
WAYS = (
    Way("detached, aggregate, one stream", ("schedule.preset=detached",)),
    Way("detached, aggregate, one stream (again)", ("schedule.preset=detached",)),
    Way("exact, one stream", ("schedule.preset=exact",)),
    Way("exact, streams", ("schedule.preset=exact_streams",)),
    Way("blocking", BLOCKING),
    Way("blocking, no engine threads", BLOCKING, engine_threads=False),
    Way("non-blocking", NON_BLOCKING, engine_threads=False),
    Way("non-blocking, engine threads", NON_BLOCKING),
    Way("non-blocking, 3 workers", (*NON_BLOCKING, "schedule.workers=3"), engine_threads=False),
    Way("blocking, tower graphs", BLOCKING_GRAPHS),
    Way("non-blocking, tower graphs", NON_BLOCKING_GRAPHS, engine_threads=False),
    Way(
        "blocking, bucket, per-tower optimizer",
        (*LAUNCHED, "distributed.reduction=bucket", "schedule.optimizer=per_tower"),
    ),
    Way("blocking, DDP FUP=True (row 2)", (*BLOCKING, *DDP_FUP)),
    Way("blocking, DDP FUP=True, built on the default stream", (*BLOCKING, *DDP_FUP), ddp_on_default_stream=True),
    Way("blocking, DDP FUP=False (row 3)", (*BLOCKING, *DDP)),
    Way("non-blocking, DDP FUP=True (row 0)", (*NON_BLOCKING, *DDP_FUP), engine_threads=False),
    Way(
        "non-blocking, tower graphs, DDP FUP=False (row 1)",
        (*NON_BLOCKING_GRAPHS, *DDP),
        engine_threads=False,
    ),
)


@dataclass(frozen=True)
class Row:
    """Result of one way. Times are medians in ms; ``speed`` is relative to the first way (low, middle, high).

    Without an early backward, ``host_ms_per_tower`` and ``hidden_share`` are None.
    """

    way: str
    batch: int
    step_ms: float
    speed: tuple[float, float, float]
    host_ms: float
    overlap_share: float
    host_ms_per_tower: float | None
    hidden_share: float | None

    def markdown(self) -> str:
        """A line of the table."""
        low, middle, high = self.speed
        a_tower = "" if self.host_ms_per_tower is None else f"{self.host_ms_per_tower:.3f}"
        hidden = "" if self.hidden_share is None else f"{100 * self.hidden_share:.0f} %"
        speed = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
        overlap = f"{100 * self.overlap_share:.0f} %"
        return f"| {self.way} | {self.step_ms:.3f} | {speed} | {self.host_ms:.2f} | {a_tower} | {hidden} | {overlap} |"


@dataclass
class Arm:
    """A way, built."""

    way: Way
    step: ScheduledStep
    streams: MeasuredStreams
    plan: Plan
    engine: Callable[[], AbstractContextManager[object]]
    turns: list[float] = field(default_factory=list)

    def turn(self, batches: list[Batch], steps: int) -> float:
        """Mean time of ``steps`` steps in ms."""
        with self.engine():
            return float(timed_turn(self.step, rotated(batches), steps).step_ms.mean())

    def row(self, batches: list[Batch], first: NDArray[np.float64]) -> Row:
        """Measures some steps, operation by operation."""
        found = []
        for index in range(MEASURED_STEPS):
            with self.engine():
                self.step(batches[index % len(batches)], measure=True)
            intervals = self.streams.intervals()
            report = overlap_report(intervals, program(self.plan))
            early = [each.launched_ms - each.launch_ms for each in intervals if each.op.kind == "early_backward"]
            host_ms = intervals[-1].launched_ms - intervals[0].launch_ms
            found.append((host_ms, report.overlap_share, np.mean(early or [0.0]), report.hidden_share))
        host_ms, overlap, a_tower, hidden = (float(np.median(values)) for values in zip(*found, strict=True))
        has_early = any(tower.early for tower in self.plan.towers)
        times = np.array(self.turns)
        return Row(
            self.way.name,
            batches[0].size,
            float(np.median(times)),
            speed_interval(first, times),
            host_ms,
            overlap,
            a_tower if has_early else None,
            hidden if has_early else None,
        )


def build(way: Way, config: Config, datasets: Datasets, embeddings: Embeddings, machine: Machine, world: World) -> Arm:
    """The step of a way, around tables that all ways share."""
    model = build_model(config, embeddings, machine.device)
    plan = Plan.from_config(config)
    streams = MeasuredStreams(make_streams(plan.streams(), machine.device), machine.device)
    blocks = trained_blocks(model, plan)
    optimizer = make_optimizer(config, model, plan, blocks, machine.dtype)
    where = NullStreams() if way.ddp_on_default_stream else streams
    by_worker = plan.dispatch == "non_blocking"
    gradients = GradientProgram(
        model,
        plan,
        build_local_losses(config),
        streams,
        device=machine.device,
        reduction=make_reduction(plan, blocks, world, where, chunk_mib=config.distributed.bucket_mib),
        dispatch=WorkerDispatch(plan.workers, machine.device, engine_threads=way.engine_threads)
        if by_worker
        else BlockingDispatch(),
    )
    step = ScheduledStep(gradients, optimizer, FiniteGuard(datasets.train.locate))
    off = not (way.engine_threads or by_worker)
    return Arm(
        way, step, streams, plan, lambda: torch.autograd.set_multithreading_enabled(False) if off else nullcontext()
    )


def main(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    only: Annotated[str, typer.Option(help="Take only ways whose name holds this, and the first.")] = "",
    rounds: Annotated[int, typer.Option(min=5, help="Times that all ways take their turn.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Compare the ways to launch early backwards on one device."""
    ways = [way for way in WAYS if only in way.name or way is WAYS[0]]
    configs = [
        load_config(config, [*(overrides or []), *way.overrides], catalog=ContentCatalog()).config for way in ways
    ]
    machine = Machine.prepare(configs[0])
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # one of the ways is wrong on purpose
    with join_world(on_cuda=machine.device.type == "cuda", timeout_s=60, grouped=True) as world:
        datasets = build_datasets(configs[0])
        embeddings = build_embeddings(configs[0], datasets.table_rows, machine.device, machine.dtype)
        rows = RandomRows.of(configs[0], datasets.table_rows, exponent=0, seed=configs[0].seed)
        batches = rows.batches(configs[0].train.local_batch_size, RESIDENT_BATCHES, machine.device)
        arms = [build(way, each, datasets, embeddings, machine, world) for way, each in zip(ways, configs, strict=True)]
        for arm in arms:
            arm.turn(batches, WARM_UP_STEPS)
        for turn in range(rounds):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                arm.turn(batches, 2)
                arm.turns.append(arm.turn(batches, steps))
        rows = [arm.row(batches, np.array(arms[0].turns)) for arm in arms]
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": machine.name(),
        "environment": environment.describe(),
        "config": config,
        "overrides": overrides or [],
        "rounds": rounds,
        "steps": steps,
        "rows": [asdict(row) for row in rows],
    }
    print("| way | step ms | speed to the first [95 %] | host ms | host ms a tower | hidden | overlap |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.markdown())
    if out is not None:
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)
