"""Rows of a benchmark: one an arm and batch size, as JSON and as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from erase_rec.bench.arms import Family, PlannedArm
from erase_rec.bench.device_work import WorkReport
from erase_rec.bench.floor import Floor
from erase_rec.bench.turns import Turn, verdict
from erase_rec.text_table import TextTable

GIB = 2.0**30
SHOWN_KERNELS = 12
"""Kernels that a terminal's table holds; the JSON has more."""


@dataclass(frozen=True)
class DeviceUse:
    """What CUDA alone tells of an arm.

    Attributes:
        host_ms: host time of launching one step on an idle device, median.
        peak_gib: largest memory while it was built and run, its tables included.
        tables_gib: tables and their optimizer's state, of that.
        work: kernels and copies.
    """

    host_ms: float
    peak_gib: float
    tables_gib: float
    work: WorkReport


@dataclass(frozen=True)
class Row:
    """One arm at one batch size. Numbers are None where they were not measured (CPU) or the arm was refused.

    Attributes:
        workload: name of the configuration.
        arm: its name; the second build of the first arm has `` (A/A)`` behind it.
        repeats: the arm that this is the A/A pair of.
        family: what it does with gradients.
        about: what it stands for.
        batch: rows of a step on one rank.
        ranks: ranks that trained together.
        overrides: what makes the arm.
        refused: why it was not run; None where it ran.
        step_ms_p10: over all timed steps.
        step_ms_p50: likewise.
        step_ms_p90: likewise.
        step_ms_mean: likewise.
        qps_p90: rows a second over all ranks, 90th percentile over steps (the fast end).
        turns_qps_p90: the same of each turn; the k-th turns of all arms lie side by side in time.
        qps_mean: all rows over all time.
        ratio_to: speed relative to each arm of the same batch size: [low, mid, high], 95 %, from paired turns.
        floor_ms: see :mod:`erase_rec.bench.floor`.
        floor: FLOPs and bytes under it.
        verdict: see :func:`erase_rec.bench.turns.verdict`.
        data_wait_ms: host time that a step waited for its batch, mean.
        host_ms: see :class:`DeviceUse`, as all that follow.
        kernels: a step.
        copies: copies and memory settings a step.
        streams: that did something.
        kernel_ms_sum: kernels and copies, each by itself, a step.
        kernel_ms_union: time in which at least one ran, a step.
        overlap_share: 1 - union / sum.
        idle_share: 1 - union / median step time: the device did nothing.
        collective_ms: a step's collectives ran or waited for other ranks.
        exposed_ms: part of it in which the device did nothing else: communication that nothing hides.
        stagger_ms: how much longer the collectives of one rank took than those of another, largest over the ranks: the
            rank that comes first waits inside them.
        peak_gib: largest memory, tables included.
        tables_gib: tables and their state, of that.
        top_kernels: those with most time.
    """

    workload: str
    arm: str
    repeats: str | None
    family: Family | None
    about: str
    batch: int
    ranks: int
    overrides: tuple[str, ...]
    refused: str | None = None
    step_ms_p10: float | None = None
    step_ms_p50: float | None = None
    step_ms_p90: float | None = None
    step_ms_mean: float | None = None
    qps_p90: float | None = None
    turns_qps_p90: tuple[float, ...] = ()
    qps_mean: float | None = None
    ratio_to: Mapping[str, tuple[float | None, float, float | None]] = field(default_factory=dict)
    floor_ms: float | None = None
    floor: Mapping[str, Any] | None = None
    verdict: str | None = None
    data_wait_ms: float | None = None
    host_ms: float | None = None
    kernels: float | None = None
    copies: float | None = None
    streams: int | None = None
    kernel_ms_sum: float | None = None
    kernel_ms_union: float | None = None
    overlap_share: float | None = None
    idle_share: float | None = None
    collective_ms: float | None = None
    exposed_ms: float | None = None
    stagger_ms: float | None = None
    peak_gib: float | None = None
    tables_gib: float | None = None
    top_kernels: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, workload: str, planned: PlannedArm, ranks: int, refused: str | None = None) -> Row:
        """A row without numbers."""
        arm = planned.arm
        refusal = refused or planned.refusal or None
        return cls(
            workload, arm.name, None, planned.family, arm.about, planned.batch, ranks, arm.overrides, refused=refusal
        )

    def timed(self, turns: Sequence[Turn]) -> Row:
        """With the times of its turns."""
        step_ms = np.concatenate([turn.step_ms for turn in turns])
        wait_ms = float(np.concatenate([turn.wait_ms for turn in turns]).mean())
        p10, p50, p90 = np.percentile(step_ms, (10, 50, 90)).tolist()
        rows = 1e3 * self.batch * self.ranks
        return replace(
            self,
            step_ms_p10=p10,
            step_ms_p50=p50,
            step_ms_p90=p90,
            step_ms_mean=float(step_ms.mean()),
            qps_p90=rows / p10,
            turns_qps_p90=tuple(rows / float(np.percentile(turn.step_ms, 10)) for turn in turns),
            qps_mean=rows / float(step_ms.mean()),
            data_wait_ms=wait_ms,
        )

    def above(self, floor: Floor) -> Row:
        """With the floor under it."""
        record = {"flops": floor.flops, "bytes": dict(floor.parts)}
        return replace(
            self,
            floor_ms=floor.floor_ms,
            floor=record | {"flops_ms": floor.flops_ms, "bytes_ms": floor.bytes_ms},
        )

    def using(self, use: DeviceUse) -> Row:
        """With what it did on the device; comes after :meth:`timed`."""
        assert self.step_ms_p50 is not None
        assert self.data_wait_ms is not None
        work = use.work
        idle_share = max(0.0, 1 - work.union_ms / self.step_ms_p50)
        return replace(
            self,
            verdict=verdict(self.step_ms_p50, use.host_ms, self.data_wait_ms, idle_share),
            host_ms=use.host_ms,
            kernels=work.kernels,
            copies=work.copies,
            streams=work.streams,
            kernel_ms_sum=work.sum_ms,
            kernel_ms_union=work.union_ms,
            overlap_share=work.overlap_share,
            idle_share=idle_share,
            collective_ms=work.collective_ms,
            exposed_ms=work.exposed_ms,
            peak_gib=use.peak_gib,
            tables_gib=use.tables_gib,
            top_kernels=tuple(asdict(kernel) for kernel in work.top),
        )


def write_json(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """``about`` and the list ``rows``."""
    record = {**about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def tables(rows: Sequence[Row]) -> Iterator[TextTable]:
    """For each batch size: times and speed; on CUDA the device's use; refused arms with their reasons."""
    for batch in dict.fromkeys(row.batch for row in rows):
        here = [row for row in rows if row.batch == batch]
        ran = [row for row in here if row.refused is None]
        if ran:
            yield _times(ran)
        if any(row.host_ms is not None for row in ran):
            yield _device(ran)
        refused = tuple((row.arm, row.refused) for row in here if row.refused is not None)
        if refused:
            yield TextTable(f"not run at {batch:,} rows", ("arm", "why"), refused)


def kernel_table(row: Row) -> TextTable:
    """The kernels of a row that take most time."""
    lines = tuple(
        (kernel["name"][:90], f"{kernel['a_step']:.1f}", f"{kernel['us_a_step']:.1f}")
        for kernel in row.top_kernels[:SHOWN_KERNELS]
    )
    return TextTable(f"{row.arm}, {row.batch:,} rows: longest kernels", ("kernel", "a step", "us a step"), lines)


def _times(rows: Sequence[Row]) -> TextTable:
    first = rows[0]
    strongest = strongest_exact(rows)
    references = list(dict.fromkeys([first.arm] + ([strongest.arm] if strongest else [])))
    lines = []
    for row in rows:
        assert row.qps_p90 is not None
        assert row.qps_mean is not None
        times = (_number(value) for value in (row.step_ms_p10, row.step_ms_p50, row.step_ms_p90))
        speeds = (_speed(row.ratio_to.get(name)) for name in references)
        over = "" if row.floor_ms is None or row.step_ms_p50 is None else f"{row.step_ms_p50 / row.floor_ms:.1f}x"
        lines.append(
            (row.arm, *times, f"{row.qps_p90:,.0f}", f"{row.qps_mean:,.0f}", *speeds, _number(row.floor_ms), over)
        )
    speeds_of = tuple(f"speed / {name} (95 %)" for name in references)
    header = ("arm", "step ms p10", "p50", "p90", "QPS p90", "QPS mean", *speeds_of, "floor ms", "p50 / floor")
    return TextTable(f"{first.workload}, {first.batch:,} rows a step and rank", header, tuple(lines))


def _device(rows: Sequence[Row]) -> TextTable:
    together = any(row.ranks > 1 for row in rows)
    header = (
        *("arm", "kernels", "copies", "streams", "sum ms", "union ms", "overlap", "idle", "host ms", "peak GiB"),
        *(("collectives ms", "exposed ms", "staggering ms") if together else ()),
        "verdict",
    )
    lines = tuple(
        (
            row.arm,
            *(f"{value or 0:.0f}" for value in (row.kernels, row.copies, row.streams)),
            *map(_number, (row.kernel_ms_sum, row.kernel_ms_union)),
            *(f"{100 * (value or 0):.0f} %" for value in (row.overlap_share, row.idle_share)),
            _number(row.host_ms),
            f"{row.peak_gib or 0:.2f}",
            *(map(_number, (row.collective_ms, row.exposed_ms, row.stagger_ms)) if together else ()),
            row.verdict or "",
        )
        for row in rows
    )
    return TextTable(f"on the device, a step of {rows[0].batch:,} rows", header, lines)


def strongest_exact(rows: Sequence[Row]) -> Row | None:
    """The fastest arm, by its median, that keeps every gradient; A/A pairs aside."""
    return _fastest(rows, "exact")


def strongest_early(rows: Sequence[Row]) -> Row | None:
    """The fastest arm, by its median, with early backward; A/A pairs aside."""
    return _fastest(rows, "early")


def _fastest(rows: Sequence[Row], family: Family) -> Row | None:
    timed = [
        (row.step_ms_p50, row)
        for row in rows
        if row.family == family and row.repeats is None and row.step_ms_p50 is not None
    ]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _speed(interval: tuple[float | None, float, float | None] | None) -> str:
    if interval is None:
        return ""
    low, mid, high = interval
    return f"{mid:.3f}" if low is None or high is None else f"{mid:.3f} [{low:.3f}, {high:.3f}]"
