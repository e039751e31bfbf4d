"""A plan's program: who waits for whom, and what does not, proven on recording streams without a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import make_config, refusals, tower
from schedule_strategies import configurations

from erase_rec.schedule.plan import BESIDE, MAIN, Plan, TowerPlan
from erase_rec.schedule.program import Op, guaranteed_order, parts, program
from erase_rec.schedule.streams import RecordingStreams

COLLECTIVE = {"lookup", "over_arch", "backward", "reduce", "table_update"}
"""Operations that ask the process group for something, under one reduction or another."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of legal configurations."""
    config = draw(configurations(consistent=True))
    assume(refusals(config) == [])
    return Plan.from_config(config)


def record(ops: Sequence[Op]) -> RecordingStreams:
    """Launches every operation in order; a wait for what is not launched yet raises."""
    streams = RecordingStreams(ops)
    streams.begin()
    for op in ops:
        with streams.run(op):
            pass
    return streams


def keys(kind: Any, towers: Iterable[TowerPlan], micro: int = 0) -> set[str]:
    return {Op(kind, tower=tower.name, micro=micro).key for tower in towers}


def early_keys(plan: Plan) -> set[str]:
    early = [entry for entry in plan.towers if entry.early]
    return {key for micro in range(plan.micro_batches) for key in keys("early_backward", early, micro)}


PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)


@PROPERTY
@given(plan=plans())
def test_forward_part_waits_for_what_it_reads_and_for_nothing_else(plan: Plan) -> None:
    """Chains add their edges, the joint target one join of the logits; the over-arch waits for forwards only."""
    ops = {op.key: op for op in program(plan)}
    assert len(ops) == len(program(plan)), "keys are unique"
    joint = [entry for entry in plan.towers if entry.loss and entry.loss.target == "joint"]
    for micro in range(plan.micro_batches):
        forwards = keys("forward", plan.towers, micro)
        join = Op("logit_join", micro=micro).key
        assert set(ops[Op("over_arch", micro=micro).key].waits) == forwards
        assert (join in ops) == bool(joint)
        if joint:
            assert set(ops[join].waits) == forwards
        for entry in plan.towers:
            (forward,), (loss,), (early,) = (
                keys(kind, [entry], micro) for kind in ("forward", "local_loss", "early_backward")
            )
            reads = [plan.tower(name) for name in entry.inputs]
            given = "enter" if plan.cuda_graph == "dense" else "lookup"
            assert set(ops[forward].waits) == {given} | keys("forward", reads, micro)
            assert (loss in ops) == (entry.loss is not None)
            if entry.loss is not None:
                assert set(ops[loss].waits) == {forward} | ({join} if entry in joint else set())
            assert (early in ops) == entry.early
            if entry.early:
                assert set(ops[early].waits) == {loss}


@PROPERTY
@given(plan=plans())
def test_updates_come_after_every_gradient_that_they_use(plan: Plan) -> None:
    log = record(program(plan))
    aggregate = {Op("backward", micro=micro).key for micro in range(plan.micro_batches)}
    for entry in plan.trained():
        update = f"update:{entry.name}" if plan.optimizer == "per_tower" else "update"
        of_tower = {key for key in early_keys(plan) if key.split("@")[0] == f"early_backward:{entry.name}"}
        for gradient in of_tower if entry.early else aggregate:
            assert log.happens_before(gradient, update)
            if plan.reduction == "bucket":
                assert log.happens_before(gradient, f"reduce:{entry.name}")
        if plan.reduction == "bucket":
            assert log.happens_before(f"reduce:{entry.name}", update)
        if plan.reduction == "ddp":
            assert all(log.happens_before(gradient, update) for gradient in aggregate), "its reducer runs there"
    for gradient in aggregate | early_keys(plan):
        assert log.happens_before(gradient, "table_update")
    for gradient in aggregate:
        assert log.happens_before(gradient, "update")
    if plan.reduction == "bucket":
        assert log.happens_before("reduce", "update")


@PROPERTY
@given(plan=plans())
def test_what_follows_a_step_on_the_main_stream_follows_all_of_it(plan: Plan) -> None:
    """Evaluation, checkpoints and the comparison of replicas read what the towers' streams have updated."""
    ops = program(plan)
    log = record(ops)
    assert ops[-1].key == "end"
    assert all(log.happens_before(op.key, "end") for op in ops[:-1])


@PROPERTY
@given(plan=plans())
def test_no_update_comes_before_every_loss_is_checked(plan: Plan) -> None:
    """On the host's order of launch: a loss that is not finite stops every update of the step."""
    order = [op.key for op in program(plan)]
    log = record(program(plan))
    for micro in range(plan.micro_batches):
        assert log.happens_before(Op("over_arch", micro=micro).key, "check")
        for key in keys("local_loss", [entry for entry in plan.towers if entry.loss], micro):
            assert log.happens_before(key, "check")
    assert all(order.index("check") < order.index(key) for key in order if "update" in key)


@PROPERTY
@given(plan=plans())
def test_main_thread_issues_collectives_and_joins_what_it_waits_for(plan: Plan) -> None:
    joined: set[str] = set()
    by_worker: set[str] = set()
    ops = program(plan)
    for op in ops:
        joined |= set(op.joins)
        assert set(op.joins) <= by_worker
        if op.worker:
            assert op.kind == "early_backward"
            assert op.worker <= plan.workers
            assert not op.joins
            by_worker.add(op.key)
        else:
            assert not (set(op.waits) & by_worker) - joined
        assert not (op.kind in COLLECTIVE and op.worker)
    assert by_worker == (early_keys(plan) if plan.dispatch == "non_blocking" else set())
    assert joined == by_worker, "an error of any worker is met within the step"
    before_over_arch = itertools.takewhile(lambda op: op.kind != "over_arch", ops)
    assert not any(op.joins for op in before_over_arch), "forwards are launched whatever the workers' pace"


@PROPERTY
@given(plan=plans())
def test_main_waits_for_no_early_backward_before_its_own(plan: Plan) -> None:
    """Of a tower that shares its stream with nobody; but for the one reducer of `ddp`, which reads every gradient."""
    log = record(program(plan))
    last = plan.micro_batches - 1
    streams = [entry.stream for entry in plan.towers] + [MAIN]
    alone = [entry for entry in plan.towers if entry.early and streams.count(entry.stream) == 1]
    for early in keys("early_backward", alone, last):
        assert not log.happens_before(early, Op("over_arch", micro=last).key)
        assert log.happens_before(early, Op("backward", micro=last).key) == (plan.reduction == "ddp")


@PROPERTY
@given(plan=plans())
def test_an_own_target_depends_on_no_other_tower_but_by_a_chain(plan: Plan) -> None:
    log = record(program(plan))
    streams = [entry.stream for entry in plan.towers] + [MAIN]
    upstream: dict[str, set[str]] = {}
    for entry in plan.towers:
        upstream[entry.name] = {entry.name, *entry.inputs}.union(*(upstream[name] for name in entry.inputs))
        alone = all(streams.count(plan.tower(name).stream) == 1 for name in upstream[entry.name])
        if not alone or not entry.early or entry.loss is None or entry.loss.target == "joint":
            continue
        others = [other for other in plan.towers if other.name not in upstream[entry.name]]
        for key in keys("forward", others) | keys("early_backward", [other for other in others if other.early]):
            assert not log.happens_before(key, f"early_backward:{entry.name}")
        assert not log.happens_before("over_arch", f"early_backward:{entry.name}")


@PROPERTY
@given(plan=plans())
def test_a_step_that_cuts_nothing_has_one_backward_after_all_towers(plan: Plan) -> None:
    exact = plan.exact()
    log = record(program(exact))
    assert not any(op.kind == "early_backward" or op.worker for op in program(exact))
    for micro in range(exact.micro_batches):
        backward = Op("backward", micro=micro).key
        losses = keys("local_loss", [entry for entry in exact.towers if entry.loss], micro)
        for key in {Op("over_arch", micro=micro).key} | losses | keys("forward", exact.towers, micro):
            assert log.happens_before(key, backward)
    assert exact.streams() == plan.streams()


def test_which_steps_cut_nothing() -> None:
    plan = three_towers(exact_every=3)
    assert [step for step in range(7) if plan.is_exact(step)] == [2, 5]
    assert plan.of_step(1) is plan
    assert plan.of_step(2) == plan.exact()
    assert not three_towers().is_exact(2)


def test_the_joint_target_depends_on_the_others_forward_alone() -> None:
    log = record(program(three_towers()))
    for name, other in itertools.product(("dot", "cross"), ("deep", "dot", "cross")):
        assert log.happens_before(f"forward:{other}", f"early_backward:{name}")
        assert name == other or not log.happens_before(f"early_backward:{other}", f"local_loss:{name}")
        assert not log.happens_before("over_arch", f"early_backward:{name}")


def three_towers(**schedule: Any) -> Plan:
    towers = [tower("deep"), tower("dot", target="joint"), tower("cross", target="joint")]
    return Plan.from_config(make_config(towers, schedule=schedule))


def test_launch_order_of_early_backwards() -> None:
    """Own targets launch right after their forward; joint ones after the join, before the over-arch."""
    assert [op.key for op in program(three_towers(optimizer="end"))] == [
        "lookup",
        "order",
        "forward:deep",
        "local_loss:deep",
        "early_backward:deep",
        "forward:dot",
        "forward:cross",
        "logit_join",
        "local_loss:dot",
        "early_backward:dot",
        "local_loss:cross",
        "early_backward:cross",
        "over_arch",
        "check",
        "metrics",
        "backward",
        "update",
        "table_update",
        "end",
    ]


def test_a_tower_is_reduced_and_updated_where_its_gradient_is_ready() -> None:
    """Blocking: its reduction right after its backward. Non-blocking: once the over-arch is launched."""
    plan = replace(three_towers(optimizer="per_tower"), reduction="bucket")
    order = [op.key for op in program(plan)]
    assert order.index("reduce:deep") == order.index("early_backward:deep") + 1
    assert {op.stream for op in program(plan) if op.tower == "deep"} == {"tower:deep"}
    assert order.index("update:cross") < order.index("backward")
    by_worker = [op.key for op in program(replace(plan, dispatch="non_blocking"))]
    assert by_worker.index("reduce:deep") > by_worker.index("over_arch")


def test_work_that_nothing_waits_for_has_a_stream_of_its_own_beside_others() -> None:
    """Sorting ids and the metrics' sums are on nobody's path before the table update and the end."""
    ops = {op.key: op for op in program(three_towers())}
    assert ops["order"].stream == ops["metrics"].stream == BESIDE
    assert [key for key, op in ops.items() if "order" in op.waits] == ["table_update"]
    assert [key for key, op in ops.items() if "metrics" in op.waits] == ["end"]
    one_stream = program(Plan.from_config(make_config([tower("deep")], schedule={"preset": "exact"})))
    assert {op.stream for op in one_stream} == {MAIN}
    untrained = program(replace(three_towers(), embedding_gradient="none"))
    assert "order" not in {op.key for op in untrained}


def test_tables_frame_what_a_dense_graph_holds() -> None:
    """Only its first operation waits for one outside, and outside only its last is waited for; both are on main."""
    plan = replace(three_towers(cuda_graph="dense"), reduction="bucket")
    before, captured, after = parts(program(plan))
    assert [op.key for op in before] == ["lookup", "order"]
    assert [op.key for op in after] == ["table_update", "end"]
    inside = {op.key for op in captured}
    assert [(op.key, op.stream) for op in captured if not {*op.waits} <= inside] == [("enter", MAIN)]
    assert {key for op in after for key in op.waits} - {"order", "table_update"} == {"leave"}
    log = record(program(plan))
    assert all(log.happens_before(key, "leave") for key in inside - {"leave"}), "all streams are joined"
    assert log.happens_before("table_gradient", "table_update")
    assert log.happens_before("order", "table_update")
    assert not log.happens_before("order", "metrics"), "one stream, but a replay is not given to it"
    whole = parts(program(replace(plan, cuda_graph="step")))
    assert (whole.before, whole.after) == ((), ())


def test_the_launch_order_moves_towers_and_keeps_their_waits() -> None:
    plan = three_towers()
    moved = replace(plan, launch_order=("cross", "deep", "dot"))
    assert [op.tower for op in program(moved) if op.kind == "forward"] == ["cross", "deep", "dot"]
    assert [op.tower for op in program(moved) if op.kind == "early_backward"] == ["deep", "cross", "dot"]
    waits = [{op.key: set(op.waits) for op in program(each)} for each in (plan, moved)]
    assert waits[0] == waits[1]
    assert replace(plan, high_priority=("deep",)).preferred() == {"tower:deep"}


def test_without_early_backward_there_is_one_backward() -> None:
    plan = three_towers(early_backward=False)
    assert [op.key for op in program(plan) if "backward" in op.kind] == ["backward"]


def test_workers_take_turns() -> None:
    ops = program(three_towers(dispatch="non_blocking", workers=2))
    assert {op.tower: op.worker for op in ops if op.worker} == {"deep": 1, "dot": 2, "cross": 1}


def test_a_program_that_lacks_a_wait_is_seen() -> None:
    """Negative control: the order that the properties ask for is made by the waits."""
    ops = program(three_towers())
    broken = [replace(op, waits=()) if op.kind in {"logit_join", "over_arch"} else op for op in ops]
    assert not record(broken).happens_before("forward:dot", "over_arch")


def test_streams_order_what_one_thread_launches_and_joins_order_what_workers_did() -> None:
    ops = [
        Op("forward", "s", "a"),
        Op("early_backward", "s", "a", worker=1),
        Op("early_backward", "s", "b", worker=2),
        Op("forward", "s", "c"),
        Op("join", "s", joins=("early_backward:a",)),
        Op("end", "other", waits=("join",)),
    ]
    before = guaranteed_order(ops)
    assert before["early_backward:b"] == {"forward:a"}, "two workers on one stream: either may come first"
    assert before["forward:c"] == {"forward:a"}, "main does not know how far a worker is"
    assert before["join"] == {"forward:a", "early_backward:a", "forward:c"}
    assert before["end"] == before["join"] | {"join"}


def test_a_wait_for_what_is_not_launched_is_refused() -> None:
    """On a device such a wait would be void: an event that is not recorded yet holds nobody up."""
    ops = program(three_towers())
    streams = RecordingStreams(ops)
    local_loss = next(op for op in ops if op.key == "local_loss:cross")
    with (
        pytest.raises(RuntimeError, match="forward:cross, logit_join, which nobody has launched"),
        streams.run(local_loss),
    ):
        pass
