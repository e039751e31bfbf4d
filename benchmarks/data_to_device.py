"""Does prepared data keep up with the device: rows a second that arrive there, and the share of steps spent waiting.

    python benchmarks/data_to_device.py --out data-to-device.json

Writes made-up Criteo rows, prepares them, and then, at each number of the loader's threads: batches to the device as
fast as they come; steps that only keep the device busy for 1 ms; and training steps of ``ctr_criteo.yaml`` in turns
with the same steps on batches that lie on the device. Under 90 s on one H200 and 16 cores. On a CPU it measures what
there is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_speed import BATCH_ROWS, HASH, PARQUET, config_of, erase_rec, prepare
from data.dataset import build_datasets
from erase_rec import environment
from erase_rec.api.assembly import Machine, build_parts, join_ranks
from erase_rec.batch import Batch, StepOutput
from erase_rec.bench.batches import RandomRows, full, rotated
from erase_rec.bench.turns import Turn, take_turns, timed_turn
from erase_rec.cli.main import run
from erase_rec.config.schema import Config
from erase_rec.prefetch import prefetch
from erase_rec.run_folder import RunFolder

STEP_MS = 1.0
CALIBRATION_CYCLES = 10_000_000
WARM_UP = 20
RESIDENT_BATCHES = 8


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


def shares(turns: list[Turn]) -> dict[str, float]:
    """Step time, and what part of it the host waited for batches."""
    step_ms = np.concatenate([turn.step_ms for turn in turns])
    wait_ms = np.concatenate([turn.wait_ms for turn in turns])
    return {
        "step_ms_p50": float(np.median(step_ms)),
        "step_ms_mean": float(step_ms.mean()),
        "data_wait_share": float(wait_ms.sum() / step_ms.sum()),
    }


def measured(config: Config, machine: Machine, rows: int, steps: int, repeats: int) -> dict[str, object]:
    """At one number of the loader's threads."""
    datasets = build_datasets(config, pin=machine.pins)

    def loaded() -> Iterator[Batch]:
        return full(prefetch(datasets.train.batches(0, endless=True), machine.device), BATCH_ROWS)

    found: dict[str, object] = {"rows_per_s": to_device(loaded(), rows, machine.device)}
    busy, batches = BusyStep(machine.device), loaded()
    timed_turn(busy, batches, WARM_UP)
    found["busy"] = shares([timed_turn(busy, batches, steps)])
    with join_ranks(config) as (world, _):
        parts = build_parts(config, datasets, RunFolder(Path()), machine, world)
        random = RandomRows.of(config, datasets.table_rows, exponent=0.0, seed=1)
        ways = {"resident": rotated(random.batches(BATCH_ROWS, RESIDENT_BATCHES, machine.device)), "loader": loaded()}
        for way in ways.values():
            timed_turn(parts.step, way, WARM_UP)
        turns = take_turns([lambda way=way: timed_turn(parts.step, way, steps) for way in ways.values()], repeats)
        found["training"] = {name: shares(taken) for name, taken in zip(ways, turns, strict=True)}
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the numbers go, as JSON.")],
    rows: Annotated[int, typer.Option(min=10 * BATCH_ROWS, help="Rows of the prepared data.")] = 1_000_000,
    read_rows: Annotated[int, typer.Option(min=1, help="Rows to bring to the device.")] = 10_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each kind of training step.")] = 4,
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
        source = (f"data.train={folder / 'raw' / 'train-00000.parquet'}", *PARQUET, *HASH)
        prepare(folder / "prepared", workers, *source)
        for count in threads.split(","):
            reading = (f"data.prepared={folder / 'prepared'}", f"train.local_batch_size={BATCH_ROWS}")
            config = config_of(*source, *reading, f"data.workers={count}", "schedule.preset=erase", *(override or []))
            with join_ranks(config) as (_, machine):
                results[count] = measured(config, machine, read_rows, steps, repeats)
            print(f"{count} threads: {json.dumps(results[count])}", flush=True)
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment.describe(),
        "cores": len(os.sched_getaffinity(0)),
        "device": machine.name(),
        "batch": BATCH_ROWS,
        "by_threads": results,
    }
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)
