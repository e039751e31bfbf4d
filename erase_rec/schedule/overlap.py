"""What ran beside what in a step: measured intervals, held against the order that the program guarantees.

Two different things, never mixed up: *measured* is what one step did on this machine (on the CPU only worker threads
can make work overlap); *may* is what the program's streams and events leave free on a device that has streams.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import Op, guaranteed_order
from erase_rec.text_table import TextTable

EARLY = "early_backward"
BACKWARDS = (EARLY, "backward")
SHOWN_NEIGHBOURS = 3


@dataclass(frozen=True)
class TowerOverlap:
    """A tower's early backward (of all micro-batches) in one step.

    Attributes:
        backward_ms: its time.
        hidden_ms: the part of it during which anything else ran.
        beside_ms: measured: time shared with each other operation, by key.
        may_run_beside: by the program: keys of operations that neither precede nor follow it.
    """

    backward_ms: float
    hidden_ms: float
    beside_ms: Mapping[str, float]
    may_run_beside: frozenset[str]

    @property
    def hidden_share(self) -> float:
        """Hidden part of the backward, 0 to 1."""
        return self.hidden_ms / self.backward_ms if self.backward_ms else 0.0


@dataclass(frozen=True)
class OverlapReport:
    """One measured step.

    Attributes:
        towers: by name, those with an early backward.
        busy_ms: sum of the operations' times by stream.
        union_ms: time during which anything ran.
        step_ms: from the step's start to its last operation's end.
        backward_ms: time during which a backward ran, early or not.
        critical_path: keys of the longest chain of operations that the program orders, by measured durations.
        critical_path_ms: its length: no step of this program with these durations can be shorter.
    """

    towers: Mapping[str, TowerOverlap]
    busy_ms: Mapping[str, float]
    union_ms: float
    step_ms: float
    backward_ms: float
    critical_path: tuple[str, ...]
    critical_path_ms: float

    @property
    def hidden_share(self) -> float:
        """Hidden part of all early backward time, 0 to 1."""
        total = sum(tower.backward_ms for tower in self.towers.values())
        return sum(tower.hidden_ms for tower in self.towers.values()) / total if total else 0.0

    @property
    def overlap_share(self) -> float:
        """1 - union / sum of the operations' times: 0 where nothing ran beside anything."""
        total = sum(self.busy_ms.values())
        return 1 - self.union_ms / total if total else 0.0

    def scalars(self) -> dict[str, float]:
        """Run log tags."""
        return {
            **({"overlap/hidden_share": self.hidden_share} if self.towers else {}),
            "overlap/overlap_share": self.overlap_share,
            "overlap/critical_path_ms": self.critical_path_ms,
            "time/backward_ms": self.backward_ms,
            **{f"tower/{name}/backward_hidden_share": tower.hidden_share for name, tower in self.towers.items()},
        }

    def tables(self) -> list[TextTable]:
        """Towers, where any has an early backward, and the step as a whole."""
        return [self._tower_table(), self._step_table()] if self.towers else [self._step_table()]

    def as_markdown(self) -> str:
        """For TensorBoard."""
        return "\n".join(table.markdown() for table in self.tables())

    def _tower_table(self) -> TextTable:
        rows = tuple(
            (
                name,
                f"{tower.backward_ms:.3f}",
                f"{100 * tower.hidden_share:.0f} %",
                _neighbours(tower.beside_ms),
                _kinds(tower.may_run_beside),
            )
            for name, tower in self.towers.items()
        )
        header = ("tower", "backward ms", "hidden", "measured beside (ms)", "may run beside, by the program")
        title = f"Early backward: {100 * self.hidden_share:.0f} % of its time hidden beside other work"
        return TextTable(title, header, rows)

    def _step_table(self) -> TextTable:
        rows = (
            ("step", f"{self.step_ms:.3f} ms"),
            ("critical path, by the program", f"{self.critical_path_ms:.3f} ms: {' > '.join(self.critical_path)}"),
            *((f"busy, stream {stream}", f"{busy:.3f} ms") for stream, busy in self.busy_ms.items()),
            ("a backward running", f"{self.backward_ms:.3f} ms"),
            ("any stream busy", f"{self.union_ms:.3f} ms"),
            ("overlap: 1 - that / sum of the streams", f"{100 * self.overlap_share:.0f} %"),
        )
        return TextTable("One measured step", ("what", "time"), rows)


def overlap_report(intervals: Sequence[Interval], ops: Sequence[Op]) -> OverlapReport:
    """What ``intervals``, one step of the program ``ops``, say about overlap."""
    may = may_overlap(ops)
    durations = {interval.op.key: interval.duration_ms for interval in intervals}
    path, path_ms = critical_path(ops, durations)
    busy: dict[str, float] = {}
    for interval in intervals:
        busy[interval.op.stream] = busy.get(interval.op.stream, 0.0) + interval.duration_ms
    names = dict.fromkeys(op.tower for op in ops if op.kind == EARLY and op.tower is not None)
    return OverlapReport(
        towers={name: _tower_overlap(name, intervals, may) for name in names},
        busy_ms=busy,
        union_ms=_union_ms((interval.start_ms, interval.end_ms) for interval in intervals),
        step_ms=max((interval.end_ms for interval in intervals), default=0.0),
        backward_ms=_union_ms(
            (interval.start_ms, interval.end_ms) for interval in intervals if interval.op.kind in BACKWARDS
        ),
        critical_path=path,
        critical_path_ms=path_ms,
    )


def may_overlap(ops: Sequence[Op]) -> dict[str, frozenset[str]]:
    """For each operation the keys of those that streams and events leave free to run beside it."""
    before = guaranteed_order(ops)
    return {
        op.key: frozenset(
            other.key
            for other in ops
            if other.key != op.key and other.key not in before[op.key] and op.key not in before[other.key]
        )
        for op in ops
    }


def critical_path(ops: Sequence[Op], duration_ms: Mapping[str, float]) -> tuple[tuple[str, ...], float]:
    """Longest chain of operations that the program orders; an operation without a duration takes none.

    Returns:
        Keys of those that take time, first to last, and their time together.
    """
    before = guaranteed_order(ops)
    best: dict[str, tuple[tuple[str, ...], float]] = {}
    for op in ops:
        path, length = _longest(best[key] for key in before[op.key])
        duration = duration_ms.get(op.key, 0.0)
        best[op.key] = ((*path, op.key), length + duration) if duration else (path, length)
    return _longest(best.values())


def _longest(paths: Iterable[tuple[tuple[str, ...], float]]) -> tuple[tuple[str, ...], float]:
    return max(paths, key=lambda path: path[1], default=((), 0.0))


def _tower_overlap(name: str, intervals: Sequence[Interval], may: Mapping[str, frozenset[str]]) -> TowerOverlap:
    own = [interval for interval in intervals if interval.op.kind == EARLY and interval.op.tower == name]
    beside: dict[str, float] = {}
    hidden_ms = 0.0
    for interval in own:
        shared = []
        for other in intervals:
            start, end = max(interval.start_ms, other.start_ms), min(interval.end_ms, other.end_ms)
            if other is not interval and end > start:
                shared.append((start, end))
                beside[other.op.key] = beside.get(other.op.key, 0.0) + end - start
        hidden_ms += _union_ms(shared)
    return TowerOverlap(
        backward_ms=sum(interval.duration_ms for interval in own),
        hidden_ms=hidden_ms,
        beside_ms=dict(sorted(beside.items(), key=lambda shared: -shared[1])),
        may_run_beside=frozenset(itertools.chain.from_iterable(may[interval.op.key] for interval in own)),
    )


def _union_ms(spans: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _neighbours(beside_ms: Mapping[str, float]) -> str:
    shown = [f"{key} {shared:.3f}" for key, shared in list(beside_ms.items())[:SHOWN_NEIGHBOURS]]
    rest = len(beside_ms) - len(shown)
    return ", ".join([*shown, f"{rest} more"] if rest else shown) or "nothing"


def _kinds(keys: Iterable[str]) -> str:
    counts = Counter(key.partition(":")[0].partition("@")[0] for key in keys)
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in sorted(counts.items())) or "nothing"
