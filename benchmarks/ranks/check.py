"""Ranks that train every legal way, each held to one process with the whole batch; started by several_gpus.py.

    torchrun --nproc-per-node 2 benchmarks/ranks/check.py --steps 300 --out check.json

A way passes where all ranks hold the same bits and asked for the same collectives (compared while it trains), and what
they hold lies within :data:`TOLERANCE` of one process. The distance is relative to how far training moved a block: a
gradient that is not averaged, or averaged twice, is off by about 1. As a control each rank also trains alone.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.dataset import Datasets, build_datasets
from erase_rec import environment
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts, join_ranks
from erase_rec.batch import Batch, SparseBatch
from erase_rec.bench.arms import Arm, PlannedArm, plan_arms
from erase_rec.bench.batches import RandomRows, rotated, told
from erase_rec.cli.main import run
from erase_rec.config.legality import REDUCTION_TABLE, Launch, Reduction
from erase_rec.distributed.replicas import blocks_of
from erase_rec.distributed.shards import Held, Shards
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder
from erase_rec.training_loop import Parts

CONFIG = "bench/several_gpus_check.yaml"
TOLERANCE = 1e-3
"""Of the distance that a block moved: rounding of float32 sums in another order, carried through all steps."""
DIFFERENT_BATCHES = 8
COMPARISONS = 6
"""Times that the ranks are compared with each other while a way trains."""

LAUNCHES: Mapping[Launch, Sequence[str]] = {
    "aggregate backward": ("schedule.early_backward=false", "schedule.cuda_graph=none"),
    "blocking": ("schedule.cuda_graph=none",),
    "non_blocking": ("schedule.dispatch=non_blocking", "schedule.cuda_graph=none"),
    "tower graph": ("schedule.cuda_graph=tower",),
    "dense graph": ("schedule.cuda_graph=dense",),
    "step graph": ("schedule.cuda_graph=step",),
}
REDUCTIONS: Mapping[Reduction, Sequence[str]] = {
    "bucket": ("distributed.reduction=bucket",),
    "ddp, FUP=False": ("distributed.reduction=ddp", "distributed.find_unused_parameters=false"),
    "ddp, FUP=True": ("distributed.reduction=ddp", "distributed.find_unused_parameters=true"),
    "ddp_per_tower": ("distributed.reduction=ddp_per_tower",),
}
EXACT: Mapping[str, Sequence[str]] = {
    "one stream, bucket": ("schedule.preset=exact",),
    "one stream, ddp": ("schedule.preset=exact", *REDUCTIONS["ddp, FUP=False"]),
    "streams, bucket": ("schedule.preset=exact_streams",),
    "one stream, step graph, bucket": ("schedule.preset=exact", "schedule.cuda_graph=step"),
    "streams, step graph, bucket": (
        *("schedule.preset=exact_streams", "schedule.cuda_graph=step", "schedule.optimizer=per_tower"),
    ),
}
SPREAD: Mapping[str, Sequence[str]] = {
    "blocking, bucket": LAUNCHES["blocking"],
    "tower graph, bucket": LAUNCHES["tower graph"],
    "dense graph, bucket": LAUNCHES["dense graph"],
}

Blocks = Mapping[str, Sequence[Held]]
"""Tensors of each tower, of the over-arch and of each table, by name."""


@dataclass
class Outcome:
    """What became of one way.

    Attributes:
        way: its name.
        overrides: what makes it.
        captured: replayed from CUDA graphs, or ended.
        steps: that it trained.
        error: largest distance of a block on any rank to one process, of the distance that it moved.
        worst: that block.
        collectives: that each rank issued.
        seconds: for all of it.
        problem: why it did not pass; None: it passed.
    """

    way: str
    overrides: tuple[str, ...]
    captured: bool
    steps: int = 0
    error: float | None = None
    worst: str | None = None
    collectives: int = 0
    seconds: float = 0.0
    problem: str | None = None


def ways(*, strict: bool) -> list[Arm]:
    """Every legal way, those with buckets first; ``strict``: captured ones end where they cannot be captured."""
    named: dict[str, tuple[Sequence[str], bool]] = {}
    for reduction, reduced in REDUCTIONS.items():
        for launch, launched in LAUNCHES.items():
            if REDUCTION_TABLE[launch, reduction].legal:
                named[f"detached, {launch}, {reduction}"] = (*launched, *reduced), False
        if reduction == "bucket":
            named |= {f"exact, {name}": (overrides, True) for name, overrides in EXACT.items()}
    for sharding in ("row_wise", "table_wise"):
        spread = (f"embedding.sharding={sharding}",)
        named |= {f"{sharding} tables, {name}": ((*keys, *spread), False) for name, keys in SPREAD.items()}
    return [
        Arm(
            name=f"way{number}",
            about=name,
            losses="none" if exact else None,
            overrides=(*overrides, *(("schedule.strict=true",) if strict and _captures(overrides) else ())),
        )
        for number, (name, (overrides, exact)) in enumerate(named.items())
    ]


def _captures(overrides: Sequence[str]) -> bool:
    return any(each.startswith("schedule.cuda_graph=") and not each.endswith("=none") for each in overrides)


def share(batch: Batch, rank: int, size: int) -> Batch:
    """The rows of one of ``size`` ranks, which divide a batch of single ids in rank order."""
    rows = torch.arange(batch.size, device=batch.label.device).chunk(size)[rank]
    fields = batch.sparse.num_features
    values = batch.sparse.values.reshape(fields, -1)[:, rows].flatten()
    sparse = SparseBatch(values, batch.sparse.lengths[: values.numel()], None, fields, single_valued=True)
    return Batch(batch.dense[rows], sparse, batch.label[rows], batch.row_ids[: len(rows)])


def held(parts: Parts) -> Blocks:
    """What this rank trains; shares storage."""
    blocks = blocks_of(parts.model, parts.optimizer.masters())
    tables = {f"table {name}": [value] for name, value in parts.model.embeddings.tables().items()}
    return {**blocks, **tables}


def copied(blocks: Blocks) -> dict[str, list[Tensor]]:
    """A copy of whole tensors."""
    return {name: [value.detach().clone() for value in values] for name, values in blocks.items()}  # type: ignore[union-attr]


def distances(found: Blocks, expected: Blocks, initial: Blocks) -> dict[str, float]:
    """Distance of each block to the expected one, of the distance that the expected one lies from the initial one.

    Of a table of which this rank holds parts, of those parts.
    """
    result = {}
    for name, values in found.items():
        off = moved = 0.0
        for value, right, start in zip(values, expected[name], initial[name], strict=True):
            for mine, theirs, before in _regions(value, right, start):
                off += float((mine - theirs).double().square().sum())
                moved += float((theirs - before).double().square().sum())
        result[name] = math.sqrt(off / moved) if moved else math.inf * off if off else 0.0
    return result


def _regions(value: Held, *whole: Any) -> Iterator[tuple[Tensor, ...]]:
    if not isinstance(value, Shards):
        yield value.detach(), *whole
        return
    for part in value.parts:
        region = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True))
        yield part.tensor.detach(), *(tensor[region] for tensor in whole)


@dataclass(frozen=True)
class Trainer:
    """Trains ways on the same batches.

    Attributes:
        datasets: sizes of the tables.
        machine: where.
        batches: of all ranks together.
        steps: of each way.
    """

    datasets: Datasets
    machine: Machine
    batches: Sequence[Batch]
    steps: int

    def build(self, planned: PlannedArm, world: World) -> Parts:
        """A way with initial weights, which every process makes alike."""
        assert planned.config is not None
        parts = build_parts(planned.config, self.datasets, RunFolder(Path()), self.machine, world)
        parts.optimizer.set_lr(planned.config.optimizer.dense.lr)
        parts.model.embeddings.set_lr(planned.config.optimizer.sparse.lr)
        return parts

    def train(self, parts: Parts, world: World, batches: Sequence[Batch]) -> None:
        """All steps; several ranks are compared with each other now and then.

        Raises:
            DivergenceError: the ranks' bits or collectives differ.
        """
        every = max(1, self.steps // COMPARISONS)
        expect = parts.model.embeddings.expect if parts.sharding is not None else None
        for number, batch in enumerate(told(rotated(batches), self.steps, expect)):
            if world.size > 1 and number % every == 0:
                parts.replicas.check(number)
            world.collectives.step = number
            parts.step(batch)
        parts.guard.drain()
        if world.size > 1:
            parts.replicas.check(self.steps)

    def alone(self, planned: PlannedArm, batches: Sequence[Batch]) -> tuple[Blocks, Blocks]:
        """What one process comes to on ``batches``, and where it began."""
        world = World()
        parts = self.build(planned, world)
        initial = copied(held(parts))
        self.train(parts, world, batches)
        return copied(held(parts)), initial


def try_way(trainer: Trainer, planned: PlannedArm, world: World, alone: tuple[Blocks, Blocks]) -> Outcome:
    """Trains one way and compares it; a problem that all ranks have is recorded, and the next way can be tried.

    Raises:
        RuntimeError: some ranks failed: the others wait for them in vain.
    """
    overrides = planned.arm.overrides
    outcome = Outcome(planned.arm.about, overrides, _captures(overrides) and "schedule.strict=true" in overrides)
    if planned.config is None:
        outcome.problem = f"refused: {planned.refusal}"
        return outcome
    start, before = time.perf_counter(), world.collectives.count
    found: dict[str, float] = {}
    try:
        parts = trainer.build(planned, world)
        trainer.train(parts, world, [share(batch, world.rank, world.size) for batch in trainer.batches])
        found = distances(held(parts), *alone)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this way's result
        problem: str | None = str(error) if isinstance(error, UserError) else traceback.format_exc()
    else:
        problem = None
    parts = None  # type: ignore[assignment]  # graphs and reducers go before the next way makes its own
    gc.collect()
    outcome.steps, outcome.collectives = trainer.steps, world.collectives.count - before
    problems = world.gather_objects("check.problems", problem)
    failed = [rank for rank, each in enumerate(problems) if each is not None]
    if failed and len(failed) < world.size:
        raise RuntimeError(f"{outcome.way}: failed on rank {failed[0]} alone: {problems[failed[0]]}")
    outcome.problem = problems[0]
    if outcome.problem is None:
        everywhere = world.gather_objects("check.distances", found)
        worst = {name: max(each[name] for each in everywhere) for name in found}
        outcome.worst = max(worst, key=lambda name: worst[name])
        outcome.error = worst[outcome.worst]
        if not outcome.error <= TOLERANCE:
            outcome.problem = f"{outcome.worst} is {outcome.error:.2e} from one process; {TOLERANCE:.0e} is rounding"
    outcome.seconds = time.perf_counter() - start
    return outcome


def main(
    out: Annotated[Path, typer.Option(help="JSON file, written after each way.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of each way.")] = 300,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step on one rank.")] = 256,
    only: Annotated[str, typer.Option(help="Ways whose name holds this.")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
) -> None:
    """Hold every legal way on several ranks to one process."""
    strict = torch.cuda.is_available() and "train.device=cpu" not in (overrides or [])
    detached, exact = (Arm(name=name, about=name, overrides=(f"schedule.preset={name}",)) for name in REFERENCES)
    arms = [
        detached,
        exact.model_copy(update={"losses": "none"}),
        *(arm for arm in ways(strict=strict) if only in arm.about),
    ]
    one, uncut, *planned = plan_arms(CONFIG, overrides or [], arms, [rows], catalog=ContentCatalog())
    if one.config is None or uncut.config is None:
        raise UserError(f"check: {one.refusal or uncut.refusal}")
    with join_ranks(one.config) as (world, machine):
        datasets = build_datasets(one.config, rank=world.rank, world_size=world.size, pin=machine.pins)
        random = RandomRows.of(one.config, datasets.table_rows, exponent=1.0, seed=one.config.seed)
        batches = random.batches(rows * world.size, DIFFERENT_BATCHES, machine.device)
        trainer = Trainer(datasets, machine, batches, steps)
        references = {each.arm.losses: trainer.alone(each, batches) for each in (one, uncut)}
        own, _ = trainer.alone(one, [share(batch, world.rank, world.size) for batch in batches])
        apart = min(distances(own, *references[None]).values())
        record = {
            "device": machine.name(),
            "environment": environment.describe(),
            "ranks": world.size,
            "tolerance": TOLERANCE,
            "control": min(world.gather_objects("check.control", apart)),
            "planned": len(planned),
            "ways": [],
        }
        for each in planned:
            outcome = try_way(trainer, each, world, references[each.arm.losses])
            record["ways"].append(asdict(outcome))
            if world.is_first:
                out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
                print(f"{outcome.way}: {outcome.problem or f'{outcome.error:.1e}'}", flush=True)


REFERENCES = ("detached", "exact")
"""Presets of the two models that one process trains: cut with local losses, and end to end."""

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)
