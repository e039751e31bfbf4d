"""Draws a measured step as a Gantt chart, and writes it as a Chrome trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import Op

PHASES: Mapping[str, tuple[str, str]] = {
    "lookup": ("#bbbbbb", "lookup"),
    "forward": ("#56b4e9", "forward"),
    "logit_join": ("#777777", "logit join"),
    "local_loss": ("#0072b2", "local loss"),
    "early_backward": ("#d55e00", "early backward"),
    "over_arch": ("#009e73", "over-arch"),
    "backward": ("#e69f00", "backward"),
    "reduce": ("#cc79a7", "reduce"),
    "update": ("#f0e442", "update"),
    "table_update": ("#ffffff", "table update"),
}
"""Colour and name of each phase that is drawn, in legend order: Okabe and Ito's palette, safe for the colour-blind."""
DARK = {"#777777", "#0072b2", "#d55e00", "#009e73"}
ROW_INCHES = 0.58
WIDTH_INCHES = 14.0
BLOCK_HEIGHT = 0.84
CRITICAL_WIDTH = 1.5
PADDING = 4
"""Pixels around a label."""
LABEL: Mapping[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "linespacing": 0.95, "zorder": 4}

Row = tuple[str, list[tuple[Interval, float, float]]]
"""A row's name, and its blocks with start and end in ms."""


def draw_timeline(
    intervals: Sequence[Interval], file: Path | IO[bytes], *, title: str, critical: Collection[str] = ()
) -> tuple[int, int]:
    """Writes a PNG: streams above, host threads below, over one axis in milliseconds.

    Args:
        intervals: one step.
        file: where to.
        title: above it.
        critical: keys of the operations that are outlined as the critical path.

    Returns:
        Width and height in pixels.
    """
    panels = {"streams": _by_stream(intervals), "host threads": _by_thread(intervals)}
    heights = [len(rows) for rows in panels.values()]
    figure = Figure(figsize=(WIDTH_INCHES, 1.9 + ROW_INCHES * sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    figure.suptitle(title, fontsize=10)
    axes[-1].set_xlabel("time from the step's start (ms)")
    figure.legend(handles=_legend(intervals, critical), loc="outside lower center", ncols=11, fontsize=8, frameon=False)
    axes[0].set_xlim(0, 1.005 * max(max(interval.end_ms, interval.launched_ms) for interval in intervals))
    for axis, (name, rows) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, name, rows, critical)
    figure.draw_without_rendering()  # which labels fit is known once everything has its place
    for axis, rows in zip(axes, panels.values(), strict=True):
        for position, op, start, stop in _blocks(rows):
            _label_block(axis, position, op, start, stop)
    figure.savefig(file, format="png")
    width, height = figure.get_size_inches() * figure.dpi
    return int(width), int(height)


def chrome_trace(intervals: Sequence[Interval], about: Mapping[str, str]) -> dict[str, Any]:
    """One step in Chrome's trace format: process 1 holds the streams, process 2 the host threads.

    Args:
        intervals: one step.
        about: what is said beside it, such as the device.
    """
    events: list[dict[str, Any]] = []
    for process, (name, rows) in enumerate(
        {"streams": _by_stream(intervals), "host threads": _by_thread(intervals)}.items(), start=1
    ):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, (row, blocks) in enumerate(rows, start=1):
            ids = {"pid": process, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": row}})
            events.append({"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": thread}})
            events += [
                {
                    "ph": "X",
                    "name": interval.op.key,
                    "cat": interval.op.kind,
                    "ts": 1e3 * start,
                    "dur": 1e3 * (stop - start),
                    **ids,
                    "args": {
                        "tower": interval.op.tower or "",
                        "micro_batch": interval.op.micro,
                        "waits": list(interval.op.waits),
                    },
                }
                for interval, start, stop in blocks
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _by_stream(intervals: Sequence[Interval]) -> list[Row]:
    return _rows(intervals, lambda interval: interval.op.stream, lambda interval: (interval.start_ms, interval.end_ms))


def _by_thread(intervals: Sequence[Interval]) -> list[Row]:
    return _rows(
        intervals, lambda interval: interval.thread, lambda interval: (interval.launch_ms, interval.launched_ms)
    )


def _rows(
    intervals: Sequence[Interval],
    name: Callable[[Interval], str],
    span: Callable[[Interval], tuple[float, float]],
) -> list[Row]:
    """A row a name, or several where blocks of one name overlap: a CPU does not keep a stream's operations apart."""
    lanes: dict[str, list[list[tuple[Interval, float, float]]]] = {}
    for interval in sorted(intervals, key=span):
        start, stop = span(interval)
        of_name = lanes.setdefault(name(interval), [])
        lane = next((lane for lane in of_name if lane[-1][2] <= start), None)
        if lane is None:
            of_name.append(lane := [])
        lane.append((interval, start, stop))
    return [
        (f"{label} ({number})" if number > 1 else label, lane)
        for label, of_name in lanes.items()
        for number, lane in enumerate(of_name, start=1)
    ]


def _blocks(rows: Sequence[Row]) -> Iterator[tuple[int, Op, float, float]]:
    """Row position, operation, start and end of what is drawn."""
    for position, (_, row) in enumerate(rows):
        for interval, start, stop in row:
            if interval.op.kind in PHASES:
                yield position, interval.op, start, stop


def _draw_panel(axis: Axes, name: str, rows: Sequence[Row], critical: Collection[str]) -> None:
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [row for row, _ in rows], fontsize=9)
    axis.set_ylabel(name)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    for position, op, start, stop in _blocks(rows):
        outlined = op.key in critical
        axis.add_patch(
            Rectangle(
                (start, position - BLOCK_HEIGHT / 2),
                stop - start,
                BLOCK_HEIGHT,
                facecolor=PHASES[op.kind][0],
                edgecolor="black" if outlined else "#555555",
                linewidth=CRITICAL_WIDTH if outlined else 0.4,
                zorder=3 if outlined else 2,
            )
        )


def _label_block(axis: Axes, row: int, op: Op, start: float, stop: float) -> None:
    """Writes tower and phase, or the tower alone, or that upright: the first that fits."""
    colour, phase = PHASES[op.kind]
    (left, bottom), (right, top) = axis.transData.transform(
        [(start, row + BLOCK_HEIGHT / 2), (stop, row - BLOCK_HEIGHT / 2)]
    )
    name = (op.tower or phase) + (f" @{op.micro}" if op.micro else "")
    for label, rotation in ((f"{name}\n{phase}" if op.tower else name, 0), (name, 0), (name, 90)):
        text = axis.text((start + stop) / 2, row, label, rotation=rotation, color=_ink(colour), **LABEL)
        extent = text.get_window_extent()
        if extent.width <= right - left - PADDING and extent.height <= top - bottom - PADDING:
            return
        text.remove()


def _ink(colour: str) -> str:
    return "white" if colour in DARK else "black"


def _legend(intervals: Sequence[Interval], critical: Collection[str]) -> list[Patch]:
    kinds = {interval.op.kind for interval in intervals}
    patches = [
        Patch(facecolor=colour, edgecolor="#555555", linewidth=0.4, label=phase)
        for kind, (colour, phase) in PHASES.items()
        if kind in kinds
    ]
    if critical:
        patches.append(Patch(facecolor="white", edgecolor="black", linewidth=CRITICAL_WIDTH, label="critical path"))
    return patches
