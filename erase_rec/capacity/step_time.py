"""Expected time of a step, and what of its communication nothing hides.

Formula, in milliseconds::

    step    = exchange + compute + exposed reductions + table gradients
    compute = fixed + a * flops / (flops a second) + b * bytes / (bytes a second)

``fixed``, ``a`` and ``b`` are fitted to captured steps on one H200 (:data:`PACES`). ``flops`` and ``bytes`` are the
floor's (:mod:`erase_rec.bench.floor`), where the rows of tables are those that the busiest rank looks up.

All collectives of a step go through one communicator, one after the other. A reduction begins when its block's
gradients are there and the one before is done; what is under way when the last backward ends is exposed. When that is
depends on the schedule:

- early backward, ``bucket``: a tower's gradients are there after its own backward, so that they are reduced beside the
  backwards of later towers and beside the over-arch's forward and backward;
- one backward, ``bucket``: all gradients are there at its end, and nothing is hidden;
- one backward under DDP: block by block, the over-arch's first.

The exchange of pooled rows stands before all of it, and that of the tables' gradients, with the next batch's ids, after
it: towers need all rows, and the gradient of a row is the sum of all towers'. Blocks share the time of compute as their
forwards share the arithmetic, a backward taking twice its forward.

Not in it: the host. What is launched kernel by kernel (all of a step that is not captured, and the lookups and
exchanges of spread tables) may take longer than this says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from erase_rec.capacity.cluster import Cluster
from erase_rec.capacity.demand import ModelDemand, TableDemand
from erase_rec.capacity.traffic import SPREAD, Transfer, of_dense, of_tables

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a block's time: two of its three matrix products are the backward's."""


@dataclass(frozen=True)
class Pace:
    """What a step on one rank takes beside what it must.

    Attributes:
        fixed_ms: whatever the batch: the longest chain of kernels.
        flops: factor of the arithmetic at the device's rate.
        bytes: factor of the traffic at the device's bandwidth.
    """

    fixed_ms: float
    flops: float
    bytes: float

    def ms(self, flops_ms: float, bytes_ms: float) -> float:
        """Time of compute."""
        return self.fixed_ms + self.flops * flops_ms + self.bytes * bytes_ms


PACES: Mapping[str, Pace] = {"early": Pace(0.140, 0.77, 2.99), "exact": Pace(0.173, 1.36, 2.73)}
"""Least squares of relative errors over the captured steps on one H200 with a stream a tower, early and exact, of
docs/results/h200-step.json and docs/results/table1-h200-x2/speed.json: 512 to 4096 rows, six towers, 0.2 to 1.8 ms."""


@dataclass(frozen=True)
class StepTime:
    """A step, in milliseconds.

    Attributes:
        flops_ms: its arithmetic at the device's rate.
        bytes_ms: its traffic at the device's bandwidth, on the busiest rank.
        compute_ms: what both take.
        exchange_ms: pooled rows.
        gradient_ms: the tables' gradients and the next batch's ids.
        reduction_ms: of dense gradients, hidden or not.
        exposed_ms: part of ``reduction_ms`` that nothing hides.
        transfers: the collectives.
    """

    flops_ms: float
    bytes_ms: float
    compute_ms: float
    exchange_ms: float
    gradient_ms: float
    reduction_ms: float
    exposed_ms: float
    transfers: tuple[Transfer, ...]

    @property
    def step_ms(self) -> float:
        """All of it."""
        return self.exchange_ms + self.compute_ms + self.exposed_ms + self.gradient_ms

    @property
    def longest_ms(self) -> float:
        """The step, were no reduction hidden."""
        return self.step_ms + self.hidden_ms

    @property
    def hidden_ms(self) -> float:
        """Reductions that run beside compute."""
        return self.reduction_ms - self.exposed_ms

    def terms(self) -> dict[str, float]:
        """The summands of ``step_ms``."""
        return {
            "exchange of pooled rows": self.exchange_ms,
            "compute": self.compute_ms,
            "reductions that nothing hides": self.exposed_ms,
            "table gradients and ids": self.gradient_ms,
        }


def step_time(model: ModelDemand, cluster: Cluster) -> StepTime:
    """The expected time of a step of ``model`` on ``cluster``."""
    tables, dense = of_tables(model, cluster.ranks), of_dense(model, cluster.ranks)
    flops_ms = 1e3 * model.flops / cluster.flops_per_s
    busiest = max(row_traffic(model, cluster.ranks))
    bytes_ms = 1e3 * (model.dense_bytes + busiest) / cluster.memory_bytes_per_s
    compute_ms = PACES["early" if model.early else "exact"].ms(flops_ms, bytes_ms)
    before = [each for each in tables if _is_before(each)]
    reductions = [(block, transfer.ms(cluster)) for block, transfer in dense]
    return StepTime(
        flops_ms,
        bytes_ms,
        compute_ms,
        sum(each.ms(cluster) for each in before),
        sum(each.ms(cluster) for each in tables if not _is_before(each)),
        sum(ms for _, ms in reductions),
        exposed_ms(reductions, ready_at(model), compute_ms),
        (*tables, *(transfer for _, transfer in dense)),
    )


def row_traffic(model: ModelDemand, ranks: int) -> list[float]:
    """Memory traffic of the tables' rows in a step, by rank: lookups and updates of what it holds."""
    traffic = [0.0] * ranks
    for table, of_id in zip(model.tables, model.row_bytes, strict=True):
        for rank, ids in _ids_looked_up(table, ranks, model.rows * table.ids_per_row):
            traffic[rank] += ids * of_id
    return traffic


def _ids_looked_up(table: TableDemand, ranks: int, own: float) -> list[tuple[int, float]]:
    """Whole rows of a table that each rank that holds a part of it looks up, of ``own`` ids a rank."""
    plan = table.plan
    if plan.sharding not in SPREAD:
        ids = ranks * own if plan.sharding == "replicated" else own
        return [(rank, ids) for rank in range(ranks)]
    cells = plan.rows * plan.dim
    return [
        (
            place.rank,
            ranks * own * (place.rows[1] - place.rows[0]) * (place.columns[1] - place.columns[0]) / cells,
        )
        for place in plan.places
    ]


def ready_at(model: ModelDemand) -> dict[str, float]:
    """When each block's gradients are there, as a share of compute, in the order in which they are reduced."""
    towers, over = model.blocks[:-1], model.blocks[-1]
    if model.reduction == "bucket" and model.early:
        return _early_ready(model)
    if model.reduction == "bucket" or model.early:
        return {block.name: 1.0 for block in model.blocks}
    ready, at = {}, FORWARD
    for block in (over, *towers):
        at += BACKWARD * block.forward_share
        ready[block.name] = at
    return ready


def _early_ready(model: ModelDemand) -> dict[str, float]:
    """Early towers one after the other, then the over-arch, then the other towers' backwards."""
    towers, over = model.blocks[:-1], model.blocks[-1]
    ready: dict[str, float] = {}
    at = FORWARD * sum(tower.forward_share for tower in towers) if model.joint else 0.0
    for tower in towers:
        at += 0.0 if model.joint else FORWARD * tower.forward_share
        if tower.early:
            at += BACKWARD * tower.forward_share
            ready[tower.name] = at
    late = [tower.name for tower in towers if not tower.early]
    return ready | dict.fromkeys([*late, over.name], 1.0)


def exposed_ms(reductions: Sequence[tuple[str, float]], ready: Mapping[str, float], compute_ms: float) -> float:
    """Time from the end of compute to that of the last reduction; each waits for its gradients and the one before."""
    durations: dict[str, float] = {}
    for block, ms in reductions:
        durations[block] = durations.get(block, 0.0) + ms
    free_at = 0.0
    for block, share in ready.items():
        if block in durations:
            free_at = max(free_at, share * compute_ms) + durations[block]
    return max(0.0, free_at - compute_ms)


def _is_before(transfer: Transfer) -> bool:
    """Whether a table's collective stands before the towers; ids of spread tables are sent a step ahead, at its end."""
    return transfer.group in {"tables.exchange", "tables.ids", "tables.lengths", "tables.weights"}
