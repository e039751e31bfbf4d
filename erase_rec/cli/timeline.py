"""``erase-rec timeline``: one measured training step as a Gantt chart, a trace, and its overlap in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file.")],
    out: Annotated[Path, typer.Option(help="The chart, a PNG file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps; the last one is drawn.")] = 10,
    trace: Annotated[Path | None, typer.Option(help="Also write a Chrome trace (JSON), which Perfetto opens.")] = None,
) -> None:
    """Draw one training step: streams and host threads over time, blocks by tower and phase."""
    from erase_rec.cli.short_run import ShortRun
    from erase_rec.schedule.overlap import overlap_report
    from erase_rec.schedule.program import program
    from erase_rec.text_table import table_console
    from eval.timeline import chrome_trace, draw_timeline

    if out.suffix.lower() != ".png":
        raise UserError(f"--out: expected the name of a PNG file, found {out}; write --out {out.with_suffix('.png')}")
    with ShortRun.open(config, overrides or []) as run:
        for batch in run.batches(steps):
            run.parts.step(batch, measure=True)
        intervals = run.parts.streams.intervals()
        report = overlap_report(intervals, program(run.parts.plan.of_step(steps - 1)))
        how = f"{run.parts.plan.dispatch} dispatch" if report.towers else "aggregate backward"
        about = run.about() | {"dispatch": how, "step": f"step {steps}: {batch.size:,} rows"}
        is_first = run.world.is_first
    if not is_first:
        return
    title = f"One training step of {', '.join(about.values())}"
    try:
        draw_timeline(intervals, out, title=title, critical=report.critical_path)
        if trace is not None:
            trace.write_text(json.dumps(chrome_trace(intervals, about)) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"timeline: cannot write {error.filename}: {error.strerror}") from error
    console = table_console()
    for table in report.tables():
        console.print(table.rich())
    console.print(f"wrote {out}" + (f" and {trace}" if trace else ""), soft_wrap=True)
