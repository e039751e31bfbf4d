"""What a user sees while training: a bar on a terminal, a line that changes in a notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

REFRESH_S = 0.1


class Progress:
    """Shows nothing: for ranks other than 0, and the base class of what shows something."""

    def advance(self, step: int) -> None:
        """``step`` updates are done; cheap enough for every step."""

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Shows rows/s and NE of the last log interval.

        Args:
            step: updates done.
            values: run log tags; reads ``throughput/qps_mean``, ``train/ne`` and ``eval/ne`` where they are there.
        """

    def message(self, text: str) -> None:
        """Shows a line of its own."""

    def close(self) -> None:
        """Ends the display; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BarProgress(Progress):
    """A bar with steps, rows/s, NE and the time left."""

    def __init__(self, console: Console, total_steps: int, start_step: int = 0) -> None:
        """Shows the bar at ``start_step`` of ``total_steps``."""
        self._bar = RichProgress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=start_step, values="")
        self._shown_s = 0.0
        self._bar.start()

    def advance(self, step: int) -> None:
        """See :meth:`Progress.advance`."""
        now = time.perf_counter()
        if now - self._shown_s >= REFRESH_S:
            self._shown_s = now
            self._bar.update(self._task, completed=step)

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """See :meth:`Progress.report`."""
        self._bar.update(self._task, completed=step, values=_describe(values))

    def message(self, text: str) -> None:
        """See :meth:`Progress.message`; above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """See :meth:`Progress.close`."""
        self._bar.stop()


class LineProgress(Progress):
    """A plain line a report, for files and pipes."""

    def __init__(self, console: Console, total_steps: int, start_step: int = 0) -> None:
        """Starts the clock of the time left at ``start_step`` of ``total_steps``."""
        self._console = console
        self._total_steps = total_steps
        self._start_step = start_step
        self._start_s = time.perf_counter()

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """See :meth:`Progress.report`."""
        self.message(self._line(step, values))

    def message(self, text: str) -> None:
        """See :meth:`Progress.message`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        parts = (f"step {step}/{self._total_steps}", _describe(values), self._time_left(step))
        return "  ".join(part for part in parts if part)

    def _time_left(self, step: int) -> str:
        done, left = step - self._start_step, self._total_steps - step
        if done <= 0 or left <= 0:
            return ""
        seconds = round((time.perf_counter() - self._start_s) / done * left)
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class NotebookProgress(LineProgress):
    """A line of a cell's output that changes with each report, so that a long run leaves a short notebook."""

    def __init__(self, console: Console, total_steps: int, start_step: int = 0) -> None:
        """Shows nothing yet."""
        super().__init__(console, total_steps, start_step)
        self._display = importlib.import_module("IPython.display").display
        self._shown: Any = None

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """See :meth:`Progress.report`."""
        line = {"text/plain": self._line(step, values)}
        if self._shown is None:
            self._shown = self._display(line, raw=True, display_id=True)
        else:
            self._shown.update(line, raw=True)

    def message(self, text: str) -> None:
        """See :meth:`Progress.message`; Rich would make a frame of each line."""
        print(text)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


def show_progress(total_steps: int, start_step: int = 0, console: Console | None = None) -> Progress:
    """A bar where ``console`` (default: standard output) is a terminal; see :class:`NotebookProgress`, else lines."""
    console = console or Console()
    if in_notebook():
        return NotebookProgress(console, total_steps, start_step)
    return (BarProgress if console.is_terminal else LineProgress)(console, total_steps, start_step)


def _describe(values: Mapping[str, float]) -> str:
    parts = []
    if "throughput/qps_mean" in values:
        parts.append(f"{values['throughput/qps_mean']:,.0f} rows/s")
    if "train/ne" in values:
        parts.append(f"NE {values['train/ne']:.5f}")
    if "eval/ne" in values:
        parts.append(f"held-out NE {values['eval/ne']:.5f}")
    return "  ".join(parts)
