"""``erase-rec report``: one page on runs, with Table 1 of these runs beside the paper's."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from erase_rec.errors import UserError


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, a sweep's folder, or folders of either.")],
    out: Annotated[Path, typer.Option("--out", help="The page (.html); .md and .json are written beside it.")],
    baseline: Annotated[
        str | None, typer.Option(help="The arm to compare with. Default: baseline, or the first of preset exact.")
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="JSON of erase-rec bench: QPS is taken from its turns, by the arms' names, not from the runs."
        ),
    ] = None,
    timeline: Annotated[
        list[str] | None,
        typer.Option("--timeline", help="ARM=FILE: show this chart of erase-rec timeline for the arm, not its run's."),
    ] = None,
    title: Annotated[str, typer.Option(help="Above the page.")] = "Training speed and normalized entropy",
) -> None:
    """Report QPS, NE and what is noise: HTML with figures, Markdown and JSON, from the run folders alone."""
    from erase_rec.text_table import table_console
    from eval.report.analysis import analyse
    from eval.report.figures import pictures
    from eval.report.page import write
    from eval.report.records import collect
    from eval.report.sentences import sentences
    from eval.report.tables import results
    from eval.report.timelines import timelines

    if out.suffix.lower() != ".html":
        raise UserError(
            f"--out: expected the name of an HTML file, found {out}; write --out {out.with_suffix('.html')}"
        )
    report = analyse(collect(runs), baseline, bench)
    again = ["erase-rec", "report", *map(str, runs), "--out", str(out)]
    again += ["--baseline", baseline] if baseline is not None else []
    again += ["--bench", str(bench)] if bench is not None else []
    again += [part for chart in timeline or [] for part in ("--timeline", chart)]
    figures = [*pictures(report), *timelines(report, dict(map(_chart, timeline or [])))]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = write(report, figures, out, title=title, command=shlex.join(again))
    except OSError as error:
        raise UserError(f"--out: cannot write {error.filename}: {error.strerror}") from error
    table_console().print(results(report).rich())
    for sentence in sentences(report):
        typer.echo(sentence)
    typer.echo(f"wrote {', '.join(map(str, written))}")


def _chart(text: str) -> tuple[str, Path]:
    arm, sign, path = text.partition("=")
    if not sign:
        raise UserError(f"--timeline: expected ARM=FILE, found {text}")
    return arm, Path(path)
