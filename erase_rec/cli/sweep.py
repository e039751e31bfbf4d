"""``erase-rec sweep``: many runs from one file, each a process with its own folder and log."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:  # loaded after the command line was checked
    from erase_rec.sweep.file import ReadSweep
    from erase_rec.sweep.points import Point
    from erase_rec.sweep.record import SweepRecord
    from erase_rec.sweep.search import Cost


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
    from erase_rec.sweep.file import read_sweep
    from erase_rec.sweep.view import point_table
    from erase_rec.text_table import table_console

    sweep = read_sweep(config)
    folder = out or Path("runs") / sweep.name
    plans = _plans(sweep, overrides or [], folder)
    if dry_run:
        for points in plans:
            record = _record(sweep, points, folder)
            if any(point.status != "finished" for point in record.points):
                break  # a search draws the next points when these have ended
        table_console().print(point_table(record).rich())
        return
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make {folder}: {error.strerror}") from error
    _conclude(*_run(sweep, plans, folder, jobs), sweep, folder)


def _plans(sweep: ReadSweep, overrides: Sequence[str], folder: Path) -> Iterator[list[Point]]:
    """The points; of a search those so far, and more each time.

    Raises:
        UserError: what is wrong with any of them, before the first list.
    """
    from erase_rec.api.assembly import ContentCatalog
    from erase_rec.sweep.points import plan_points
    from erase_rec.sweep.search import check_search, draw_points

    if sweep.file.search is None:
        return iter([plan_points(sweep, overrides, catalog=ContentCatalog())])
    check_search(sweep, overrides, catalog=ContentCatalog())
    return draw_points(sweep, overrides, catalog=ContentCatalog(), cost=_cost(sweep, folder))


def _cost(sweep: ReadSweep, folder: Path) -> Cost:
    """The searched metric of a point's summary, lower is better."""
    from erase_rec.best_metric import COSTS
    from erase_rec.summary import Summary
    from erase_rec.sweep.record import has_finished

    assert sweep.file.search is not None
    metric = sweep.file.search.metric

    def cost(point: Point) -> float:
        run = folder / "points" / point.id
        if not has_finished(run):
            return math.nan
        return COSTS[metric](getattr(Summary.read(run).eval, metric.removeprefix("eval.")))

    return cost


def _record(sweep: ReadSweep, points: Sequence[Point], folder: Path) -> SweepRecord:
    from erase_rec.config.document import display
    from erase_rec.sweep.record import SweepRecord

    said = shlex.join(["erase-rec", *sys.argv[1:]])
    return SweepRecord.of(points, folder, name=sweep.name, config=display(sweep.base), command=said)


def _run(
    sweep: ReadSweep, plans: Iterator[list[Point]], folder: Path, jobs: int
) -> tuple[SweepRecord, list[Point], int | None]:
    """Runs list after list. Returns the last one, and the signal that stopped it, if any."""
    from erase_rec.sweep.lock import locked
    from erase_rec.sweep.process import Launch
    from erase_rec.sweep.run import noted_signals, run_sweep
    from erase_rec.sweep.view import Results, arm_table, shown
    from erase_rec.text_table import table_console

    console, results = table_console(), Results(folder)
    with locked(folder) as lock, noted_signals() as stop:
        launch = Launch(folder, sweep.base, sweep.file.ranks, lock)
        with shown(console, results) as view:
            for points in plans:
                record = _record(sweep, points, folder)
                run_sweep(record, launch, jobs=jobs, view=view, stop=stop)
                if stop.signals:
                    break
    if not console.is_terminal:
        console.print(arm_table(record, results).rich())
    return record, points, next(iter(stop.signals), None)


def _conclude(record: SweepRecord, points: list[Point], stopped: int | None, sweep: ReadSweep, folder: Path) -> None:
    """What is wrong, left or best, and the exit code."""
    from erase_rec.sweep.search import best_arm

    failed = [point for point in record.points if point.status == "failed"]
    for point in failed:
        where = f"{folder / point.folder}.log"
        print(f"failed: {point.arm}, seed {point.seed}: {point.reason} ({where})", file=sys.stderr)
    if stopped is not None:
        print("stopped; the same command goes on", file=sys.stderr)
        raise typer.Exit(128 + stopped)
    if sweep.file.search is not None and (best := best_arm(points, _cost(sweep, folder))) is not None:
        print(f"best {sweep.file.search.metric}: {best}")
    print(f"sweep: {folder / 'sweep.json'}")
    if failed:
        raise typer.Exit(1)
