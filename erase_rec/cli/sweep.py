"""``erase-rec sweep``: many runs from one file, each a process with its own folder and log."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loads torch, which the command line does only after it was checked
    from erase_rec.sweep.record import SweepRecord


def command(
    config: Annotated[
        str, typer.Option("--config", help="A YAML file of a sweep, looked up here and in the checkout's configs/.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for all points.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; give each its cores by train.threads.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points, and run none.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; runs/NAME by default.")] = None,
) -> None:
    """Run every point of a sweep; finished ones are skipped, interrupted ones go on. Exit 1 where a point failed."""
    from erase_rec.cli.assembly import ContentCatalog
    from erase_rec.config.document import display
    from erase_rec.sweep.file import read_sweep
    from erase_rec.sweep.points import plan_points
    from erase_rec.sweep.record import SweepRecord
    from erase_rec.sweep.run import run_sweep
    from erase_rec.sweep.view import Results, arm_table, point_table, shown
    from erase_rec.text_table import table_console

    sweep = read_sweep(config)
    points = plan_points(sweep, overrides or [], catalog=ContentCatalog())
    folder = out or Path("runs") / sweep.name
    base = Path(display(sweep.base))
    said = shlex.join(["erase-rec", *sys.argv[1:]])
    record = SweepRecord.of(points, folder, name=sweep.name, config=str(base), command=said)
    console = table_console()
    if dry_run:
        console.print(point_table(record).rich())
        return
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make {folder}: {error.strerror}") from error
    results = Results(folder)
    with shown(console, results) as view:
        stopped = run_sweep(record, folder, config=base, ranks=sweep.file.ranks, jobs=jobs, view=view)
    if not console.is_terminal:
        console.print(arm_table(record, results).rich())
    _conclude(record, folder, stopped)


def _conclude(record: SweepRecord, folder: Path, stopped: int | None) -> None:
    """What is wrong or left, and the exit code."""
    failed = [point for point in record.points if point.status == "failed"]
    for point in failed:
        where = f"{folder / point.folder}.log"
        print(f"failed: {point.arm}, seed {point.seed}: {point.reason} ({where})", file=sys.stderr)
    if stopped is not None:
        print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(128 + stopped)
    print(f"sweep: {folder / 'sweep.json'}")
    if failed:
        raise typer.Exit(1)
