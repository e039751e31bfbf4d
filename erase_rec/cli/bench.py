"""``erase-rec bench``: step time of several presets on one model, interleaved in one process."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class ArmResult:
    """Step times of one arm over its turns, and its speed relative to the first arm (low, middle, high)."""

    preset: str
    batch: int
    step_ms_p10: float
    step_ms_p50: float
    step_ms_p90: float
    qps_p50: float
    speed_to_first: tuple[float, float, float]

    @classmethod
    def of(cls, preset: str, batch: int, first: NDArray[np.float64], times: NDArray[np.float64]) -> ArmResult:
        """From the turns' mean step times in ms, of the first arm and of this one."""
        import numpy as np

        slow, middle, fast = (float(np.quantile(times, share)) for share in (0.1, 0.5, 0.9))
        return cls(preset, batch, slow, middle, fast, 1000 * batch / middle, speed_interval(first, times))


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    presets: Annotated[str, typer.Option(help="Comma-separated; the first is the reference.")] = (
        "exact,exact,exact_streams,detached,erase"
    ),
    rounds: Annotated[int, typer.Option(min=5, help="Times that all arms take their turn.")] = 12,
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
    from erase_rec.distributed.world import World
    from erase_rec.run_folder import RunFolder

    names = presets.split(",")
    configs = [
        load_config(config, [*(overrides or []), f"schedule.preset={name}"], catalog=ContentCatalog()).config
        for name in names
    ]
    machine = Machine.prepare(configs[0])
    datasets = build_datasets(configs[0])
    batches = resident_batches(datasets.train.batches(0), configs[0].train.local_batch_size, machine.device)
    arms = [build_parts(each, datasets, RunFolder(Path()), machine, World()).step for each in configs]
    for arm in arms:
        timed_turn(arm, batches, max(steps, 10))
    step_ms = np.empty((len(arms), rounds))
    for turn in range(rounds):
        order = range(len(arms)) if turn % 2 == 0 else reversed(range(len(arms)))
        for index in order:
            timed_turn(arms[index], batches, 2)
            step_ms[index, turn] = timed_turn(arms[index], batches, steps)
    batch_size = configs[0].train.local_batch_size
    results = [ArmResult.of(name, batch_size, step_ms[0], times) for name, times in zip(names, step_ms, strict=True)]
    table = Table("preset", "batch", "step ms p10", "p50", "p90", "QPS p50", f"speed / {names[0]} (95 %)")
    for each in results:
        low, middle, high = each.speed_to_first
        times_ms = (f"{value:.3f}" for value in (each.step_ms_p10, each.step_ms_p50, each.step_ms_p90))
        speed = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
        table.add_row(each.preset, f"{each.batch:,}", *times_ms, f"{each.qps_p50:,.0f}", speed)
    Console(width=120).print(table)
    if out is not None:
        record = {
            "device": machine.name(),
            "rounds": rounds,
            "steps": steps,
            "rows": [asdict(each) for each in results],
        }
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def resident_batches(batches: Iterator[Batch], size: int, device: torch.device, count: int = 8) -> list[Batch]:
    """The first full batches, on the device.

    Raises:
        UserError: the data hold no full batch.
    """
    full = [batch.to(device) for batch in itertools.islice(batches, count) if batch.size == size]
    if not full:
        raise UserError(f"bench: the data hold fewer rows than train.local_batch_size={size}")
    return full


def timed_turn(step: TrainStep, batches: list[Batch], count: int) -> float:
    """Mean step time of ``count`` steps in ms; device events on CUDA, host clock on the CPU."""
    from erase_rec.throughput import StepTimer, clock_for

    timer = StepTimer(clock_for(step.device()))
    timer.resume()
    for index in range(count):
        batch = batches[index % len(batches)]
        step(batch)
        timer.step(batch.size)
    return timer.total().step_ms


def speed_interval(reference: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float, float]:
    """Speed relative to the reference: mean of paired log-ratios and its 95 % interval, by a studentized bootstrap."""
    import numpy as np

    from eval.statistics import studentized_bootstrap

    logs = studentized_bootstrap(np.log(reference / times))
    return math.exp(logs.low), math.exp(logs.mid), math.exp(logs.high)
