"""``erase-rec prepare``: reads raw click logs once, and writes what training memory-maps."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from erase_rec.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
LINE_S = 5.0
"""Seconds between two lines where the output is no terminal."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def command(
    config: Annotated[str, typer.Option("--config", help="A YAML file; its data, label, split and features count.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write, or to go on with.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.train=day_*.tsv.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes, at most; default: one a core.")] = None,
    memory: Annotated[str, typer.Option(help="Bound on all processes together, such as 512MiB or 8GiB.")] = "2GiB",
    force: Annotated[bool, typer.Option("--force", help="Throw away what was prepared in the folder before.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take; write nothing.")] = False,
) -> None:
    """Read, split, fit and encode click logs into a folder that training reads with data.prepared=FOLDER."""
    from data.prepared.pool import open_nursery

    # Before all that takes long to import here: workers need most of it, too, and import it meanwhile.
    with closing(open_nursery()) as nursery:
        from rich.console import Console

        from data.prepared.prepare import Options, dry_run, prepare
        from erase_rec.cli.data_catalog import DataCatalog
        from erase_rec.config.load import load_config

        with PrepareProgress(Console()) as progress:
            loaded = load_config(config, overrides or [], catalog=DataCatalog()).config
            options = Options(workers or _cores(), read_size(memory), shlex.join(["erase-rec", *sys.argv[1:]]), force)
            if dry:
                dry_run(loaded, out, options, progress, nursery)
                return
            try:
                manifest = prepare(loaded, out, options, progress, nursery)
            except KeyboardInterrupt:
                progress.close()
                typer.echo("interrupted; what is finished is kept: run the same command again to go on", err=True)
                raise typer.Exit(INTERRUPTED) from None
    for line in manifest.conclusion(out):
        typer.echo(line)


def read_size(text: str) -> int:
    """Bytes in ``512MiB``, ``8G``, ``2GB`` (1000-based where it ends in B without i) or a plain number.

    Raises:
        UserError: something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"--memory: expected a size such as 512MiB or 2GiB, found {text!r}")
    unit = found[2].upper()
    if (found[3] or "").upper() == "B" and unit:
        return int(float(found[1]) * 1000 ** list(_UNITS).index(unit))
    return int(float(found[1]) * _UNITS[unit])


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PrepareProgress:
    """Implements :class:`data.prepared.prepare.Report`: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        """Shows nothing yet."""
        self._console = console
        self._bar: Progress | None = None
        self._name, self._total, self._done, self._rows = "", 0, 0, 0
        self._start_s = self._shown_s = 0.0

    def say(self, text: str) -> None:
        """See :meth:`data.prepared.prepare.Report.say`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, name: str, total: int) -> None:
        """See :meth:`data.prepared.prepare.Report.start`."""
        self.close()
        self._name, self._total, self._done, self._rows = name, total, 0, 0
        self._start_s = self._shown_s = time.monotonic()
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task(name, total=total, speed="")
            self._bar.start()

    def advance(self, amount: int, rows: int) -> None:
        """See :meth:`data.prepared.prepare.Report.advance`."""
        self._done, self._rows = self._done + amount, self._rows + rows
        now = time.monotonic()
        speed = f"{self._rows:,} rows, {self._rows / max(now - self._start_s, 1e-3):,.0f} rows/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, speed=speed)
        elif now - self._shown_s >= LINE_S or self._done >= self._total:
            self._shown_s = now
            left = (now - self._start_s) * (self._total - self._done) / max(self._done, 1)
            self.say(f"{self._name} {100 * self._done / max(self._total, 1):.0f} %  {speed}  {left:.0f} s left")

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
