"""A plan's program: who waits for whom, proven on recording streams."""

from __future__ import annotations

import itertools

import pytest

from erase_rec.schedule.plan import MAIN, LossPlan, Plan, TowerPlan
from erase_rec.schedule.program import Op, program
from erase_rec.schedule.streams import RecordingStreams

NAMES = ("a", "b", "c")


def make_plan(
    targets: tuple[str | None, ...],
    *,
    detach: bool = True,
    early: bool = True,
    streams: tuple[str, ...] = ("tower:a", "tower:b", "tower:c"),
) -> Plan:
    return Plan(
        tuple(
            TowerPlan(name, stream, detach, early, None if target is None else LossPlan(1.0, target))  # type: ignore[arg-type]
            for name, stream, target in zip(NAMES, streams, targets, strict=True)
        ),
        "both",
    )


def record(ops: tuple[Op, ...]) -> RecordingStreams:
    streams = RecordingStreams(ops)
    streams.begin()
    for op in ops:
        with streams.run(op):
            pass
    return streams


@pytest.mark.parametrize("targets", list(itertools.product(["own", "joint"], repeat=3)))
@pytest.mark.parametrize(
    "streams",
    [("tower:a", "tower:b", "tower:c"), ("shared", "shared", "tower:c"), (MAIN, "tower:b", "tower:c"), (MAIN,) * 3],
)
def test_every_reader_waits_for_what_it_reads(targets: tuple[str, ...], streams: tuple[str, ...]) -> None:
    log = record(program(make_plan(targets, streams=streams)))
    for name, target in zip(NAMES, targets, strict=True):
        assert log.happens_before("lookup", f"forward:{name}")
        assert log.happens_before(f"forward:{name}", f"early_backward:{name}")
        assert log.happens_before(f"forward:{name}", "over_arch")
        assert log.happens_before(f"local_loss:{name}", "check")
        assert log.happens_before(f"early_backward:{name}", "update")
        if target == "joint":
            for other in NAMES:
                assert log.happens_before(f"forward:{other}", f"early_backward:{name}")
    assert log.happens_before("backward", "update")


@pytest.mark.parametrize("target", ["own", "joint"])
def test_main_does_not_wait_for_an_early_backward_before_its_own(target: str) -> None:
    log = record(program(make_plan((target,) * 3)))
    for name in NAMES:
        assert not log.happens_before(f"early_backward:{name}", "over_arch")
        assert not log.happens_before(f"early_backward:{name}", "backward")


def test_a_tower_on_its_own_target_depends_on_no_other_tower() -> None:
    log = record(program(make_plan(("own",) * 3)))
    for name, other in itertools.permutations(NAMES, 2):
        assert not log.happens_before(f"forward:{other}", f"early_backward:{name}")
        assert not log.happens_before(f"early_backward:{other}", f"forward:{name}")


def test_the_joint_target_adds_the_logit_join_and_no_other_dependence() -> None:
    log = record(program(make_plan(("joint",) * 3)))
    for name, other in itertools.permutations(NAMES, 2):
        assert not log.happens_before(f"early_backward:{other}", f"early_backward:{name}")
        assert not log.happens_before("over_arch", f"early_backward:{name}")


def test_dropping_a_wait_is_seen() -> None:
    """Negative control: the checks above can fail."""
    ops = program(make_plan(("own",) * 3))
    broken = tuple(Op(op.kind, op.stream, op.tower, () if op.kind == "over_arch" else op.waits) for op in ops)
    assert not record(broken).happens_before("forward:b", "over_arch")


def test_launch_order_of_early_backwards() -> None:
    """Own targets launch right after their forward; joint ones after the join, before the over-arch."""
    keys = [op.key for op in program(make_plan(("own", "joint", "joint")))]
    assert keys == [
        "lookup",
        "forward:a",
        "local_loss:a",
        "early_backward:a",
        "forward:b",
        "forward:c",
        "logit_join",
        "local_loss:b",
        "early_backward:b",
        "local_loss:c",
        "early_backward:c",
        "over_arch",
        "check",
        "backward",
        "update",
        "table_update",
        "end",
    ]


def test_without_early_backward_there_is_one_backward() -> None:
    keys = [op.key for op in program(make_plan((None,) * 3, detach=False, early=False))]
    assert [key for key in keys if "backward" in key] == ["backward"]
    assert "logit_join" not in keys


def test_a_wait_for_what_is_not_launched_is_refused() -> None:
    """On a device such a wait would be void: an event that is not recorded yet holds nobody up."""
    ops = program(make_plan(("own",) * 3))
    streams = RecordingStreams(ops)
    local_loss = next(op for op in ops if op.key == "local_loss:c")
    with pytest.raises(RuntimeError, match="forward:c, which nobody has launched"), streams.run(local_loss):
        pass
