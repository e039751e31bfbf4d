"""The tables of the report, the same for HTML, Markdown and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from erase_rec.text_table import TextTable
from eval.report.analysis import Difference, Report
from eval.report.paper import PAPER_ROWS
from eval.report.sentences import signed
from eval.statistics import Interval

NONE = "-"


def tables(report: Report) -> Iterator[TextTable]:
    """Those that have rows, in the order of the page."""
    every = (
        results(report),
        steps(report),
        paper(report),
        towers(report),
        missing(report),
        environment(report),
        runs(report),
    )
    return (table for table in every if table.rows)


def results(report: Report) -> TextTable:
    """Table 1 of these runs, beside the paper's figures."""
    header = (
        "arm",
        "runs",
        "QPS p90, rows/s",
        "gain",
        "speed",
        "paper: gain",
        "held-out NE",
        "NE gap",
        "NE is",
        "paper: NE gap",
        "peak memory, GiB",
        "audit",
    )
    rows = []
    for arm in report.arms:
        row = arm.paper
        rows.append(
            (
                arm.name + (" (baseline)" if arm.is_baseline else " (A/A)" if arm.is_twin else ""),
                str(arm.runs),
                _interval(arm.qps_p90, ",.0f"),
                _difference(arm.gain),
                _verdict(arm.gain, "faster", "slower"),
                NONE if row is None or row.gain_pct is None else f"{row.gain_pct:+.2f} %",
                _interval(arm.ne, ".5f"),
                _difference(arm.ne_gap, 3),
                _verdict(arm.ne_gap, "worse", "better"),
                NONE if row is None or row.ne_gap_pct is None else f"{row.ne_gap_pct:+.2f} %",
                NONE if math.isnan(arm.peak_memory_gib) else f"{arm.peak_memory_gib:.2f}",
                arm.audit,
            )
        )
    return TextTable(
        f"Table 1 of these runs; differences to {report.baseline.name}, 95 % intervals", header, tuple(rows)
    )


def steps(report: Report) -> TextTable:
    """Accuracy and what a step takes, where runs recorded it."""
    arms = [arm for arm in report.arms if any((arm.accuracy, arm.backward_ms, arm.step_ms))]
    rows = tuple(
        (
            arm.name,
            _interval(arm.accuracy, ".4f"),
            _interval(arm.auc, ".4f"),
            _interval(arm.step_ms, ".3f"),
            _interval(arm.backward_ms, ".3f"),
            _difference(arm.backward_gap, 1),
        )
        for arm in arms
    )
    header = ("arm", "accuracy", "AUC", "step, ms (median)", "backward, ms", f"backward against {report.baseline.name}")
    return TextTable("Held-out accuracy at 0.5 and AUC; a step and its backwards (runs' own times)", header, rows)


def paper(report: Report) -> TextTable:
    """The paper's table, and which arm here stands for each row."""
    rows = []
    for row in PAPER_ROWS:
        here = ", ".join(arm.name for arm in report.arms if arm.paper is row)
        gain = NONE if row.gain_pct is None else f"{row.gain_pct:+.2f} %"
        gap = NONE if row.ne_gap_pct is None else f"about {row.ne_gap_pct:+.2f} %"
        rows.append((row.name, row.configuration, f"{row.qps_p90:,.2f}", gain, gap, here or "no such arm"))
    title = "Table 1 of the paper (8 H100, no repeats, no intervals)"
    return TextTable(title, ("row", "configuration", "QPS p90", "gain", "NE gap", "arm here"), tuple(rows))


def towers(report: Report) -> TextTable:
    """Mean NE of each tower's local logit."""
    names = list(dict.fromkeys(name for arm in report.arms for name in arm.towers))
    rows = tuple(
        (name, *(f"{arm.towers[name]:.5f}" if name in arm.towers else NONE for arm in report.arms)) for name in names
    )
    title = "Held-out NE of the towers' local logits, means over runs (joint target: one term of a sum, can be above 1)"
    return TextTable(title, ("tower", *(arm.name for arm in report.arms)), rows)


def missing(report: Report) -> TextTable:
    """Runs that are not counted."""
    rows = tuple(
        (entry.arm or NONE, NONE if entry.seed is None else str(entry.seed), str(entry.path), entry.reason)
        for entry in report.missing
    )
    return TextTable("Runs that are left out", ("arm", "seed", "folder", "why"), rows)


def environment(report: Report) -> TextTable:
    """Where the runs were made."""
    rows = tuple((key.replace("_", " "), "; ".join(values)) for key, values in report.environment.items())
    return TextTable("Environment", ("what", "value"), rows)


def runs(report: Report) -> TextTable:
    """Each run that is counted."""
    rows = tuple(
        (
            name,
            str(seed),
            NONE if report.turns is not None else _number(run.summary.throughput.qps_p90, ",.0f"),
            _number(run.summary.eval.ne, ".5f"),
            f"{run.summary.train.steps:,}",
            str(run.path),
        )
        for name, arm in report.by_arm.items()
        for (seed, _), run in arm.items()
    )
    return TextTable("Runs", ("arm", "seed", "QPS p90", "held-out NE", "steps", "folder"), rows)


def _interval(interval: Interval | None, spec: str) -> str:
    if interval is None:
        return NONE
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:{spec}}, {interval.high:{spec}}]"
    return f"{interval.mid:{spec}}{bounds}"


def _difference(found: Difference | None, digits: int = 2) -> str:
    return NONE if found is None else signed(found.pct, digits)


def _verdict(found: Difference | None, higher: str, lower: str) -> str:
    if found is None:
        return NONE
    return {"higher": higher, "lower": lower}.get(found.verdict, found.verdict)


def _number(value: float, spec: str) -> str:
    return NONE if math.isnan(value) else format(value, spec)
