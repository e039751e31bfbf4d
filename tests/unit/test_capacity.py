"""What ``erase-rec plan`` says of memory, bytes and times, against closed forms and the results it is fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erase_rec.capacity.cluster import Cluster, Kind
from erase_rec.capacity.demand import BlockDemand, ModelDemand, TableDemand
from erase_rec.capacity.memory import GIB, memory_of_ranks
from erase_rec.capacity.plan import CapacityPlan, ranks_that_hold
from erase_rec.capacity.report import sentences, tables
from erase_rec.capacity.step_time import PACES, exposed_ms, ready_at, row_traffic, step_time
from erase_rec.capacity.traffic import of_tables
from erase_rec.distributed.table_plan import Place, TablePlan

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ALONE = "1b62819"
"""Commit of the steps of h200-step.json beside which nothing else ran on the machine."""
ROWS, COLUMNS, BATCH, RANKS = 1000, 16, 32, 4
PLACES = {
    "replicated": [Place(rank, (0, ROWS), (0, COLUMNS)) for rank in range(RANKS)],
    "data_parallel": [Place(rank, (0, ROWS), (0, COLUMNS)) for rank in range(RANKS)],
    "table_wise": [Place(2, (0, ROWS), (0, COLUMNS))],
    "row_wise": [Place(rank, (250 * rank, 250 * (rank + 1)), (0, COLUMNS)) for rank in range(RANKS)],
    "column_wise": [Place(rank, (0, ROWS), (8 * rank, 8 * (rank + 1))) for rank in range(2)],
}
BLOCKS = (
    BlockDemand("one", True, 0.25, (4000,)),
    BlockDemand("two", True, 0.25, (4000,)),
    BlockDemand("over_arch", False, 0.5, (2000, 2000)),
)


def model(sharding: str = "row_wise", kernel: str = "fused", ids: float = 3.0, **changes: Any) -> ModelDemand:
    table = TableDemand("a", TablePlan(ROWS, COLUMNS, sharding, kernel, tuple(PLACES[sharding])), ids)
    plain = ModelDemand(
        tables=[table],
        blocks=BLOCKS,
        rows=BATCH,
        parts=1,
        compute_bytes=2,
        sparse_optimizer="rowwise_adagrad",
        dense_states=2,
        parameters=100,
        activations=50.0,
        flops=1e9,
        dense_bytes=1e6,
        row_bytes=[12.0],
        joint=False,
        reduction="bucket",
        weighted=False,
        single_valued=False,
        cuda_graph="step",
    )
    return replace(plain, **changes)


def test_times_of_collectives_are_those_of_the_slowest_way_out() -> None:
    one = Cluster(8, 1, link_bytes_per_s=100e9, network_bytes_per_s=10e9, latency_us=5)
    two = replace(one, nodes=2)
    given = 8e6
    expected: dict[Kind, tuple[float, float]] = {
        # ms on one node: 7/8 of 8 MB, or 7 times, or twice 7/8, at 100 GB/s; over two nodes one latency more.
        "all_to_all": (0.07, 0.4),  # 4/8 of it at 10 GB/s
        "reduce_scatter": (0.07, 0.175),  # a quarter of 7 MB at 10 GB/s
        "all_gather": (0.56, 1.4),
        "all_reduce": (0.14, 0.35),
    }
    for kind, (inside, across) in expected.items():
        assert one.collective_ms(kind, given) == pytest.approx(inside + 0.005)
        assert two.collective_ms(kind, given) == pytest.approx(across + 0.01)
        assert Cluster(1).collective_ms(kind, given) == 0.0


POOLED = 4 * BATCH * COLUMNS
IDS = 8 * 3 * BATCH
LENGTHS = 4 * BATCH


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("replicated", {"ids": [IDS] * 4, "lengths": [LENGTHS] * 4, "gradient": [POOLED // 2] * 4}),
        ("data_parallel", {"whole.0": [4 * ROWS * (COLUMNS + 1)] * 4}),
        ("table_wise", {"input": [IDS + LENGTHS] * 4, "exchange": [0, 0, 4 * POOLED, 0], "gradient": [POOLED] * 4}),
        ("row_wise", {"input": [IDS + 4 * LENGTHS] * 4, "exchange": [4 * POOLED] * 4, "gradient": [POOLED] * 4}),
        (
            "column_wise",
            {"input": [2 * (IDS + LENGTHS)] * 4, "exchange": [2 * POOLED] * 2 + [0] * 2, "gradient": [POOLED] * 4},
        ),
    ],
)
def test_each_sharding_gives_its_bytes(sharding: str, expected: dict[str, list[int]]) -> None:
    found = {each.group: [*each.given] for each in of_tables(model(sharding), RANKS)}
    assert found == {f"tables.{name}": given for name, given in expected.items()}
    assert of_tables(model(sharding), 1) == []


@pytest.mark.parametrize(
    ("sharding", "held", "looked_up"),
    [
        ("replicated", [ROWS] * 4, [4] * 4),
        ("data_parallel", [ROWS] * 4, [1] * 4),
        ("table_wise", [0, 0, ROWS, 0], [0, 0, 4, 0]),
        ("row_wise", [ROWS / 4] * 4, [1] * 4),
        ("column_wise", [ROWS / 2] * 2 + [0] * 2, [2] * 2 + [0] * 2),
    ],
)
def test_ranks_hold_and_look_up_their_parts(sharding: str, held: list[float], looked_up: list[float]) -> None:
    """``held`` in whole rows; ``looked_up`` relative to the ids of one rank."""
    adam = memory_of_ranks(model(sharding, sparse_optimizer="adam"), RANKS, 0.5)
    assert [each.device["tables"] for each in adam] == [4 * COLUMNS * rows for rows in held]
    assert [each.device["table states"] for each in adam] == [8 * COLUMNS * rows for rows in held]
    assert {each.device["reserve"] for each in adam} == {GIB // 2}
    rowwise = memory_of_ranks(model(sharding), RANKS, 0)
    rows_of = {"column_wise": [ROWS] * 2 + [0] * 2}.get(sharding, held)
    assert [each.device["table states"] for each in rowwise] == [4 * rows for rows in rows_of]
    assert row_traffic(model(sharding), RANKS) == [12 * 3 * BATCH * times for times in looked_up]


def test_the_dense_part_and_the_exchange_take_what_their_tensors_do() -> None:
    memory = memory_of_ranks(model("table_wise"), RANKS, 0)
    # float32 master, bf16 copy, two states, bf16 gradient, float32 buffer; a row's activations in bf16.
    assert memory[0].device["dense"] == 100 * (4 + 2 + 8 + 2 + 4)
    assert memory[0].device["activations"] == 50 * BATCH * 2
    assert memory_of_ranks(model(parts=2), RANKS, 0)[0].device["activations"] == 50 * BATCH
    received = 2 * (BATCH * COLUMNS * 2 + IDS + POOLED)
    assert [each.device["exchange"] - received for each in memory] == [0, 0, 2 * 4 * POOLED, 0]


def test_rows_in_host_memory_leave_the_device() -> None:
    whole = 4 * ROWS * COLUMNS
    (uvm,) = memory_of_ranks(replace(model("replicated"), tables=[only_rank("fused_uvm")]), 1, 0)
    assert (uvm.device["tables"], uvm.host) == (0, whole + 4 * ROWS)
    (cached,) = memory_of_ranks(replace(model("replicated"), tables=[only_rank("fused_uvm_caching")]), 1, 0)
    assert (cached.device["tables"], cached.host) == (whole / 5, whole + 4 * ROWS)
    half = replace(only_rank("fused_uvm_caching"), cache_share=0.5)
    assert memory_of_ranks(replace(model("replicated"), tables=[half]), 1, 0)[0].device["tables"] == whole / 2
    plan = CapacityPlan(Cluster(1, host_gib=1e-6), replace(model("replicated"), tables=[only_rank("fused_uvm")]), 0)
    assert "host memory: a node needs" in str(plan.problem())
    assert "over PCIe" in "\n".join(sentences(plan))


def only_rank(kernel: str) -> TableDemand:
    return TableDemand("a", TablePlan(ROWS, COLUMNS, "replicated", kernel, (PLACES["replicated"][0],)), 1.0)


def test_early_reductions_run_beside_what_is_still_to_come() -> None:
    own, joint = ready_at(model()), ready_at(model(joint=True))
    assert own == pytest.approx({"one": 0.25, "two": 0.5, "over_arch": 1.0})
    # Both forwards come first, a third of half the work; then a backward is two thirds of a quarter.
    assert joint == pytest.approx({"one": 1 / 3, "two": 0.5, "over_arch": 1.0})
    one_backward = tuple(replace(block, early=False) for block in BLOCKS)
    assert set(ready_at(model(blocks=one_backward)).values()) == {1.0}
    ddp = ready_at(model(blocks=one_backward, reduction="ddp"))
    assert ddp == pytest.approx({"over_arch": 2 / 3, "one": 5 / 6, "two": 1.0})
    assert [*ddp] == ["over_arch", "one", "two"], "the over-arch's gradients are there first"


@pytest.mark.parametrize(
    ("durations", "exposed"),
    [
        ((1.0, 1.0, 2.0), 2.0),  # the over-arch's is ready at the end
        ((6.0, 2.0, 1.0), 1.5),  # 2.5 + 6 + 2 is past the end, at 10.5, and the last waits for it
        ((0.0, 0.0, 0.0), 0.0),
    ],
)
def test_reductions_wait_for_gradients_and_for_each_other(durations: tuple[float, ...], exposed: float) -> None:
    ready = {"one": 0.25, "two": 0.5, "over_arch": 1.0}
    assert exposed_ms([*zip(ready, durations, strict=True)], ready, 10.0) == exposed
    assert exposed_ms([*zip(ready, durations, strict=True)], dict.fromkeys(ready, 1.0), 10.0) == sum(durations)


def test_a_step_is_the_sum_of_its_terms() -> None:
    cluster = Cluster(RANKS, 1, link_bytes_per_s=1e6, latency_us=0, flops_per_s=1e12, memory_bytes_per_s=1e9)
    time = step_time(model("table_wise"), cluster)
    pace = PACES["early"]
    busiest = 4 * 3 * BATCH * 12
    assert time.compute_ms == pytest.approx(pace.fixed_ms + pace.flops * 1.0 + pace.bytes * (1e6 + busiest) / 1e6)
    assert time.exchange_ms == pytest.approx(1e3 * 4 * POOLED * 0.75 / 1e6)
    assert time.gradient_ms == pytest.approx(1e3 * (IDS + LENGTHS + POOLED) * 0.75 / 1e6)
    assert time.reduction_ms == pytest.approx(1e3 * 12000 * 1.5 / 1e6)
    assert time.step_ms == pytest.approx(sum(time.terms().values()))
    assert time.longest_ms == pytest.approx(time.step_ms + time.reduction_ms - time.exposed_ms)
    plan = CapacityPlan(cluster, model("table_wise", cuda_graph="dense"), 0, rows_per_day=10**6)
    assert plan.rows_per_s == pytest.approx(1e3 * RANKS * BATCH / time.step_ms)
    assert "the part of spread tables is launched kernel by kernel" in "\n".join(sentences(plan))
    assert "kernel by kernel" not in "\n".join(sentences(replace(plan, model=model("table_wise"))))
    assert {row[0] for row in tables(plan)[2].rows} >= {"tables.exchange", "one", "over_arch"}
    slow = replace(plan, rows_per_day=10**12)
    assert "speed:" in str(slow.problem())
    assert plan.problem() is None


def test_ranks_that_would_be_enough() -> None:
    cluster, asked = Cluster(8, hbm_gib=1.0), model("replicated", sparse_optimizer="adagrad")
    nowhere = TablePlan(2**26, COLUMNS, "nowhere", "none", ())  # 4 GiB, and as much of state
    large = replace(asked.tables[0], plan=nowhere)
    # 0.425 GiB of weights a rank: half of 1 GiB less what the planner keeps.
    assert ranks_that_hold(replace(asked, tables=[large]), cluster, 0) == 10
    assert ranks_that_hold(replace(asked, tables=[large]), cluster, reserve_gib=1.0) is None
    grown = [Cluster(*shape).grown_to(ranks) for shape, ranks in (((1, 1), 5), ((8, 1), 10), ((32, 2), 33))]
    assert [(each.ranks, each.nodes) for each in grown] == [(5, 1), (16, 2), (48, 3)]


def test_paces_are_what_the_measured_steps_say() -> None:
    """Least squares of relative errors over captured steps that were alone on one H200; none is 15 % off."""
    several = json.loads((RESULTS / "table1-h200-x2" / "speed.json").read_text())
    rows = json.loads((RESULTS / "h200-step.json").read_text())
    rows += [row for part in several["parts"] for row in part["found"].get("rows", [])]
    alone = [row for row in rows if row.get("commit", ALONE).startswith(ALONE)]
    measured = [row for row in alone if row["ranks"] == 1 and row["refused"] is None and row["repeats"] is None]
    families = {
        "early": lambda row: row["arm"] in {"early_graph_joint", "early_narrow", "early_medium", "early_wide"},
        "exact": lambda row: row["arm"] == "exact_streams_graph",
    }
    for family, belongs in families.items():
        chosen = [row for row in measured if belongs(row)]
        took = np.array([row["step_ms_p50"] for row in chosen])
        terms = np.array([[1.0, row["floor"]["flops_ms"], row["floor"]["bytes_ms"]] for row in chosen])
        fitted, *_ = np.linalg.lstsq(terms / took[:, None], np.ones_like(took), rcond=None)
        pace = PACES[family]
        assert [pace.fixed_ms, pace.flops, pace.bytes] == pytest.approx(fitted, rel=0.01)
        assert np.abs(terms @ fitted / took - 1).max() < 0.15
