"""``erase-rec bench``: step time of several presets on one model, interleaved in one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from erase_rec.batch import Batch
    from erase_rec.protocols import TrainStep

BOOTSTRAP_SAMPLES = 2000


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    presets: Annotated[str, typer.Option(help="Comma-separated; the first is the reference.")] = (
        "exact,exact,exact_streams,detached,erase"
    ),
    rounds: Annotated[int, typer.Option(min=2, help="Times that all arms take their turn.")] = 12,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of an arm's turn.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Time training steps on resident batches; arms alternate (A B .. B A), a preset named twice is the A/A pair."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from data.dataset import build_datasets
    from erase_rec.cli.assembly import ContentCatalog, Machine, build_parts
    from erase_rec.config.load import load_config
    from erase_rec.run_folder import RunFolder

    names = presets.split(",")
    configs = [
        load_config(config, [*(overrides or []), f"schedule.preset={name}"], catalog=ContentCatalog()).config
        for name in names
    ]
    machine = Machine.prepare(configs[0])
    datasets = build_datasets(configs[0])
    batches = _resident(datasets.train.batches(0), configs[0].train.local_batch_size, machine.device)
    arms = [build_parts(each, datasets, RunFolder(Path()), machine).step for each in configs]
    for arm in arms:
        _turn(arm, batches, max(steps, 10))
    step_ms = np.empty((len(arms), rounds))
    for turn in range(rounds):
        order = range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms)))
        for index in order:
            _turn(arms[index], batches, 2)
            step_ms[index, turn] = _turn(arms[index], batches, steps)
    rows = []
    for name, times in zip(names, step_ms, strict=True):
        low, middle, high = _ratio_interval(step_ms[0], times)
        rows.append(
            {
                "preset": name,
                "batch": configs[0].train.local_batch_size,
                "step_ms_p10": float(np.quantile(times, 0.1)),
                "step_ms_p50": float(np.quantile(times, 0.5)),
                "step_ms_p90": float(np.quantile(times, 0.9)),
                "qps_p50": 1000 * configs[0].train.local_batch_size / float(np.quantile(times, 0.5)),
                "speed_to_first": [low, middle, high],
            }
        )
    table = Table("preset", "batch", "step ms p10", "p50", "p90", "QPS p50", f"speed / {names[0]} (95 %)")
    for row in rows:
        low, middle, high = row["speed_to_first"]
        table.add_row(
            row["preset"],
            f"{row['batch']:,}",
            *(f"{row[key]:.3f}" for key in ("step_ms_p10", "step_ms_p50", "step_ms_p90")),
            f"{row['qps_p50']:,.0f}",
            f"{middle:.3f} [{low:.3f}, {high:.3f}]",
        )
    Console(width=120).print(table)
    if out is not None:
        record = {"device": machine.name(), "rounds": rounds, "steps": steps, "rows": rows}
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _resident(batches: Iterator[Batch], size: int, device: torch.device, count: int = 8) -> list[Batch]:
    """The first full batches, on the device.

    Raises:
        UserError: the data hold no full batch.
    """
    full = [batch.to(device) for batch in itertools.islice(batches, count) if batch.size == size]
    if not full:
        raise UserError(f"bench: the data hold fewer rows than train.local_batch_size={size}")
    return full


def _turn(step: TrainStep, batches: list[Batch], count: int) -> float:
    """Mean step time of ``count`` steps in ms; device events on CUDA, host clock on the CPU."""
    from erase_rec.throughput import StepTimer, clock_for

    timer = StepTimer(clock_for(step.device()))
    timer.resume()
    for index in range(count):
        batch = batches[index % len(batches)]
        step(batch)
        timer.step(batch.size)
    return timer.total().step_ms


def _ratio_interval(reference: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float, float]:
    """Speed relative to the reference: mean of paired log-ratios and its 95 % bootstrap interval over rounds."""
    import numpy as np

    logs = np.log(reference / times)
    draws = np.random.default_rng(0).choice(logs, (BOOTSTRAP_SAMPLES, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.exp(low)), float(np.exp(logs.mean())), float(np.exp(high))
