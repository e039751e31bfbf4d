"""What a sweep shows while it runs: a live table in a terminal, a line a change elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.live import Live

from erase_rec.summary import Summary
from erase_rec.sweep.record import PointRecord, Status, SweepRecord
from erase_rec.sweep.run import View
from erase_rec.text_table import TextTable


class Results:
    """Summaries of finished points, each read once."""

    def __init__(self, folder: Path) -> None:
        """Takes the sweep's folder."""
        self._folder = folder
        self._read: dict[str, Summary] = {}

    def of(self, point: PointRecord) -> Summary | None:
        """What the point came to; None where it is not finished.

        Raises:
            UserError: its summary does not have the documented form.
        """
        if point.status != "finished":
            return None
        if point.id not in self._read:
            self._read[point.id] = Summary.read(self._folder / point.folder)
        return self._read[point.id]


def arm_table(record: SweepRecord, results: Results) -> TextTable:
    """How far each arm is, and the means over its finished seeds."""
    rows = []
    for arm in dict.fromkeys(point.arm for point in record.points):
        points = [point for point in record.points if point.arm == arm]
        found = [summary for point in points if (summary := results.of(point)) is not None]
        counts = [sum(point.status == status for point in points) for status in ("finished", "failed", "running")]
        ne = _mean([summary.eval.ne for summary in found], ".5f")
        qps = _mean([summary.throughput.qps_p90 for summary in found], ",.0f")
        rows.append((arm, *map(str, counts), str(len(points) - sum(counts)), ne, qps))
    header = ("arm", "finished", "failed", "running", "left", "mean eval.ne", "mean QPS p90")
    return TextTable(f"sweep {record.name}", header, tuple(rows))


def point_table(record: SweepRecord) -> TextTable:
    """Every point in its order."""
    rows = tuple((point.id, point.arm, str(point.seed), point.status, point.reason or "") for point in record.points)
    return TextTable(
        f"sweep {record.name}: {len(record.points)} points", ("id", "arm", "seed", "status", "reason"), rows
    )


class _LiveTable:
    def __init__(self, live: Live, results: Results) -> None:
        self._live, self._results = live, results

    def update(self, record: SweepRecord) -> None:
        self._live.update(arm_table(record, self._results).rich(), refresh=True)


class _Lines:
    def __init__(self, console: Console, results: Results) -> None:
        self._console, self._results = console, results
        self._shown: dict[str, Status] = {}

    def update(self, record: SweepRecord) -> None:
        ended = sum(point.status in {"finished", "failed"} for point in record.points)
        for point in record.points:
            if self._shown.get(point.id, "pending") != point.status:
                line = f"[{ended}/{len(record.points)}] {point.arm}, seed {point.seed} ({point.id}): {self._say(point)}"
                self._console.print(line, soft_wrap=True, markup=False, highlight=False)
            self._shown[point.id] = point.status

    def _say(self, point: PointRecord) -> str:
        summary = self._results.of(point)
        if summary is None:
            return f"{point.status}: {point.reason}" if point.reason else point.status
        took = "" if point.seconds is None else f" after {point.seconds:.1f} s"
        ne, qps = _mean([summary.eval.ne], ".5f"), _mean([summary.throughput.qps_p90], ",.0f")
        return f"finished{took}, eval.ne {ne}, QPS p90 {qps}"


@contextmanager
def shown(console: Console, results: Results) -> Iterator[View]:
    """The view that fits ``console``, until the block ends."""
    if not console.is_terminal:
        yield _Lines(console, results)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _LiveTable(live, results)


def _mean(values: Sequence[float], spec: str) -> str:
    defined = [value for value in values if not math.isnan(value)]
    return format(fmean(defined), spec) if defined else "-"
