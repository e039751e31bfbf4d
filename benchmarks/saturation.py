"""Where overlap stops to pay: what early backward gains by batch size and width, beside the size of the step's kernels.

    erase-rec bench --config bench/h200.yaml --arms-file configs/bench/arms_saturation.yaml --out saturation.json ...
    python benchmarks/saturation.py saturation.json

prints a table in Markdown and draws ``saturation.png`` beside the file; several files are taken together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from erase_rec.text_table import TextTable

RIVALS = ("aggregate", "exact")
LOOKS = {"narrow": ("#0072b2", "o", "-"), "medium": ("#d55e00", "s", "--"), "wide": ("#009e73", "D", "-.")}
"""Colour (Okabe and Ito's), marker and line by width."""


def main(
    files: Annotated[list[Path], typer.Argument(help="What erase-rec bench wrote, a batch size in one each.")],
) -> None:
    """Prints the table and draws the picture beside the first file."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    points = gains(rows)
    if not points:
        raise typer.BadParameter(
            f"{files[0]}: at no batch size early, aggregate and exact were all timed; see `refused`"
        )
    print(table(points).markdown())
    draw(points, files[0].with_suffix(".png"))


def gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each width and batch size where all ran: ``early``, its row; and each rival's name with the speed over it."""
    timed = {(row["arm"], row["batch"]): row for row in rows if row["refused"] is None}
    return [
        {"width": width, "batch": batch, "early": timed[f"early_{width}", batch]}
        | {rival: timed[f"early_{width}", batch]["ratio_to"][f"{rival}_{width}"] for rival in RIVALS}
        for width in LOOKS
        for batch in dict.fromkeys(row["batch"] for row in rows)
        if all((f"{method}_{width}", batch) in timed for method in ("early", *RIVALS))
    ]


def kernel_us(row: dict[str, Any]) -> float | None:
    """Mean time of a kernel or copy by itself; None where it was not profiled."""
    number = (row["kernels"] or 0) + (row["copies"] or 0)
    return 1e3 * row["kernel_ms_sum"] / number if number else None


def table(points: list[dict[str, Any]]) -> TextTable:
    """A line a point."""
    header = (
        *("towers", "rows a step", "early: step ms", "speed / aggregate (95 %)", "speed / exact (95 %)"),
        *("kernels and copies", "mean us of one", "overlap", "device idle"),
    )
    lines = []
    for point in points:
        row, mean_us = point["early"], kernel_us(point["early"])
        profiled = ("", "", "", "")
        if mean_us is not None:
            shares = (f"{100 * row[share]:.0f} %" for share in ("overlap_share", "idle_share"))
            profiled = (f"{row['kernels'] + row['copies']:.0f}", f"{mean_us:.1f}", *shares)
        speeds = (_speed(point[rival]) for rival in RIVALS)
        lines.append((point["width"], f"{point['batch']:,}", f"{row['step_ms_p50']:.3f}", *speeds, *profiled))
    return TextTable("Early backward by batch size and width, all arms captured", header, tuple(lines))


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: gain by rows of a step, and gain by the mean time of a kernel."""
    figure = Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
    by_batch, by_kernel = figure.subplots(1, 2, sharey=True)
    for axes, label in ((by_batch, "rows a step"), (by_kernel, "mean time of a kernel by itself (us)")):
        axes.set(xscale="log", xlabel=label)
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.grid(color="0.88", linewidth=0.6)
    by_batch.set_ylabel("speed of early backward over one aggregate backward")
    for width, look in LOOKS.items():
        here = [point for point in points if point["width"] == width]
        _line(by_batch, [(point["batch"], point["aggregate"]) for point in here], width, look)
        known = [(mean_us, point["aggregate"]) for point in here if (mean_us := kernel_us(point["early"])) is not None]
        _line(by_kernel, known, width, look)
    by_batch.legend(title="towers")
    figure.savefig(path)


def _line(axes: Axes, points: list[tuple[float, list[float | None]]], width: str, look: tuple[str, str, str]) -> None:
    colour, marker, line = look
    places, mids = [place for place, _ in points], [speed[1] or 0.0 for _, speed in points]
    # An open bound (few turns that nearly agree) is drawn as none.
    below = [mid - (speed[0] or mid) for mid, (_, speed) in zip(mids, points, strict=True)]
    above = [(speed[2] or mid) - mid for mid, (_, speed) in zip(mids, points, strict=True)]
    axes.errorbar(places, mids, [below, above], color=colour, marker=marker, linestyle=line, capsize=3, label=width)


def _speed(interval: list[float | None]) -> str:
    low, mid, high = interval
    return f"{mid:.3f}" if low is None or high is None else f"{mid:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    typer.run(main)
