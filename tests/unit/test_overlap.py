"""Overlap on made-up intervals whose answer is known, and measured streams on a real program."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from erase_rec.schedule.measured_streams import Interval, MeasuredStreams
from erase_rec.schedule.overlap import critical_path, may_overlap, overlap_report
from erase_rec.schedule.plan import LossPlan, Plan, TowerPlan
from erase_rec.schedule.program import Op, program
from erase_rec.schedule.streams import NullStreams

CPU = torch.device("cpu")
LOOKUP = Op("lookup")
FORWARD_A = Op("forward", "tower:a", "a", ("lookup",))
BACKWARD_A = Op("early_backward", "tower:a", "a", ("forward:a",))
FORWARD_B = Op("forward", "tower:b", "b", ("lookup",))
OVER_ARCH = Op("over_arch", waits=("forward:a", "forward:b"))
END = Op("end", waits=("early_backward:a",))
OPS = (LOOKUP, FORWARD_A, BACKWARD_A, FORWARD_B, OVER_ARCH, END)


def at(op: Op, start: float, end: float) -> Interval:
    return Interval(op, "MainThread", start, end, start, end)


STEP = (
    at(LOOKUP, 0, 1),
    at(FORWARD_A, 1, 3),
    at(BACKWARD_A, 3, 8),
    at(FORWARD_B, 1, 4),
    at(OVER_ARCH, 4, 6),
)


def make_plan(target: str = "own", **changes: object) -> Plan:
    names = ("a", "b", "c")
    towers = tuple(TowerPlan(name, f"tower:{name}", True, True, LossPlan(1.0, target)) for name in names)  # type: ignore[arg-type]
    return Plan(towers, "both", **changes)  # type: ignore[arg-type]


def test_hidden_time_counts_each_moment_once() -> None:
    report = overlap_report(STEP, OPS)
    tower = report.towers["a"]
    assert tower.backward_ms == 5
    assert tower.beside_ms == {"over_arch": 2, "forward:b": 1}
    assert tower.hidden_ms == 3  # 3 to 4 beside forward:b, 4 to 6 beside the over-arch
    assert tower.hidden_share == report.hidden_share == pytest.approx(0.6)
    assert list(report.towers) == ["a"]


def test_busy_times_union_and_step() -> None:
    report = overlap_report(STEP, OPS)
    assert report.busy_ms == {"main": 3, "tower:a": 7, "tower:b": 3}
    assert report.union_ms == 8
    assert report.step_ms == 8
    assert report.overlap_share == pytest.approx(1 - 8 / 13)


def test_critical_path_is_the_longest_ordered_chain() -> None:
    report = overlap_report(STEP, OPS)
    assert report.critical_path == ("lookup", "forward:a", "early_backward:a")
    assert report.critical_path_ms == 8
    slow_over_arch = {"lookup": 1.0, "forward:a": 2.0, "early_backward:a": 5.0, "forward:b": 3.0, "over_arch": 9.0}
    assert critical_path(OPS, slow_over_arch) == (("lookup", "forward:b", "over_arch"), 13.0)


def test_one_stream_makes_the_critical_path_the_whole_program() -> None:
    ops = tuple(Op(op.kind, tower=op.tower, waits=op.waits) for op in OPS)
    path, length = critical_path(ops, dict.fromkeys((op.key for op in ops), 1.0))
    assert path == tuple(op.key for op in ops)
    assert length == len(ops)


def test_serial_intervals_hide_nothing() -> None:
    serial = tuple(at(op, float(start), start + 1.0) for start, op in enumerate(OPS))
    report = overlap_report(serial, OPS)
    assert report.hidden_share == report.overlap_share == 0
    assert report.towers["a"].beside_ms == {}
    assert "nothing" in report.as_markdown()


def test_micro_batches_of_a_tower_are_added_up() -> None:
    second = Op("early_backward", "tower:a", "a", ("forward:a",), micro=1)
    report = overlap_report((*STEP, at(second, 8, 9), at(END, 8.5, 10)), (*OPS, second))
    assert report.towers["a"].backward_ms == 6
    assert report.towers["a"].hidden_ms == pytest.approx(3.5)


def test_what_may_overlap_is_symmetric_and_excludes_what_is_ordered() -> None:
    ops = program(make_plan())
    may = may_overlap(ops)
    for key, others in may.items():
        assert all(key in may[other] for other in others)
    assert {"over_arch", "backward", "forward:b", "early_backward:b"} <= may["early_backward:a"]
    assert not {"lookup", "forward:a", "table_update"} & may["early_backward:a"]


def test_a_joint_target_may_not_run_beside_the_forwards_that_it_joins() -> None:
    may = may_overlap(program(make_plan("joint")))
    assert not {f"forward:{name}" for name in "abc"} & may["early_backward:a"]
    assert "over_arch" in may["early_backward:a"]


def test_without_early_backward_the_report_still_describes_the_step() -> None:
    ops = (LOOKUP, FORWARD_A, Op("backward", waits=("forward:a",)))
    report = overlap_report(tuple(at(op, float(i), i + 1.0) for i, op in enumerate(ops)), ops)
    assert report.towers == {}
    assert report.critical_path_ms == 3
    assert report.scalars() == {"overlap/overlap_share": 0, "overlap/critical_path_ms": 3, "time/backward_ms": 1}
    assert [table.title for table in report.tables()] == ["One measured step"]


def test_scalars_and_tables_name_every_early_tower() -> None:
    report = overlap_report(STEP, OPS)
    assert report.scalars() == {
        "overlap/hidden_share": pytest.approx(0.6),
        "overlap/overlap_share": pytest.approx(1 - 8 / 13),
        "overlap/critical_path_ms": 8,
        "time/backward_ms": 5,
        "tower/a/backward_hidden_share": pytest.approx(0.6),
    }
    towers, step = report.tables()
    assert [row[0] for row in towers.rows] == ["a"]
    assert any("lookup > forward:a > early_backward:a" in row[1] for row in step.rows)


def run_step(streams: MeasuredStreams, ops: tuple[Op, ...] = OPS, *, measure: bool = True) -> None:
    streams.begin(measure=measure)
    for op in ops:
        with streams.run(op):
            pass


def test_measured_streams_time_the_last_step_in_launch_order() -> None:
    streams = MeasuredStreams(NullStreams(), CPU)
    for _ in range(2):
        run_step(streams)
    intervals = streams.intervals()
    assert [interval.op for interval in intervals] == list(OPS)
    for earlier, later in itertools.pairwise(intervals):
        assert 0 <= earlier.start_ms <= earlier.end_ms <= later.start_ms
        assert earlier.thread == "MainThread"
    assert overlap_report(intervals, OPS).hidden_share == 0


def test_measured_streams_can_let_steps_pass() -> None:
    streams = MeasuredStreams(NullStreams(), CPU)
    run_step(streams, measure=False)
    assert streams.intervals() == ()


def test_a_worker_is_seen_beside_the_main_thread() -> None:
    """Two threads that are inside their operations at the same time, by a barrier and not by luck."""
    streams = MeasuredStreams(NullStreams(), CPU)
    both_inside = threading.Barrier(2, timeout=30)

    def early_backward() -> None:
        with streams.run(BACKWARD_A):
            both_inside.wait()
            both_inside.wait()

    streams.begin(measure=True)
    worker = threading.Thread(target=early_backward, name="worker")
    worker.start()
    with streams.run(OVER_ARCH):
        both_inside.wait()
        both_inside.wait()
    worker.join(timeout=30)
    report = overlap_report(streams.intervals(), OPS)
    assert {interval.op.key: interval.thread for interval in streams.intervals()} == {
        "early_backward:a": "worker",
        "over_arch": "MainThread",
    }
    assert report.towers["a"].beside_ms.keys() == {"over_arch"}
    assert report.hidden_share > 0


def test_an_operation_that_raises_leaves_no_interval() -> None:
    streams = MeasuredStreams(NullStreams(), CPU)
    streams.begin(measure=True)
    with pytest.raises(ZeroDivisionError), streams.run(LOOKUP):
        raise ZeroDivisionError
    assert streams.intervals() == ()


def test_the_inner_streams_do_the_work() -> None:
    """Waits and events stay with the streams that are measured."""
    seen: list[str] = []

    class Inner(NullStreams):
        def begin(self) -> None:
            seen.append("begin")

        @contextmanager
        def run(self, op: Op) -> Iterator[None]:
            seen.append(op.key)
            yield

        @contextmanager
        def current(self, name: str) -> Iterator[None]:
            seen.append(f"current {name}")
            yield

    streams = MeasuredStreams(Inner(), CPU)
    run_step(streams, OPS[:2])
    with streams.current("tower:a"):
        pass
    assert seen == ["begin", "lookup", "forward:a", "current tower:a"]
