"""What `erase-rec advise` concludes, on made-up measurements: every verdict, ties, refused ways, limits, data, time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from erase_rec.advice.decision import Decision, NeVerdict, Speed, decide
from erase_rec.advice.facts import DataCheck, KnownNe, bound_of, memory_of
from erase_rec.advice.limits import as_launched, median_durations, tower_limits
from erase_rec.advice.report import Advice, sentences, tables
from erase_rec.advice.turns_in_time import FEWEST_TURNS, MOST_STEPS, MOST_TURNS, Pace, pace
from erase_rec.bench.result import GIB, Row
from erase_rec.errors import UserError
from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import Op

FAMILIES = {"exact": "exact", "exact_graph": "exact", "detached": "detached", "erase": "early", "erase_graph": "early"}
FLOOR = {"bytes": {"weights": 4 * GIB, "gradients": 4 * GIB, "optimizer state": 8 * GIB, "activations": 2 * GIB}}
DATA = DataCheck(10.0, 10.1, 0.0, alone_ms=1.0, batches=8, workers=0)


def row(arm: str, ms: float = 10.0, refused: str | None = None, **changes: Any) -> Row:
    plain = Row("w", arm, None, FAMILIES[arm], "about it", 64, 1, (f"schedule.preset={arm}",))  # type: ignore[arg-type]
    timed = replace(plain, refused=refused, floor=FLOOR, step_ms_p50=ms, qps_mean=6.4e4 / ms)
    return replace(plain, refused=refused) if refused is not None else replace(timed, **changes)


def pair(arm: str, noise: Speed) -> Row:
    return replace(row(arm), arm=f"{arm} (A/A)", repeats=arm, ratio_to={arm: noise})


def compared(ms: Mapping[str, float], spread: float = 0.01) -> list[Row]:
    """Ways with these step times, each speed known to a share of ``spread``; the first is the reference."""
    rows = []
    for arm, own in ms.items():
        speeds = {o: (other / own * (1 - spread), other / own, other / own * (1 + spread)) for o, other in ms.items()}
        rows.append(row(arm, own, ratio_to={other: speed for other, speed in speeds.items() if other != arm}))
    first = next(iter(ms))
    return [rows[0], pair(first, (1 - spread, 1.0, 1 + spread)), *rows[1:]]


# The decision


@pytest.mark.parametrize(
    ("ms", "ne", "verdict", "recommended"),
    [
        ({"exact": 10.0, "erase": 8.0}, None, "cut_faster", "erase"),
        ({"exact": 10.0, "erase": 8.0}, "inside the noise", "cut_faster", "erase"),
        ({"exact": 10.0, "erase": 8.0}, "better", "cut_faster", "erase"),
        ({"exact": 10.0, "erase": 8.0}, "one seed: no verdict", "cut_faster", "erase"),
        ({"exact": 10.0, "erase": 8.0}, "worse", "cut_faster_but_worse", "exact"),
        ({"exact": 10.0, "erase": 9.99}, None, "nothing_gained", "exact"),
        ({"exact": 10.0, "erase": 10.0}, "better", "nothing_gained", "exact"),
        ({"exact": 10.0, "erase": 12.0}, None, "cut_slower", "exact"),
        ({"exact": 10.0}, None, "only_exact", "exact"),
        ({"erase": 10.0}, None, "only_cut", "erase"),
        # Against the strongest rival, which is captured too; not against the slow one.
        (
            {"exact": 10.0, "exact_graph": 2.0, "erase": 5.0, "erase_graph": 2.001},
            None,
            "nothing_gained",
            "exact_graph",
        ),
        ({"exact": 10.0, "exact_graph": 2.0, "erase": 5.0, "erase_graph": 1.8}, None, "cut_faster", "erase_graph"),
    ],
)
def test_every_verdict(ms: dict[str, float], ne: NeVerdict | None, verdict: str, recommended: str) -> None:
    found = decide(compared(ms), next(iter(ms)), ne)
    assert (found.verdict, found.recommended.arm) == (verdict, recommended)
    assert (found.gain is None) == (len(ms) == 1)
    assert (found.change is None) == (recommended == next(iter(ms)))


def test_of_ways_that_cannot_be_told_apart_the_simpler_is_kept() -> None:
    """Whatever the order of the rows, and however the medians fell."""
    rows = compared({"erase_graph": 7.99, "erase": 8.0, "detached": 8.01, "exact_graph": 9.99, "exact": 10.0}, 0.02)
    found = decide(rows, "erase_graph")
    assert found.exact is not None
    assert found.cut is not None
    assert (found.exact.arm, found.cut.arm) == ("exact", "detached")


def test_an_open_bound_proves_nothing() -> None:
    exact = row("exact", ratio_to={"erase": (None, 0.5, None)})
    found = decide([exact, row("erase", 5.0, ratio_to={"exact": (None, 2.0, None)})], "exact")
    assert (found.verdict, found.noise, found.restless) == ("nothing_gained", None, False)


@pytest.mark.parametrize(("gain", "verdict"), [(1.05, "nothing_gained"), (1.3, "cut_faster"), (0.95, "nothing_gained")])
def test_a_gain_must_be_more_than_what_a_way_gains_over_itself(gain: float, verdict: str) -> None:
    rows = compared({"exact": 10.0, "erase": 10.0 / gain})
    rows[1] = pair("exact", (1.05, 1.1, 1.15))
    found = decide(rows, "exact")
    assert (found.verdict, found.restless) == (verdict, True)


def test_refused_ways_do_not_count_and_where_all_are_it_is_said_why() -> None:
    rows = [*compared({"exact": 10.0, "erase": 8.0}), row("erase_graph", refused="no graphs")]
    found = decide(rows, "exact")
    assert found.cut is not None
    assert found.cut.arm == "erase"
    with pytest.raises(UserError, match=r"no way to train could be run here: exact: no memory; erase: no graphs"):
        decide([row("exact", refused="no memory"), row("erase", refused="no graphs")], "exact")


# What bounds a step


@pytest.mark.parametrize(
    ("data", "device", "bound"),
    [
        (DATA, {}, "device-bound"),
        (replace(DATA, measured_wait_ms=2.0), {}, "data-bound"),
        (replace(DATA, alone_ms=2.0), {}, "data-bound"),  # made between the steps: each waits for all of it
        (replace(DATA, alone_ms=2.0, workers=1), {}, "device-bound"),  # made beside the step
        (replace(DATA, alone_ms=12.0, workers=1), {}, "data-bound"),  # a loader that cannot keep up
        (replace(DATA, alone_ms=0.1), {"host_ms": 9.8, "idle_share": 0.5}, "host-bound"),
        (replace(DATA, alone_ms=0.1), {"host_ms": 1.0, "idle_share": 0.5}, "device-bound"),
    ],
)
def test_bounds(data: DataCheck, device: dict[str, float], bound: str) -> None:
    assert bound_of(row("exact", **device), data) == bound


# Towers


def test_the_tower_that_limits_a_step_is_the_one_on_its_longest_chain() -> None:
    """b runs beside a on a stream of its own and is longer; without it the chain goes over a."""
    ops = [
        Op("lookup"),
        *(Op("forward", f"s{t}", t, ("lookup",)) for t in "ab"),
        *(Op("early_backward", f"s{t}", t, (f"forward:{t}",)) for t in "ab"),
        Op("over_arch", waits=("forward:a", "forward:b")),
        Op("end", waits=("over_arch", "early_backward:a", "early_backward:b")),
    ]
    ms = {"lookup": 1.0, "forward:a": 1.0, "early_backward:a": 2.0, "forward:b": 2.0, "early_backward:b": 4.0}
    found = tower_limits("erase", ops, ms | {"over_arch": 0.5})
    assert found.path == ("lookup", "forward:b", "early_backward:b")
    assert found.path_ms == 7.0
    first, second = found.towers
    assert (first.name, first.chain_ms, first.path_without_ms) == ("b", 6.0, 4.0)
    assert first.gain_if_gone == pytest.approx(7 / 4)
    assert first.share == pytest.approx(6 / 7)
    assert (second.name, second.gain_if_gone) == ("a", 1.0)  # beside b it costs nothing
    serial = tower_limits("erase", as_launched(ops), ms | {"over_arch": 0.5})
    assert serial.path_ms == 10.5  # one thread does one thing after the other
    assert [tower.path_without_ms for tower in serial.towers] == [4.5, 7.5]


def test_a_step_without_towers_or_times_has_no_limit_to_divide_by() -> None:
    assert tower_limits("exact", [Op("lookup")], {"lookup": 1.0}).towers == ()
    (only,) = tower_limits("erase", [Op("forward", tower="a")], {"forward:a": 2.0}).towers
    assert (only.share, only.path_without_ms, only.gain_if_gone) == (1.0, 0.0, 1.0)


def test_durations_are_medians_so_that_one_slow_step_changes_nothing() -> None:
    def step(ms: float) -> list[Interval]:
        return [Interval(Op("lookup"), "main", 1.0, 1.0 + ms, 0.0, 0.1)]

    assert median_durations([step(2.0), step(90.0), step(3.0)]) == {"lookup": 3.0}


# Memory and time


def test_memory_is_counted_where_it_cannot_be_measured() -> None:
    counted = memory_of(row("exact"), int(3 * GIB))
    assert (counted.tables_gib, counted.dense_gib, counted.activations_gib) == (3.0, 8.0, 1.0)
    assert counted.total_gib == 12.0
    assert memory_of(row("exact", peak_gib=9.5), int(3 * GIB)).total_gib == 9.5


def test_turns_fill_the_time_and_are_never_too_few() -> None:
    assert pace(60, 1e-3, 10, on_cuda=True) == Pace(MOST_TURNS, MOST_STEPS, 10)
    assert pace(-5, 1.0, 10, on_cuda=False) == Pace(FEWEST_TURNS, 1, 2)
    some = pace(60, 0.1, 5, on_cuda=False)
    assert FEWEST_TURNS < some.repeats < MOST_TURNS
    assert 5 * 0.1 * (some.warmup + some.repeats * (some.steps + 2)) < 60
    assert pace(60, 0.0, 5, on_cuda=False).steps == MOST_STEPS


# What is said


def advice(decision: Decision, rows: list[Row], **changes: Any) -> Advice:
    ran = [each for each in rows if each.refused is None and each.repeats is None]
    ops = [Op("forward", tower="deep"), Op("over_arch", waits=("forward:deep",))]
    limits = tower_limits("erase", ops, {"forward:deep": 3.0, "over_arch": 1.0})
    found = Advice(
        config="m.yaml",
        overrides=["schedule.preset=paper_row3", "seed=2"],
        device="a GPU",
        reference="exact",
        decision=decision,
        rows=rows,
        data=DATA,
        memory=[memory_of(each, 0) for each in ran],
        limits=limits,
        ne=None,
        ne_commands="erase-rec sweep",
        on_cuda=True,
        about={},
    )
    return replace(found, **changes)


def said(ms: dict[str, float], **changes: Any) -> str:
    rows, ne = compared(ms), changes.get("ne")
    found = decide(rows, next(iter(ms)), None if ne is None else ne.verdict)
    return "\n".join(sentences(advice(found, rows, **changes)))


def test_sentences_say_what_to_do_and_what_it_rests_on() -> None:
    faster = said({"exact": 10.0, "erase": 8.0})
    assert "erase has 1.250 [1.238, 1.262] times the speed of exact" in faster
    # What the way says goes before what the command line said; whether a failed capture ends the run is no advice.
    assert "Train: erase-rec train --config m.yaml seed=2 schedule.preset=erase" in faster
    assert "not known from a speed measurement: take the faster way once a sweep has told" in faster
    assert "Tower deep limits the step of erase: its own work takes 3.00 ms, 75 %" in faster
    assert "more than 4.00 times as fast" in faster
    assert "Memory, measured peak" in faster
    nothing = said({"exact": 10.0, "erase": 9.99})
    assert "Nothing is gained by cutting towers" in nothing
    assert "With exact, gradients are exact, for free." in nothing
    assert "Recommended: exact. It is what the configuration says. Train: erase-rec train --config m.yaml" in nothing
    assert "slower: erase has 0.833" in said({"exact": 10.0, "erase": 12.0})
    assert "No way that cuts towers could be run" in said({"exact": 10.0}, limits=None)
    assert "Which tower limits the step is not known" in said({"exact": 10.0}, limits=None)


def test_what_the_users_runs_say_of_ne_is_said_with_its_interval() -> None:
    worse = KnownNe("worse", 0.2, 0.3, 0.4, (1, 2), ("r1", "r2"))
    text = said({"exact": 10.0, "erase": 8.0}, ne=worse)
    assert "makes a step faster, and NE worse" in text
    assert "in your 2 pairs of runs: +0.300 % [+0.200, +0.400]: worse." in text
    alone = KnownNe("one seed: no verdict", None, 0.3, None, (1,), ("r1", "r2"))
    assert "1 pair of runs: +0.300 %: one seed: no verdict." in said({"exact": 10.0, "erase": 8.0}, ne=alone)


def test_bounds_and_unrest_are_said() -> None:
    slow = said({"exact": 10.0, "erase": 8.0}, data=replace(DATA, alone_ms=5.0))
    assert "The step is data-bound" in slow
    assert "waits 5.00 ms for its batch" in slow
    rows = compared({"exact": 10.0, "erase": 9.0})
    rows[1] = pair("exact", (1.01, 1.02, 1.03))
    assert "Caution: exact differs from itself" in "\n".join(sentences(advice(decide(rows, "exact"), rows)))
    host = [replace(each, host_ms=9.9, idle_share=0.5) for each in compared({"exact": 10.0})]
    text = "\n".join(sentences(advice(decide(host, "exact"), host, data=replace(DATA, alone_ms=0.1))))
    assert "The step is host-bound: launching it takes 9.90 ms, while the device is idle for 50 %" in text


def test_tables_and_the_record_hold_the_same_facts() -> None:
    rows = [*compared({"exact": 10.0, "erase": 8.0}), row("erase_graph", refused="no graphs")]
    found = advice(decide(rows, "exact"), rows)
    ways, refused, towers = tables(found)
    assert [line[0] for line in ways.rows] == ["erase", "exact", "exact (A/A)"]
    assert ways.rows[0][4] == "1.250 [1.238, 1.262]"
    assert refused.rows == (("erase_graph", "no graphs"),)
    assert towers.rows[0][:3] == ("deep", "3.000", "75 %")
    record = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert (record["verdict"], record["recommended"], record["bound"]) == ("cut_faster", "erase", "device-bound")
    assert record["gain_of_cutting"][1] == 1.25
    assert record["sentences"] == list(sentences(found))
