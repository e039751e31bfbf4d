"""Advice as plain sentences, tables and a record, all of the same facts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from erase_rec.advice.candidates import CONFIGURED, parsed
from erase_rec.advice.decision import Decision, Speed, includes_one
from erase_rec.advice.facts import DataCheck, KnownNe, Memory, bound_of
from erase_rec.advice.limits import Limits
from erase_rec.bench.result import Row
from erase_rec.sweep.points import layered
from erase_rec.text_table import TextTable

FORMAT = 1
SHOWN_OPERATIONS = 6
"""Of the longest chain."""


@dataclass(frozen=True)
class Advice:
    """Everything that is said.

    Attributes:
        config: name or path, as on the command line.
        overrides: of the command line.
        device: name of the device.
        reference: name of the way that the configuration says.
        decision: what is recommended.
        rows: all ways, refused ones and the A/A pair among them.
        data: of the recommended way.
        memory: of each way that ran.
        limits: of the fastest way with an early backward; None where none ran.
        ne: from the user's runs; None: none were given.
        ne_commands: what would tell it; None where no way of one of the promises ran.
        on_cuda: whether it was measured on a GPU.
        about: versions, date, and how it was measured.
    """

    config: str
    overrides: Sequence[str]
    device: str
    reference: str
    decision: Decision
    rows: Sequence[Row]
    data: DataCheck
    memory: Sequence[Memory]
    limits: Limits | None
    ne: KnownNe | None
    ne_commands: str | None
    on_cuda: bool
    about: Mapping[str, Any]

    @property
    def command(self) -> str:
        """What trains in the recommended way."""
        row = self.decision.recommended
        own = [] if row.arm in {self.reference, CONFIGURED} else parsed(row.overrides)
        changes = [each.text for each in layered(parsed(self.overrides), own) if each.key != "schedule.strict"]
        return shlex.join(["erase-rec", "train", "--config", self.config, *changes])

    def as_json(self) -> dict[str, Any]:
        """The record that ``--out`` writes."""
        decision = self.decision
        return {
            "format": FORMAT,
            **self.about,
            "config": self.config,
            "overrides": list(self.overrides),
            "device": self.device,
            "configured": self.reference,
            "verdict": decision.verdict,
            "recommended": decision.recommended.arm,
            "command": self.command,
            "fastest_exact": None if decision.exact is None else decision.exact.arm,
            "fastest_cut": None if decision.cut is None else decision.cut.arm,
            "gain_of_cutting": decision.gain,
            "gain_over_configured": decision.change,
            "noise": decision.noise,
            "restless": decision.restless,
            "bound": bound_of(decision.recommended, self.data),
            "data": asdict(self.data) | {"wait_ms": self.data.wait_ms},
            "memory": [asdict(each) | {"total_gib": each.total_gib} for each in self.memory],
            "limits": None if self.limits is None else asdict(self.limits),
            "ne": None if self.ne is None else asdict(self.ne),
            "ne_commands": self.ne_commands,
            "sentences": list(sentences(self)),
            "rows": [asdict(row) for row in self.rows],
        }


def sentences(advice: Advice) -> Iterator[str]:
    """What to do and why, the most important first."""
    yield from _pays(advice.decision)
    yield f"Recommended: {advice.decision.recommended.arm}. {_change(advice)} Train: {advice.command}"
    yield _bound(advice)
    yield from _memory(advice)
    yield from _ne(advice)
    yield from _limiting(advice)
    if advice.decision.restless:
        yield (
            f"Caution: {advice.reference} differs from itself by more than chance ({_speed(advice.decision.noise)}): "
            "the machine did other things meanwhile. Ask again when it is quiet, or with more --seconds."
        )


def _pays(decision: Decision) -> Iterator[str]:
    exact, cut = decision.exact, decision.cut
    if exact is None or cut is None:
        missing = "cuts towers" if cut is None else "keeps every gradient"
        yield f"No way that {missing} could be run, so there is nothing to compare; the reasons are in the table."
        return
    speeds = f"{cut.arm} has {_speed(decision.gain)} times the speed of {exact.arm}"
    what = "the fastest way that cuts towers against the fastest that keeps every gradient"
    match decision.verdict:
        case "nothing_gained":
            yield (
                f"Nothing is gained by cutting towers: {speeds} ({what}), which is no difference that can be told from "
                f"chance. With {exact.arm}, gradients are exact, for free."
            )
        case "cut_slower":
            yield f"Cutting towers makes a step slower: {speeds} ({what}). Keep the exact gradients."
        case "cut_faster_but_worse":
            yield f"Cutting towers makes a step faster, and NE worse: {speeds} ({what}). The trade is yours to make."
        case _:
            yield f"Cutting towers makes a step faster: {speeds} ({what})."


def _change(advice: Advice) -> str:
    decision = advice.decision
    if decision.recommended.arm == advice.reference:
        return "It is what the configuration says."
    if decision.change is None:
        return f"What the configuration says ({advice.reference}) could not be run here."
    told = ", which is no difference that can be told from chance" if includes_one(decision.change) else ""
    return (
        f"It has {_speed(decision.change)} times the speed of what the configuration says ({advice.reference}){told}."
    )


def _bound(advice: Advice) -> str:
    row, data = advice.decision.recommended, advice.data
    bound = bound_of(row, data)
    took = f"a step takes {data.resident_ms:.2f} ms, and the loader makes a batch in {data.alone_ms:.2f} ms by itself"
    if bound == "data-bound":
        how = "beside the steps" if data.workers else "between the steps"
        return (
            f"The step is data-bound: {took}, {how}, so that a step waits {data.wait_ms:.2f} ms for its batch. No "
            "order of work helps before the data are faster: raise data.workers, or prepare rows (erase-rec prepare)."
        )
    data_clause = f"the data are no limit: {took}"
    if bound == "host-bound":
        return (
            f"The step is host-bound: launching it takes {row.host_ms or 0:.2f} ms, while the device is idle for "
            f"{100 * (row.idle_share or 0):.0f} % of it; {data_clause}. Capture it (schedule.cuda_graph=step) where "
            "that is not refused."
        )
    where = "by its kernels and the gaps between them" if advice.on_cuda else "the CPU is host and device in one"
    return f"The step is device-bound ({where}); {data_clause}."


def _memory(advice: Advice) -> Iterator[str]:
    by_arm = {memory.arm: memory for memory in advice.memory}
    named = [row.arm for row in (advice.decision.exact, advice.decision.cut) if row is not None]
    parts = []
    for name in named:
        memory = by_arm[name]
        of_it = (
            f"tables {memory.tables_gib:.3f}, dense {memory.dense_gib:.3f}, activations {memory.activations_gib:.3f}"
        )
        parts.append(f"{name} {memory.total_gib:.3f} GiB ({of_it})")
    measured = "measured peak; parts are counted" if advice.on_cuda else "counted, not measured"
    yield f"Memory, {measured}: {'; '.join(parts)}."


def _ne(advice: Advice) -> Iterator[str]:
    ne = advice.ne
    if ne is not None:
        bounds = "" if ne.low is None or ne.high is None else f" [{ne.low:+.3f}, {ne.high:+.3f}]"
        pairs = "1 pair of runs" if len(ne.seeds) == 1 else f"{len(ne.seeds)} pairs of runs"
        yield f"NE of cut towers against exact ones, in your {pairs}: {ne.mid:+.3f} %{bounds}: {ne.verdict}."
    elif advice.decision.verdict == "cut_faster":
        yield (
            "What cutting costs in NE is not known from a speed measurement: take the faster way once a sweep has "
            "told. It is below, to be pasted into a shell."
        )
    else:
        yield "What cutting costs in NE is not known from a speed measurement; the sweep below would tell."


def _limiting(advice: Advice) -> Iterator[str]:
    limits = advice.limits
    if limits is None or not limits.towers:
        yield "Which tower limits the step is not known: only an early backward has an operation of its own a tower."
        return
    first = limits.towers[0]
    free = "by what its streams leave free" if advice.on_cuda else "on the CPU a thread does one thing after the other"
    yield (
        f"Tower {first.name} limits the step of {limits.arm}: its own work takes {first.chain_ms:.2f} ms, "
        f"{100 * first.share:.0f} % of the longest chain of {limits.path_ms:.2f} ms ({free}). Without it the chain "
        f"would be {first.path_without_ms:.2f} ms: no change to this tower alone makes the step more than "
        f"{first.gain_if_gone:.2f} times as fast."
    )


def tables(advice: Advice) -> Iterator[TextTable]:
    """The ways in order of speed, those that were refused, and the towers."""
    by_arm = {memory.arm: memory for memory in advice.memory}
    ran = [row for row in advice.rows if row.refused is None]
    lines = []
    for row in sorted(ran, key=lambda row: row.step_ms_p50 or 0):
        memory = by_arm[row.repeats or row.arm]
        lines.append(
            (
                row.arm,
                "every gradient exact" if row.family == "exact" else "towers cut",
                f"{row.step_ms_p50 or 0:.2f}",
                f"{row.qps_mean or 0:,.0f}",
                "1" if row.arm == advice.reference else _speed(row.ratio_to.get(advice.reference)),
                f"{memory.total_gib:.3f}",
                row.verdict or "",
                row.about,
            )
        )
    size = advice.rows[0].batch
    header = ("way", "promise", "step ms", "QPS", f"speed / {advice.reference} (95 %)", "GiB", "bound", "what it is")
    yield TextTable(f"{advice.config}, {size:,} rows a step, {advice.device}; kept batches", header, tuple(lines))
    refused = tuple((row.arm, row.refused) for row in advice.rows if row.refused is not None)
    if refused:
        yield TextTable("not run here", ("way", "why"), refused)
    if advice.limits is not None and advice.limits.towers:
        yield _tower_table(advice.limits)


def _tower_table(limits: Limits) -> TextTable:
    lines = tuple(
        (
            tower.name,
            f"{tower.chain_ms:.3f}",
            f"{100 * tower.share:.0f} %",
            f"{tower.path_without_ms:.3f}",
            f"{tower.gain_if_gone:.2f}",
        )
        for tower in limits.towers
    )
    shown = " > ".join(limits.path[:SHOWN_OPERATIONS]) + (" > ..." if len(limits.path) > SHOWN_OPERATIONS else "")
    title = f"{limits.arm}: longest chain {limits.path_ms:.3f} ms ({shown})"
    header = ("tower", "own work ms", "share of the chain", "chain without it ms", "at most times as fast")
    return TextTable(title, header, lines)


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return ""
    low, mid, high = speed
    bounds = ", ".join("open" if bound is None else f"{bound:.3f}" for bound in (low, high))
    return f"{mid:.3f} [{bounds}]"
