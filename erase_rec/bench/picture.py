"""The picture of a benchmark: step times with their floors, and what early backward gains, both by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from erase_rec.bench.result import Row, strongest_early, strongest_exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"exact": "-", "detached": ":", "early": "--"}


def save_picture(path: Path, rows: Sequence[Row]) -> None:
    """Writes a PNG. Arms that never ran are left out.

    Args:
        path: the file.
        rows: of one workload.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, gains) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    _draw_times(times, rows)
    _draw_gains(gains, rows)
    figure.suptitle(rows[0].workload)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        timed = [row for row in rows if row.arm == arm and row.step_ms_p50 is not None and row.family is not None]
        if timed:
            style = _STYLES[timed[0].family or "exact"]
            medians = [row.step_ms_p50 or 0 for row in timed]
            axes.plot([row.batch for row in timed], medians, style, marker="o", markersize=3, label=arm)
    floors = {row.batch: row.floor_ms for row in rows if row.floor_ms is not None and row.family == "exact"}
    if floors:
        axes.plot(list(floors), list(floors.values()), "_-", color="black", linewidth=1, label="floor (exact)")
    axes.set(xscale="log", yscale="log", xlabel="rows a step and rank", ylabel="step time, median (ms)")
    _batch_ticks(axes, rows)
    axes.legend(fontsize=7)


def _draw_gains(axes: Axes, rows: Sequence[Row]) -> None:
    """Speed of the fastest early arm over the fastest exact one, with its interval."""
    batches, mids, errors = [], [], []
    for batch in dict.fromkeys(row.batch for row in rows):
        here = [row for row in rows if row.batch == batch]
        exact, early = strongest_exact(here), strongest_early(here)
        if exact is None or early is None:
            continue
        low, mid, high = early.ratio_to[exact.arm]
        batches.append(batch)
        mids.append(mid)
        errors.append((mid - (mid if low is None else low), (mid if high is None else high) - mid))
    if batches:
        below, above = zip(*errors, strict=True)
        axes.errorbar(batches, mids, yerr=(below, above), marker="o", capsize=3)
        axes.set_xscale("log")
        _batch_ticks(axes, rows)
    else:
        axes.text(0.5, 0.5, "no batch size with an exact and an early arm", ha="center", transform=axes.transAxes)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xlabel="rows a step and rank", ylabel="speed of the fastest early arm / the fastest exact arm")


def _batch_ticks(axes: Axes, rows: Sequence[Row]) -> None:
    batches = sorted({row.batch for row in rows})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
