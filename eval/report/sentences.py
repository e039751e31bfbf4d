"""What the report says in plain sentences: which differences are real and which are noise."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eval.report.analysis import ArmResult, Difference, Report
from eval.statistics import Interval


def sentences(report: Report) -> list[str]:
    """From the number of runs to each arm's differences and the paper's."""
    return [*_scope(report), *_noise(report), *_inside(report), *_per_arm(report), *_paper(report), *report.remarks]


def signed(interval: Interval, digits: int = 2) -> str:
    """``+1.23 % [+0.80, +1.66]``; without bounds the mean alone."""
    bounds = "" if math.isnan(interval.low) else f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"
    return f"{interval.mid:+.{digits}f} %{bounds}"


def _scope(report: Report) -> Iterator[str]:
    runs = sum(arm.runs for arm in report.arms)
    counts = sorted({len(arm.seeds) for arm in report.arms})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    yield (
        f"{_number(runs, 'run')} of {_number(len(report.arms), 'arm')}, {seeds} "
        f"{'seed' if counts == [1] else 'seeds'} an arm; the baseline is {report.baseline.name}. Intervals are "
        "Student's at 95 %, over seeds and launches; differences are taken between runs of the same seed."
    )
    if report.turns is not None:
        turns = _number(max(map(len, report.speeds.values())), "turn")
        yield (
            f"QPS is not from these runs but from {turns} an arm in one process ({report.turns.path}), and its "
            "differences are taken between turns that lie side by side in time."
        )
    if report.missing:
        were = "is" if len(report.missing) == 1 else "are"
        yield f"{_number(len(report.missing), 'run')} did not come to an end and {were} left out: see below."
    single = [arm.name for arm in report.arms if arm.runs == 1]
    if single:
        yield (
            f"One run only of {', '.join(single)}: no interval can be given, and nothing tells a difference from noise."
        )


def _noise(report: Report) -> Iterator[str]:
    twin = report.twin
    if twin is None:
        yield "There is no A/A pair (two arms of one configuration) among these runs: intervals alone tell noise."
        return
    pair = f"A/A pair: {report.baseline.name} and {twin.name} have the same configuration"
    for what, found in (("QPS p90", twin.gain), ("NE", twin.ne_gap)):
        if found is None:
            yield f"{pair}, and no {what} of the same seed to compare."
        elif found.pairs < 2:
            yield f"{pair}; of one pair the difference in {what}, {signed(found.pct, 3)}, has no interval."
        elif found.verdict == "inside the noise":
            yield f"{pair}, and their {what} differs by {signed(found.pct, 3)}: inside the noise, as it must be."
        else:
            yield (
                f"{pair}, and yet their {what} differs by {signed(found.pct, 3)}, an interval without 0: this machine "
                f"was not still, and differences up to {abs(found.pct.mid):.3f} % are counted as noise here."
            )


def _inside(report: Report) -> Iterator[str]:
    """Which differences are noise, at a glance."""
    others = [arm for arm in report.arms if not arm.is_baseline and not arm.is_twin]
    for what, found in (
        ("QPS p90", {arm.name: arm.gain for arm in others}),
        ("NE", {arm.name: arm.ne_gap for arm in others}),
    ):
        judged = {name: each.verdict for name, each in found.items() if each is not None and each.pairs > 1}
        noise = [name for name, verdict in judged.items() if verdict == "inside the noise"]
        if judged:
            yield f"Differences in {what} that are inside the noise: {', '.join(noise) or 'none'}."


def _per_arm(report: Report) -> Iterator[str]:
    base = report.baseline.name
    for arm in report.arms:
        if arm.ne is None:
            yield f"{arm.name} has no held-out NE: it was not evaluated, or its held-out rows are of one class."
        if arm.qps_p90 is None and report.turns is None:
            yield f"{arm.name} has no QPS: it has no step after its warm-up."
        if arm.is_baseline or arm.is_twin:
            continue
        if arm.gain is not None:
            yield f"{arm.name}: QPS p90 {_judged(arm.gain, 'faster', 'slower', base)}."
        if arm.ne_gap is not None:
            yield f"{arm.name}: NE {_judged(arm.ne_gap, 'worse', 'better', base, digits=3)}."


def _judged(found: Difference, higher: str, lower: str, base: str, digits: int = 2) -> str:
    shown = signed(found.pct, digits)
    if found.pairs < 2:
        return f"{shown} against {base}, of one pair: no verdict"
    pairs = f"over {found.pairs} pairs"
    if found.verdict == "inside the noise":
        return f"{shown} against {base} {pairs}: inside the noise"
    return f"{shown} against {base} {pairs}: {higher if found.verdict == 'higher' else lower}"


def _paper(report: Report) -> Iterator[str]:
    for arm in report.arms:
        row = arm.paper
        if row is None:
            continue
        yield from _against_paper(arm, "gain in QPS p90", row.name, row.gain_pct, arm.gain)
        yield from _against_paper(arm, "NE gap", row.name, row.ne_gap_pct, arm.ne_gap)


def _against_paper(
    arm: ArmResult, what: str, row: str, printed: float | None, found: Difference | None
) -> Iterator[str]:
    if printed is None or found is None or math.isnan(found.pct.low):
        return
    lies = "inside" if found.pct.low <= printed <= found.pct.high else "outside"
    yield (
        f"The paper's {row} has a {what} of {printed:+.2f} %, which lies {lies} the interval of {arm.name} here, "
        f"{signed(found.pct)}."
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
