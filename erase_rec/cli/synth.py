"""``erase-rec synth``: Criteo-shaped raw files of any size, for trying preparation and training at scale."""

from __future__ import annotations

import enum
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
LINE_EVERY_S = 5.0
EVAL_SHARE = 10
MOST_EVAL_ROWS = 1_000_000


class FileFormat(enum.StrEnum):
    """The layouts of files."""

    CRITEO = "criteo"
    CSV = "csv"
    PARQUET = "parquet"


def command(
    rows: Annotated[int, typer.Option("--rows", min=1, help="Training rows.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="criteo: TAB separated, no header; csv: commas, a header line.")
    ] = FileFormat.CRITEO,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides every row; the same seed gives the same.")] = 1,
    eval_rows: Annotated[
        int | None,
        typer.Option("--eval-rows", min=0, help="Rows of the eval file; default: a tenth, at most 1,000,000."),
    ] = None,
    files: Annotated[int, typer.Option("--files", min=1, help="Files that the training rows are spread over.")] = 1,
    id_column: Annotated[
        bool, typer.Option("--id-column", help="Add a column row_id that names each row (csv, parquet).")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes at most; default: as many as cores.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write train-00000.tsv ..., eval.tsv and synth.json: label, I1-I13, C1-C26 with missing and rare values."""
    # The blocks' products of small matrices are slower on several threads, and the cores are the other workers'.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from data.synth import Spec, claim_folder, require_space, write_files  # numpy and pyarrow

    if eval_rows is None:
        eval_rows = min(rows // EVAL_SHARE, MOST_EVAL_ROWS)
    spec = Spec(rows, eval_rows, seed, file_format.value, files, id_column)
    require_space(spec, out)
    claim_folder(out, force=force)
    typer.echo(f"{rows + eval_rows:,} rows, about {spec.estimated_bytes() / 2**30:.2f} GiB, to {out}")
    try:
        with _RowProgress(rows + eval_rows) as progress:
            summary = write_files(spec, out, workers=workers or len(os.sched_getaffinity(0)), on_rows=progress.advance)
    except KeyboardInterrupt:
        typer.echo(
            "interrupted; the finished files are whole, synth.json is missing. Start again with --force", err=True
        )
        raise typer.Exit(INTERRUPTED) from None
    for file in summary["files"]:
        typer.echo(f"{out / file['name']}: {file['rows']:,} rows, {file['bytes'] / 2**20:,.1f} MiB")
    held_out = summary["eval"] and summary["eval"]["bayes_ne"]
    typer.echo(
        f"{progress.speed():,.0f} rows/s; clicks {summary['train']['base_rate']:.2%}"
        + (f"; NE of the true probabilities on the eval rows {held_out:.5f}" if held_out else "")
    )


class _RowProgress:
    """A bar with rows/s and the time left on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._total, self._done = total, 0
        self._start_s = self._shown_s = time.perf_counter()
        self._bar = Progress(
            TextColumn("rows"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:,.0f} rows/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("rows", total=total, speed=0.0)

    def __enter__(self) -> _RowProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, rows: int) -> None:
        """``rows`` more are written."""
        self._done += rows
        self._bar.update(self._task, advance=rows, speed=self.speed())
        now = time.perf_counter()
        if self._bar.disable and now - self._shown_s >= LINE_EVERY_S:
            self._shown_s = now
            left_s = round((self._total - self._done) / self.speed())
            eta = f"{left_s // 3600}:{left_s // 60 % 60:02d}:{left_s % 60:02d}"
            typer.echo(f"{self._done:,} of {self._total:,} rows  {self.speed():,.0f} rows/s  ETA {eta}", err=True)

    def speed(self) -> float:
        """Rows a second since the start."""
        return self._done / (time.perf_counter() - self._start_s)
