"""Ranks of which the last fails while it trains; several_gpus.py looks how the others end.

    torchrun --nproc-per-node 2 benchmarks/ranks/failing.py --how kill --folder marks

Every rank writes its process id as ``rank-R``; the last one writes ``failed`` just before it is killed or stopped.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, build_parts, join_ranks
from erase_rec.bench.batches import RandomRows
from erase_rec.cli.main import run
from erase_rec.config.load import load_config
from erase_rec.run_folder import RunFolder

CONFIG = "bench/several_gpus_check.yaml"
FAILS_AFTER_STEPS = 20
FAILED = "failed"
ROWS = 256


def main(
    folder: Annotated[Path, typer.Option(help="Where the ranks leave their marks.")],
    how: Annotated[Literal["kill", "stop"], typer.Option(help="SIGKILL, or SIGSTOP: a rank that hangs.")] = "kill",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
) -> None:
    """Train without end, until the last rank fails."""
    config = load_config(CONFIG, overrides or [], catalog=ContentCatalog()).config
    with join_ranks(config) as (world, machine):
        (folder / f"rank-{world.rank}").write_text(str(os.getpid()))
        datasets = build_datasets(config, rank=world.rank, world_size=world.size)
        parts = build_parts(config, datasets, RunFolder(Path()), machine, world)
        rows = RandomRows.of(config, datasets.table_rows, exponent=0.0, seed=world.rank)
        batches = rows.batches(ROWS, 2, machine.device)
        for number in itertools.count():
            world.collectives.step = number
            if number == FAILS_AFTER_STEPS and world.rank == world.size - 1:
                parts.guard.drain()
                (folder / FAILED).touch()
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            parts.step(batches[number % len(batches)])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run(app)
