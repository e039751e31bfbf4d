"""The plan of a training as a whole: what it takes, the limit that is hit first, and what would be enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from erase_rec.capacity.cluster import Cluster
from erase_rec.capacity.demand import FLOAT_BYTES, ModelDemand
from erase_rec.capacity.memory import GIB, RankMemory, memory_of_ranks, part_bytes
from erase_rec.capacity.step_time import StepTime, step_time
from erase_rec.capacity.traffic import Transfer
from erase_rec.distributed.table_plan import Place, TablePlan

DAY_S = 86_400
PLANNER_KEEPS = 0.15
"""Share of the memory that it is told of which TorchRec's planner leaves free."""


@dataclass(frozen=True)
class CapacityPlan:
    """A model on a cluster.

    Attributes:
        cluster: the machines.
        model: what is asked for.
        reserve_gib: of each GPU, for what is not counted.
        rows_per_day: that have to be trained on; None: not said.
    """

    cluster: Cluster
    model: ModelDemand
    reserve_gib: float
    rows_per_day: int | None = None

    @cached_property
    def memory(self) -> Sequence[RankMemory]:
        """By rank."""
        return memory_of_ranks(self.model, self.cluster.ranks, self.reserve_gib)

    @cached_property
    def time(self) -> StepTime:
        """Of a step."""
        return step_time(self.model, self.cluster)

    @property
    def fullest(self) -> RankMemory:
        """The rank that holds most on its GPU."""
        return max(self.memory, key=lambda each: each.gib)

    @property
    def host_gib(self) -> float:
        """Tables in the memory of the node that holds most of them."""
        size = self.cluster.local_ranks
        nodes = (self.memory[start : start + size] for start in range(0, self.cluster.ranks, size))
        return max(sum(each.host for each in node) for node in nodes) / GIB

    @property
    def rows_per_s(self) -> float:
        """Rows of all ranks."""
        return 1e3 * self.model.rows * self.cluster.ranks / self.time.step_ms

    @property
    def hours_a_day(self) -> float | None:
        """Hours that a day's rows take; None: not said how many there are."""
        return None if self.rows_per_day is None else self.rows_per_day / self.rows_per_s / 3600

    @property
    def too_slow(self) -> bool:
        """A day's rows take more than a day."""
        return self.hours_a_day is not None and self.hours_a_day > 24

    def problem(self) -> str | None:
        """Which limit does not hold, and by how much; None: all do."""
        fullest, limit = self.fullest, self.cluster.hbm_gib
        if fullest.gib > limit:
            parts = ", ".join(f"{name} {count / GIB:,.1f}" for name, count in fullest.device.items() if count)
            return (
                f"GPU memory: rank {fullest.rank} needs {fullest.gib:,.1f} GiB ({parts}) of {limit:,.1f}, "
                f"{fullest.gib - limit:,.1f} GiB too much"
            )
        if self.host_gib > self.cluster.host_gib:
            return (
                f"host memory: a node needs {self.host_gib:,.1f} GiB for tables of {self.cluster.host_gib:,.1f}, "
                f"{self.host_gib - self.cluster.host_gib:,.1f} GiB too much"
            )
        if self.too_slow and self.rows_per_day is not None:
            wanted = self.rows_per_day / DAY_S
            return (
                f"speed: {self.rows_per_s:,.0f} rows/s are expected and {wanted:,.0f} come, "
                f"a day's rows take {self.hours_a_day:,.1f} hours"
            )
        return None

    def first_limit(self) -> str:
        """What is used up soonest: the fullest memory, or what most of a step goes to."""
        name, ms = max(self._resources().items(), key=lambda entry: entry[1])
        used = self.fullest.gib / self.cluster.hbm_gib
        share = ms / self.time.step_ms
        return (
            f"memory is {100 * used:.0f} % full on rank {self.fullest.rank}; "
            f"of the step's time {100 * share:.0f} % go to {name}"
        )

    def _resources(self) -> dict[str, float]:
        """Milliseconds of a step by what they wait for."""
        network = "the network between nodes" if self.cluster.nodes > 1 else "links between GPUs"
        time = self.time
        return {
            "compute on the GPU": time.compute_ms,
            network: time.exchange_ms + time.gradient_ms + time.exposed_ms,
        }

    def bytes_by_group(self) -> dict[str, dict[str, float]]:
        """Of each group of collectives, in a step: bytes that the busiest rank gives, and passes on; milliseconds."""
        found: dict[str, dict[str, float]] = {}
        for each in self.time.transfers:
            most = max(each.given)
            row = found.setdefault(_group(each), {"given": 0, "passed_on": 0, "over_network": 0, "ms": 0, "count": 0})
            row["given"] += most
            row["passed_on"] += self.cluster.passed_on(each.kind, most)
            row["over_network"] += self.cluster.over_network(each.kind, most)
            row["ms"] += each.ms(self.cluster)
            row["count"] += 1
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything, in units that the keys name."""
        time = self.time
        return {
            "cluster": asdict(self.cluster),
            "parameters": {"tables": self.table_parameters(), "dense": self.model.parameters},
            "tables": {table.name: _placed(table.plan) for table in self.model.tables},
            "memory_bytes": [{"rank": each.rank, **each.device, "host": each.host} for each in self.memory],
            "collectives": self.bytes_by_group(),
            "step": {
                "rows": self.model.rows * self.cluster.ranks,
                "ms": time.step_ms,
                "ms_if_nothing_is_hidden": time.longest_ms,
                "terms_ms": time.terms(),
                "flops_ms": time.flops_ms,
                "bytes_ms": time.bytes_ms,
                "reduction_ms": time.reduction_ms,
                "hidden_reduction_ms": time.hidden_ms,
                "cuda_graph": self.model.cuda_graph,
            },
            "rows_per_s": self.rows_per_s,
            "hours_a_day": self.hours_a_day,
            "first_limit": self.first_limit(),
            "problem": self.problem(),
        }

    def table_parameters(self) -> int:
        """Weights of all tables."""
        return sum(table.plan.rows * table.plan.dim for table in self.model.tables)


def room_for_tables(model: ModelDemand, cluster: Cluster, reserve_gib: float) -> int:
    """Bytes of table weights that a GPU can take beside everything whose size no plan changes; may be negative.

    Args:
        model: its tables need no places.
        cluster: the machines.
        reserve_gib: see :class:`CapacityPlan`.
    """
    beside = memory_of_ranks(model, 1, reserve_gib)[0]
    tables = beside.device["tables"] + beside.device["table states"]
    room = cluster.hbm_gib * GIB - (sum(beside.device.values()) - tables)
    return round(room / state_factor(model))


def state_factor(model: ModelDemand) -> float:
    """Bytes of a table with its optimizer state over those of its weights, of the table where that is most."""
    factors = []
    for table in model.tables:
        weight, state = part_bytes(Place(0, (0, 1), (0, table.plan.dim)), model.sparse_optimizer)
        factors.append(1 + state / weight)
    return max(factors)


def ranks_that_hold(model: ModelDemand, cluster: Cluster, reserve_gib: float) -> int | None:
    """The fewest ranks whose memory would hold spread tables; None: however many there are, one has no room."""
    room = room_for_tables(model, cluster, reserve_gib) * (1 - PLANNER_KEEPS)
    if room <= 0:
        return None
    return math.ceil(weights_bytes(model) / room)


def weights_bytes(model: ModelDemand) -> int:
    """Float32 weights of all tables."""
    return FLOAT_BYTES * sum(table.plan.rows * table.plan.dim for table in model.tables)


def _group(transfer: Transfer) -> str:
    return transfer.group if transfer.group.startswith("tables.") else transfer.group.rpartition(".")[0]


def _placed(plan: TablePlan) -> Mapping[str, Any]:
    return {
        "rows": plan.rows,
        "dim": plan.dim,
        "sharding": plan.sharding,
        "kernel": plan.kernel,
        "places": [{"rank": each.rank, "rows": each.rows, "columns": each.columns} for each in plan.places],
    }
