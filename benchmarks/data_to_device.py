"""Does prepared data keep up with the device: rows a second that arrive there, and how long it stands still.

    python benchmarks/data_to_device.py --out data-to-device.json [--config bench/h200.yaml]

Writes made-up Criteo rows, prepares them, and then, at each number of the loader's threads: batches to the device as
fast as they come; steps that only keep the device busy for 1 ms; and training steps of the configuration in turns with
the same steps on batches that lie on the device. A host that launches a step faster than the device runs it asks for
batches long before they are needed, and waits while the device is at work; so two times are told apart: what the host
waited, and what the device stood still between two steps until the batch was there. The steps that it stood still for
longest are listed with what began at their batch: an epoch, or a window of shuffled rows. Under 100 s on one H200 and 4
cores. On a CPU it measures what there is.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_speed import BATCH_ROWS, HASH, PARQUET, erase_rec, prepare
from data.dataset import build_datasets
from data.loader import Loader
from erase_rec import environment
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts, join_ranks
from erase_rec.batch import Batch, StepOutput
from erase_rec.bench.batches import RandomRows, full, rotated
from erase_rec.bench.turns import FloatArray, Turn, mean_ms, take_turns, timed_turn
from erase_rec.cli.main import run
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.prefetch import prefetch
from erase_rec.protocols import TrainStep
from erase_rec.run_folder import RunFolder
from erase_rec.throughput import clock_for

STEP_MS = 1.0
CALIBRATION_CYCLES = 10_000_000
WARM_UP = 20
RESIDENT_BATCHES = 8
LATEST, SHOWN = 12, 4
"""Late steps of a turn that are kept, and shown."""


class BusyStep:
    """Keeps the device busy for about :data:`STEP_MS`, as a step that is one launch: no host time."""

    def __init__(self, device: torch.device) -> None:
        """Measures the device's clock. Synchronises the host."""
        self._device = device
        self._cycles = 0
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            end.record()
            end.synchronize()
            self._cycles = int(CALIBRATION_CYCLES * STEP_MS / begin.elapsed_time(end))

    def device(self) -> torch.device:
        """Where it is busy."""
        return self._device

    def kept(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def __call__(self, batch: Batch, *, measure: bool = False) -> StepOutput:
        """Reads the batch's labels, and is busy."""
        if self._device.type == "cuda":
            torch.cuda._sleep(self._cycles)
        else:
            time.sleep(STEP_MS / 1e3)
        return StepOutput(batch.label.clone(), {}, batch.label[0], batch.label[:1] >= 0)


def to_device(batches: Iterator[Batch], rows: int, device: torch.device) -> float:
    """Rows a second that arrive, each read once on the device; the first batches are not timed."""
    for _ in range(WARM_UP):
        next(batches)
    synchronize(device)
    start_s, found, read = time.perf_counter(), 0, torch.zeros((), device=device)
    while found < rows:
        batch = next(batches)
        read += batch.label.sum() + batch.dense[-1].sum() + batch.sparse.values[-1]
        found += batch.size
    synchronize(device)
    return found / (time.perf_counter() - start_s)


def synchronize(device: torch.device) -> None:
    """Waits for the device, where there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Asked:
    """What was asked of the loader since :meth:`news` was last called.

    Attributes:
        loader_ms: host time that it took.
        begins: ``epoch`` or ``window`` where a batch is the first of one, or the one that two windows share.
    """

    loader_ms: float = 0.0
    begins: str = ""

    def news(self) -> Asked:
        """What is known; begins anew."""
        found = replace(self)
        self.loader_ms, self.begins = 0.0, ""
        return found


def watched(loader: Loader, asked: Asked) -> Iterator[Batch]:
    """Batches of endless epochs; ``asked`` is told of each. Closes the loader's at its end."""
    batches, memory = loader.batches(0, endless=True), 0
    try:
        for number in itertools.count():
            start_s = time.perf_counter()
            batch = next(batches)
            asked.loader_ms += 1e3 * (time.perf_counter() - start_s)
            found = batch.label.untyped_storage().data_ptr()
            if number % loader.steps_left() == 0:
                asked.begins = "epoch"
            elif found != memory:
                asked.begins = asked.begins or "window"
            memory = found
            yield batch
    finally:
        batches.close()  # type: ignore[attr-defined]  # stops the loader's threads


@dataclass(frozen=True)
class WatchedTurn(Turn):
    """Some consecutive steps.

    Attributes:
        host_ms: time that the host waited for each batch, while the device may have been at work.
        asked: what each made the loader do, which is for a later step.
    """

    host_ms: FloatArray
    asked: list[Asked]

    def latest(self, count: int) -> list[dict[str, object]]:
        """The steps that the device waited for longest."""
        steps = np.argsort(-self.wait_ms, kind="stable")[:count].tolist()
        return [
            {
                "step": step,
                "idle_ms": round(float(self.wait_ms[step]), 3),
                "host_ms": round(float(self.host_ms[step]), 3),
                "loader_ms": round(self.asked[step].loader_ms, 3),
                "begins": self.asked[step].begins,
            }
            for step in steps
        ]


def watched_turn(step: TrainStep, batches: Iterator[Batch], asked: Asked, count: int) -> WatchedTurn:
    """As :func:`timed_turn`, with the host's time for each batch, and what it asked of the loader meanwhile."""
    clock = clock_for(step.device())
    ends, there, host_s, found = [clock.mark()], [], [], []
    asked.news()
    for _ in range(count):
        start_s = time.perf_counter()
        batch = next(batches)
        there.append(clock.mark())
        host_s.append(time.perf_counter() - start_s)
        found.append(asked.news())
        step(batch)
        ends.append(clock.mark())
    seconds = [clock.seconds(first, then) for first, then in pairwise(ends)]
    idle = [clock.seconds(end, mark) for end, mark in zip(ends[:-1], there, strict=True)]
    return WatchedTurn(1e3 * np.array(seconds), 1e3 * np.array(idle), 1e3 * np.array(host_s), found)


def told(turns: Sequence[Turn]) -> dict[str, object]:
    """Step times, and what part of them the host waited for batches and the device stood still."""
    step_ms = np.concatenate([turn.step_ms for turn in turns])
    found: dict[str, object] = {
        "step_ms_p50": float(np.median(step_ms)),
        "step_ms_mean": float(step_ms.mean()),
        "step_ms_p99": float(np.quantile(step_ms, 0.99)),
        "device_idle_share": float(sum(turn.wait_ms.sum() for turn in turns) / step_ms.sum()),
    }
    seen = [turn for turn in turns if isinstance(turn, WatchedTurn)]
    if seen:
        found["host_wait_share"] = float(sum(turn.host_ms.sum() for turn in seen) / step_ms.sum())
        found["latest"] = [turn.latest(LATEST) for turn in seen]
    return found


def page_locked() -> dict[str, float]:
    """How often page-locked memory was asked of the driver so far, and the milliseconds that it took."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.host_memory_stats()
    return {"allocations": float(stats["num_host_alloc"]), "ms": stats["host_alloc_time.total"] / 1e3}


def measured(config: Config, machine: Machine, read_rows: int, steps: int, repeats: int) -> dict[str, object]:
    """At one number of the loader's threads."""
    datasets = build_datasets(config, pin=machine.pins)
    warm_up = (config.data.workers + 2) * config.data.shuffle_window // BATCH_ROWS
    asked = Asked()

    def loaded() -> Generator[Batch, None, None]:
        yield from full(prefetch(watched(datasets.train, asked), machine.device), BATCH_ROWS)

    found: dict[str, object] = {}
    with closing(loaded()) as batches:
        found["rows_per_s"] = to_device(batches, read_rows, machine.device)
    with closing(loaded()) as batches:
        busy = BusyStep(machine.device)
        timed_turn(busy, batches, warm_up)
        found["busy"] = told([watched_turn(busy, batches, asked, steps)])
    with join_ranks(config) as (world, _), closing(loaded()) as batches:
        parts = build_parts(config, datasets, RunFolder(Path()), machine, world)
        random = RandomRows.of(config, datasets.table_rows, exponent=0.0, seed=1)
        resident = rotated(random.batches(BATCH_ROWS, RESIDENT_BATCHES, machine.device))
        timed_turn(parts.step, resident, WARM_UP)
        timed_turn(parts.step, batches, warm_up)
        locked = page_locked()
        turns = [
            lambda: timed_turn(parts.step, resident, steps),
            lambda: watched_turn(parts.step, batches, asked, steps),
        ]
        still, fed = take_turns(turns, repeats)
        found["training"] = {
            "resident": told(still),
            "loader": told(fed),
            "lost": [float(loaded / kept - 1) for kept, loaded in zip(mean_ms(still), mean_ms(fed), strict=True)],
        }
        found["page_locked"] = {"before the turns": locked, "after": page_locked()}
    return found


def show(threads: str, found: dict[str, Any]) -> None:
    """Prints what a person wants to know."""
    busy, fed, still = found["busy"], found["training"]["loader"], found["training"]["resident"]
    print(f"{threads} threads: {found['rows_per_s']:,.0f} rows/s to the device")
    print(f"  page-locked memory asked of the driver: {found['page_locked']}")
    for name, one in ((f"a step of {STEP_MS:g} ms", busy), ("training step", fed)):
        print(
            f"  {name}: mean {one['step_ms_mean']:.3f} ms, median {one['step_ms_p50']:.3f}, "
            f"p99 {one['step_ms_p99']:.3f}; "
            f"device idle {one['device_idle_share']:.1%}, host waits {one['host_wait_share']:.1%}"
        )
        for turn, latest in enumerate(one["latest"]):
            for step in latest[:SHOWN]:
                print(f"    turn {turn}: {step}")
    lost = ", ".join(f"{share:.1%}" for share in found["training"]["lost"])
    print(
        f"  resident: mean {still['step_ms_mean']:.3f} ms, median {still['step_ms_p50']:.3f}; lost by turns: {lost}",
        flush=True,
    )


def main(
    out: Annotated[Path, typer.Option(help="Where the numbers go, as JSON.")],
    config_name: Annotated[str, typer.Option("--config", help="Of the model.")] = "bench/h200.yaml",
    rows: Annotated[int, typer.Option(min=10 * BATCH_ROWS, help="Rows of the prepared data.")] = 1_000_000,
    read_rows: Annotated[int, typer.Option(min=1, help="Rows to bring to the device.")] = 10_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 640,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each kind of training step.")] = 3,
    threads: Annotated[str, typer.Option(help="Numbers of the loader's threads.")] = "0,2,4",
    workers: Annotated[int, typer.Option(min=1, help="Processes of prepare.")] = len(os.sched_getaffinity(0)),
    override: Annotated[list[str] | None, typer.Option(help="Of the configuration: key=value.")] = None,
) -> None:
    """Measure and print what is found at each number of threads."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="data-to-device-") as made:
        folder = Path(made)
        erase_rec(
            *("synth", "--rows", str(rows), "--eval-rows", "0", "--format", "parquet", "--out", str(folder / "raw"))
        )
        source = (f"data.train={folder / 'raw' / 'train-00000.parquet'}", "data.params=null", *PARQUET, *HASH)
        prepare(folder / "prepared", workers, *source)
        reading = (*source, f"data.prepared={folder / 'prepared'}", f"train.local_batch_size={BATCH_ROWS}")
        for count in threads.split(","):
            overrides = [*reading, f"data.workers={count}", *(override or [])]
            config = load_config(config_name, overrides, catalog=ContentCatalog()).config
            with join_ranks(config) as (_, machine):
                results[count] = found = measured(config, machine, read_rows, steps, repeats)
            show(count, found)
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment.describe(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "device": machine.name(),
        "config": config_name,
        "overrides": override or [],
        "batch": BATCH_ROWS,
        "by_threads": results,
    }
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)
