"""Trains a tiny model for very many steps and watches what the process holds: memory, files, threads, logs.

    nice -n 10 python benchmarks/long_run.py --steps 200000 --out long-run.json

The run is ``erase-rec train`` in a process of its own, on one thread, with early backwards, several epochs, evaluations
and checkpoints. It is sampled from outside. Growth is the slope of resident memory over the steps of the second half:
a least-squares line through the means of ``BLOCKS`` stretches of equal length, whose t interval allows for samples
that resemble their neighbours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from erase_rec import environment
from erase_rec.cli.main import run
from erase_rec.errors import UserError
from erase_rec.run_log import EVENT_PREFIX, METRICS_FILE

CHECKOUT = Path(__file__).resolve().parents[1]
BLOCKS = 20
TINY = (
    "data.params={rows: 20000, eval_rows: 2000, dense: 4, sparse: 6, max_categories: 50}",
    "features.dense=[I1, I2, I3, I4]",
    "features.sparse=[C1, C2, C3, C4, C5, C6]",
    "embedding={dim: 4, backend: torch}",
    "towers=[{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [16], out_dim: 8}},"
    " {name: cross, kind: dcn_v2, loss: {kind: bce}, params: {num_layers: 1, rank: 4, out_dim: 8}}]",
    "over_arch={hidden: [8]}",
)


@dataclass(frozen=True)
class Sample:
    """The process at one moment.

    Attributes:
        step: last logged step.
        seconds: since the start.
        rss_mib: resident memory.
        descriptors: open files.
        threads: of the process.
        events_mib: TensorBoard's event files.
        metrics_mib: ``metrics.jsonl``.
    """

    step: int
    seconds: float
    rss_mib: float
    descriptors: int
    threads: int
    events_mib: float
    metrics_mib: float


def main(
    out: Annotated[Path, typer.Option(help="JSON file with samples and slopes.")],
    steps: Annotated[int, typer.Option(min=2000, help="Steps to train.")] = 200_000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    log_every: Annotated[int, typer.Option(min=1, help="train.log_every_steps.")] = 50,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 2.0,
    config: Annotated[str, typer.Option(help="Base configuration.")] = "ctr_erase.yaml",
) -> None:
    """Trains, samples, prints the slopes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "train.py", "--config", config, *TINY),
            *(f"train.steps={steps}", "train.epochs=null", f"train.local_batch_size={batch}"),
            *("train.threads=1", "train.device=cpu", f"train.log_every_steps={log_every}"),
            *(f"train.eval_every_steps={steps // 20}", f"train.checkpoint_every_steps={steps // 20}"),
            *(f"run.dir={folder}", "run.name=long"),
        ]
        with (Path(folder) / "output").open("wb") as output:
            child = subprocess.Popen(command, cwd=CHECKOUT, stdout=output, stderr=subprocess.STDOUT)
            samples = list(_watch(child, Path(folder) / "long", every_s))
        if child.returncode:
            tail = (Path(folder) / "output").read_text(errors="replace")[-2000:]
            raise UserError(f"the run ended with exit code {child.returncode}: {tail}")
        summary = json.loads((Path(folder) / "long" / "summary.json").read_text())
    if not samples or samples[-1].step < steps * 0.9:
        raise UserError("the run ended before it could be watched; take more --steps or a smaller --every-s")
    found = {
        "command": ["erase-rec", "train", *command[2:]],
        "environment": environment.describe() | {"nice": str(os.nice(0))},
        "summary": summary,
        "slopes": slopes(samples),
        "samples": [asdict(sample) for sample in samples],
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    typer.echo(describe(samples, found["slopes"]))
    typer.echo(f"wrote {out}")


def _watch(child: subprocess.Popen[bytes], folder: Path, every_s: float) -> Iterator[Sample]:
    """Samples until the process ends; gives none before its first logged step."""
    start, process = time.monotonic(), psutil.Process(child.pid)
    while child.poll() is None:
        step = last_step(folder / METRICS_FILE)
        if step:
            try:
                with process.oneshot():
                    memory, threads = process.memory_info().rss, process.num_threads()
                descriptors = process.num_fds()
            except psutil.Error:
                break
            yield Sample(
                step=step,
                seconds=round(time.monotonic() - start, 2),
                rss_mib=memory / 2**20,
                descriptors=descriptors,
                threads=threads,
                events_mib=sum(file.stat().st_size for file in folder.glob(f"{EVENT_PREFIX}*")) / 2**20,
                metrics_mib=(folder / METRICS_FILE).stat().st_size / 2**20,
            )
        time.sleep(every_s)
    child.wait()


def last_step(metrics: Path) -> int:
    """The step of the last whole line; 0: there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - (64 << 10)))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def slopes(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Growth over the second half of the steps, for each quantity a 100,000 steps, with a 95 % interval."""
    half = [sample for sample in samples if sample.step >= samples[-1].step / 2]
    blocks = [block for block in np.array_split(np.arange(len(half)), BLOCKS) if len(block)]
    steps = np.array([np.mean([half[index].step for index in block]) for block in blocks]) / 1e5
    found = {}
    for name in ("rss_mib", "descriptors", "threads", "events_mib", "metrics_mib"):
        values = np.array([np.mean([getattr(half[index], name) for index in block]) for block in blocks])
        if np.ptp(values) == 0:  # no line has an interval then
            found[name] = {"per_100k_steps": 0.0, "low": 0.0, "high": 0.0}
            continue
        line = stats.linregress(steps, values)
        reach = float(stats.t.ppf(0.975, len(blocks) - 2)) * float(line.stderr)
        found[name] = {"per_100k_steps": float(line.slope), "low": line.slope - reach, "high": line.slope + reach}
    return found


def describe(samples: list[Sample], found: dict[str, dict[str, float]]) -> str:
    """The result as a Markdown table."""
    half = next(sample for sample in samples if sample.step >= samples[-1].step / 2)
    last = samples[-1]
    lines = [
        f"{len(samples)} samples up to step {last.step:,} in {last.seconds:,.0f} s",
        "",
        "| quantity | at half | at the end | most | growth in 100,000 steps (95 %) |",
        "|---|---|---|---|---|",
    ]
    for name, slope in found.items():
        most = max(getattr(sample, name) for sample in samples)
        lines.append(
            f"| {name} | {getattr(half, name):.2f} | {getattr(last, name):.2f} | {most:.2f} "
            f"| {slope['per_100k_steps']:+.3f} [{slope['low']:+.3f}, {slope['high']:+.3f}] |"
        )
    return "\n".join(lines)


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    run(app)
