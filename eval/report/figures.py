"""The figures of the report, as SVG to be put into the page: told apart by line and marker as well as by colour."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.analysis import ArmResult, Difference, Report, SeedRuns

FloatArray = npt.NDArray[np.float64]

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's palette, which colour-blind readers tell apart; its yellow is too pale for lines on paper."""
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
WIDTH_INCHES = 11.0


@dataclass(frozen=True)
class Picture:
    """A figure of the page.

    Attributes:
        caption: what it shows.
        markup: an HTML element that refers to nothing outside it.
    """

    caption: str
    markup: str


@dataclass(frozen=True)
class Style:
    """How an arm is drawn in every figure."""

    color: str
    linestyle: str
    marker: str


def pictures(report: Report) -> list[Picture]:
    """Those for which there is something to draw."""
    every = (_differences(report), _curves(report), _speeds(report), _towers(report))
    return [picture for picture in every if picture is not None]


def styles(report: Report) -> dict[str, Style]:
    """By arm. The palette's length shares no factor with the others', so few arms share more than one of the three."""
    return {
        arm.name: Style(COLOURS[i % len(COLOURS)], LINES[i % len(LINES)], MARKERS[i % len(MARKERS)])
        for i, arm in enumerate(report.arms)
    }


def band(arm: SeedRuns, tag: str) -> tuple[FloatArray, FloatArray]:
    """A curve over the runs of an arm.

    Returns:
        Training rows [n], and values [n, runs] at the steps that every run with this tag logged.
    """
    curves = []
    for run in arm.values():
        rows = run.summary.throughput.global_batch_size
        points = ((rows * (window["step"] or 0), window.get(tag)) for window in run.windows)
        curve = {place: value for place, value in points if value is not None}
        if curve:
            curves.append(curve)
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return np.array(shared), np.array([[curve[place] for curve in curves] for place in shared])


def _differences(report: Report) -> Picture | None:
    arms = [arm for arm in report.arms if arm.gain is not None or arm.ne_gap is not None]
    if not arms:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.4 + 0.45 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    style = styles(report)
    _forest(left, arms, style, {arm.name: arm.gain for arm in arms}, {arm.name: _paper_gain(arm) for arm in arms})
    _forest(right, arms, style, {arm.name: arm.ne_gap for arm in arms}, {arm.name: _paper_gap(arm) for arm in arms})
    left.set_yticks(range(len(arms)), [arm.name for arm in arms])
    left.set_ylim(len(arms) - 0.5, -0.5)
    left.set_xlabel("gain in QPS p90 (%); right is faster")
    right.set_xlabel("NE gap (%); left is better")
    return Picture(
        f"Differences to {report.baseline.name} with 95 % intervals over pairs of one seed; an interval across the "
        "line at 0 is inside the noise. Grey crosses: the paper's figures.",
        _svg(figure, "differences"),
    )


def _forest(
    axes: Axes,
    arms: Sequence[ArmResult],
    style: Mapping[str, Style],
    found: Mapping[str, Difference | None],
    printed: Mapping[str, float | None],
) -> None:
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.grid(axis="x", color="0.88", linewidth=0.6)
    for position, arm in enumerate(arms):
        difference, paper = found[arm.name], printed[arm.name]
        if difference is not None:
            pct, look = difference.pct, style[arm.name]
            bounds = None if math.isnan(pct.low) else [[pct.mid - pct.low], [pct.high - pct.mid]]
            axes.errorbar([pct.mid], [position], xerr=bounds, color=look.color, fmt=look.marker, capsize=4)
        if paper is not None:
            axes.plot([paper], [position + 0.2], "x", color="0.45", markersize=6)


def _paper_gain(arm: ArmResult) -> float | None:
    return None if arm.paper is None else arm.paper.gain_pct


def _paper_gap(arm: ArmResult) -> float | None:
    return None if arm.paper is None else arm.paper.ne_gap_pct


def _curves(report: Report) -> Picture | None:
    panels = {"eval/ne": "held-out NE", "train/ne": "progressive NE"}
    figure = Figure(figsize=(WIDTH_INCHES, 4.4), layout="constrained")
    drawn = False
    for axes, (tag, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, look in styles(report).items():
            rows, values = band(report.by_arm[name], tag)
            if not len(rows):
                continue
            drawn = True
            every = max(1, len(rows) // 12)
            axes.plot(
                rows,
                values.mean(axis=1),
                color=look.color,
                linestyle=look.linestyle,
                marker=look.marker,
                markersize=4,
                markevery=every,
                linewidth=1.4,
                label=name,
            )
            axes.fill_between(rows, values.min(axis=1), values.max(axis=1), color=look.color, alpha=0.15, linewidth=0)
        axes.set_xlabel("training rows")
        axes.set_ylabel(label)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
        axes.grid(color="0.88", linewidth=0.6)
    if not drawn:
        return None
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return Picture(
        "NE while training (1: constant predictor), mean over the runs of an arm, band from the lowest to the highest. "
        "Progressive: of the training rows of a logged window, each scored before the update that learns from it.",
        _svg(figure, "ne"),
    )


def _speeds(report: Report) -> Picture | None:
    windows = {name: _window_speeds(arm) for name, arm in report.by_arm.items()}
    if report.turns is not None:
        windows = {name: list(found) for name, found in report.speeds.items()}
    shown = {name: values for name, values in windows.items() if values}
    if not shown:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.4 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(shown)))
    axes.boxplot(
        list(shown.values()),
        positions=places,
        orientation="horizontal",
        widths=0.5,
        medianprops={"color": "black"},
        flierprops={"marker": ".", "markersize": 3},
    )
    look = styles(report)
    for place, name in enumerate(shown):
        p90 = report.speeds[name]
        style = look[name]
        axes.plot(p90, [place] * len(p90), style.marker, color=style.color, markerfacecolor="none", markersize=7)
    axes.set_yticks(places, list(shown))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel("QPS (rows/s)")
    axes.grid(axis="x", color="0.88", linewidth=0.6)
    return Picture(
        "QPS: boxes of the means of the logged windows of all runs (line: median; box: quartiles), open markers: the "
        "90th percentile over the steps of each run."
        if report.turns is None
        else "QPS: the 90th percentile over the steps of each turn (open markers), in boxes (line: median; box: "
        "quartiles).",
        _svg(figure, "qps"),
    )


def _window_speeds(arm: SeedRuns) -> list[float]:
    found = (window.get("throughput/qps_mean") for run in arm.values() for window in run.windows)
    return [qps for qps in found if qps is not None]


def _towers(report: Report) -> Picture | None:
    names = list(dict.fromkeys(name for arm in report.arms for name in arm.towers))
    if not names:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.8 + 0.5 * len(names)), layout="constrained")
    axes = figure.subplots()
    shifts = np.linspace(-0.3, 0.3, len(report.arms)) if len(report.arms) > 1 else np.zeros(1)
    for shift, arm in zip(shifts, report.arms, strict=True):
        look = styles(report)[arm.name]
        known = [(ne, place + shift) for place, name in enumerate(names) if (ne := arm.towers.get(name)) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), look.marker, color=look.color, label=arm.name)
    axes.axvline(1, color="0.3", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("held-out NE of the tower's local logit (1: constant predictor)")
    axes.grid(axis="x", color="0.88", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return Picture("Per-tower NE, means over the runs of an arm.", _svg(figure, "towers"))


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an element of an HTML page: without prologue, metadata and names of namespaces."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "font.size": 10}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # HTML knows SVG's namespaces: their addresses would only look like references to the network.
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
