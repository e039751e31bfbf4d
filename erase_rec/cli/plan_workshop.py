"""Joins engine and content for ``erase-rec plan``: what a model asks for, and where TorchRec's planner puts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from data.features.encoding import FIRST_ROW
from erase_rec.api.assembly import make_optimizer
from erase_rec.batch import Batch
from erase_rec.bench.batches import LONGEST_BAG, RandomRows
from erase_rec.bench.floor import (
    COUNTED_ROWS,
    Ceilings,
    Counted,
    NoTables,
    count,
    counting_config,
    floor,
    table_bytes,
)
from erase_rec.capacity.cluster import MOST_RANKS, Cluster
from erase_rec.capacity.demand import CACHE_SHARE, FLOAT_BYTES, BlockDemand, ModelDemand, TableDemand
from erase_rec.capacity.memory import GIB
from erase_rec.capacity.plan import PLANNER_KEEPS, CapacityPlan, ranks_that_hold, room_for_tables, weights_bytes
from erase_rec.cli.bench_workshop import feature_dims
from erase_rec.config.schema import Config, SparseFeatureConfig
from erase_rec.distributed.table_plan import Place, ShardingPlan, TablePlan
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.finite import FiniteGuard
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.plan import OVER_ARCH, Plan
from erase_rec.schedule.reduction.bucket import BucketReduction
from erase_rec.schedule.step import ScheduledStep
from erase_rec.schedule.streams import NullStreams
from models.ctr_model import CTRModel, build_local_losses, build_model
from models.embeddings.layout import Table, tables_of

MOST_TRIES = 4
"""Numbers of ranks that are tried where too few were asked for."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        config: checked; the device is a GPU whatever it says.
        tables: one a sparse feature.
        demand: of the model, whose tables lie nowhere yet.
        cluster: the machines.
        reserve_gib: of each GPU, for what is not counted.
        rows_per_day: that have to be trained on; None: not said.
    """

    config: Config
    tables: Sequence[Table]
    demand: ModelDemand
    cluster: Cluster
    reserve_gib: float
    rows_per_day: int | None


def plan_capacity(config: Config, cluster: Cluster, *, reserve_gib: float, rows_per_day: int | None) -> CapacityPlan:
    """What ``config`` takes on ``cluster``, see :class:`Question`. Builds the dense part on the CPU, and no table.

    Raises:
        UserError: a limit does not hold; says which, by how much, and what would be enough.
    """
    tables = tables_of(config, table_rows(config))
    asked = Question(config, tables, dense_demand(config, tables, cluster), cluster, reserve_gib, rows_per_day)
    found, problem = _placed(asked)
    if found is not None and problem is None:
        return found
    raise UserError(f"plan: {problem}; {_way_out(asked, found)}")


def table_rows(config: Config) -> dict[str, int]:
    """Rows of each feature's table, without a look at data.

    Raises:
        UserError: a vocabulary has no upper bound.
    """
    open_ended = [feature.name for feature in config.features.sparse if feature.num_embeddings is None]
    if open_ended:
        raise UserError(
            f"plan: how many categories {', '.join(map(repr, open_ended[:3]))} will have depends on data, which are "
            f"not read here; give features.sparse.{open_ended[0]}.num_embeddings"
        )
    return {
        feature.name: FIRST_ROW + feature.num_embeddings
        for feature in config.features.sparse
        if feature.num_embeddings is not None
    }


def dense_demand(config: Config, tables: Sequence[Table], cluster: Cluster) -> ModelDemand:
    """The demand of ``config``, with tables that lie nowhere yet."""
    dims, cpu = feature_dims(config), torch.device("cpu")
    counting, nothing = counting_config(config), NoTables(dims)
    model = build_model(counting, nothing, cpu)
    random = RandomRows.of(config, {table.name: table.rows for table in tables}, exponent=0, seed=config.seed)
    (few,), (many,) = (random.batches(size, 1, cpu) for size in (COUNTED_ROWS, config.train.local_batch_size))
    shares, counted = _forward_shares(model, few), _counted(counting, model, nothing, few)
    whole = floor(config, counted, many, dims, Ceilings(cluster.memory_bytes_per_s, cluster.flops_per_s))
    plan = Plan.from_config(config, cluster.ranks)
    cached = {entry.name: entry.cache_share for entry in config.embedding.tables}
    compute_bytes = 2 if config.train.precision == "bf16" else 4
    return ModelDemand(
        tables=[
            TableDemand(
                table.name,
                TablePlan(table.rows, table.dim, "nowhere", "none", ()),
                ids_of(feature),
                cached.get(table.name) or CACHE_SHARE,
            )
            for table, feature in zip(tables, config.features.sparse, strict=True)
        ],
        blocks=_blocks(config, model, plan, shares, compute_bytes),
        rows=config.train.local_batch_size,
        parts=config.train.micro_batches,
        compute_bytes=compute_bytes,
        sparse_optimizer=config.optimizer.sparse.kind,
        # The floor's bytes of it are read and written.
        dense_states=round(whole.parts["optimizer state"] / (2 * FLOAT_BYTES * max(1, counted.parameters))),
        parameters=counted.parameters,
        activations=counted.activations / COUNTED_ROWS,
        flops=whole.flops,
        dense_bytes=sum(count for name, count in whole.parts.items() if name != "table rows"),
        row_bytes=[table_bytes(config, [1], [dim]) for dim in dims],
        joint=any(tower.early and tower.loss is not None and tower.loss.target == "joint" for tower in plan.towers),
        reduction=plan.reduction or "bucket",
        weighted=any(feature.weights is not None for feature in config.features.sparse),
        single_valued=not any(feature.multi_valued for feature in config.features.sparse),
        cuda_graph=plan.cuda_graph,
    )


def ids_of(feature: SparseFeatureConfig) -> float:
    """Mean ids of a bag, as the benchmark's random rows have them: of 1 to ``max_length``, all lengths alike."""
    return (1 + (feature.max_length or LONGEST_BAG)) / 2 if feature.multi_valued else 1.0


def _counted(counting: Config, model: CTRModel, nothing: NoTables, batch: Batch) -> Counted:
    """One step of the plain form on the CPU, counted."""
    plan, cpu = Plan.from_config(counting), torch.device("cpu")
    blocks = trained_blocks(model, plan)
    gradients = GradientProgram(model, plan, build_local_losses(counting), NullStreams(), device=cpu)
    optimizer = make_optimizer(counting, model, plan, blocks, torch.float32)
    guard = FiniteGuard(lambda rows: [str(row) for row in rows.tolist()])
    step = ScheduledStep(gradients, optimizer, guard, counting.optimizer.dense.max_grad_norm)
    return count(step, model, nothing, batch)


def _forward_shares(model: CTRModel, batch: Batch) -> dict[str, float]:
    """Each block's share of the arithmetic of a forward; equal ones where there is no matrix product."""
    modules = {name: model.tower(name) for name in model.tower_names()} | {OVER_ARCH: model.over_arch}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.score(batch)
    names = {module: name for name, module in model.named_modules()}
    root = type(model).__name__
    flops = {
        block: sum(counter.get_flop_counts().get(f"{root}.{names[module]}", {}).values())
        for block, module in modules.items()
    }
    total = sum(flops.values())
    return {block: of / total if total else 1 / len(flops) for block, of in flops.items()}


def _blocks(
    config: Config, model: CTRModel, plan: Plan, shares: dict[str, float], compute_bytes: int
) -> list[BlockDemand]:
    """Towers in the order of launch, then the over-arch, with the buffers that their gradients are averaged in."""
    trained = trained_blocks(model, plan)
    if plan.reduction == "bucket" or plan.reduction is None:
        sizes = BucketReduction(trained, World(), chunk_mib=config.distributed.bucket_mib).sizes_bytes()
    else:
        sizes = {
            block: (compute_bytes * sum(each.numel() for each in named.values()),) for block, named in trained.items()
        }
    early = {tower.name: tower.early for tower in plan.towers}
    return [
        BlockDemand(name, early.get(name, False), shares[name], sizes.get(name, ()))
        for name in (*(tower.name for tower in plan.launched()), OVER_ARCH)
    ]


def _placed(asked: Question) -> tuple[CapacityPlan | None, str | None]:
    """The plan, as far as there is one, and what is wrong with it."""
    demand = asked.demand
    try:
        placement = place(asked)
    except UserError as error:
        return None, _lack(asked) or str(error)
    placed = [replace(table, plan=placement.tables[table.name]) for table in demand.tables]
    found = CapacityPlan(asked.cluster, replace(demand, tables=placed), asked.reserve_gib, asked.rows_per_day)
    return found, found.problem()


def place(asked: Question) -> ShardingPlan:
    """Where tables lie: whole on every rank, or as TorchRec's planner says.

    Raises:
        UserError: the planner finds no place.
    """
    config, tables, cluster = asked.config, asked.tables, asked.cluster
    ranks = cluster.ranks
    if ranks == 1 or config.embedding.sharding == "replicated":
        return ShardingPlan(ranks, {table.name: _whole(table, ranks) for table in tables})
    from models.embeddings.exchanged import collection_of
    from models.embeddings.sharding_plan import key_of, place_tables

    room = room_for_tables(asked.demand, cluster, asked.reserve_gib)
    if room <= 0:
        raise UserError("nothing is left for tables")
    machines = {
        "world_size": ranks,
        "local_world_size": cluster.local_ranks,
        "compute_device": "cuda",
        "hbm_cap": room,
        "ddr_cap": int(cluster.host_gib * GIB / cluster.local_ranks),
        # TorchRec takes bytes a millisecond.
        "hbm_mem_bw": cluster.memory_bytes_per_s / 1e3,
        "intra_host_bw": cluster.link_bytes_per_s / 1e3,
        "inter_host_bw": cluster.network_bytes_per_s / 1e3,
    }
    collection = collection_of(tables, [key_of(at) for at in range(len(tables))], weighted=asked.demand.weighted)
    return place_tables(config, tables, collection, machines)[0]


def _whole(table: Table, ranks: int) -> TablePlan:
    places = tuple(Place(rank, (0, table.rows), (0, table.dim)) for rank in range(ranks))
    return TablePlan(table.rows, table.dim, "replicated", "fused", places)


def _lack(asked: Question) -> str | None:
    """By how much tables spread evenly are too large; None: it is not their sum that is."""
    cluster, reserve = asked.cluster, asked.reserve_gib
    room = max(0.0, room_for_tables(asked.demand, cluster, reserve) * (1 - PLANNER_KEEPS) / GIB)
    share = weights_bytes(asked.demand) / cluster.ranks / GIB
    on_host = any(entry.kernel in {"fused_uvm", "fused_uvm_caching"} for entry in asked.config.embedding.tables)
    if share <= room or on_host:
        return None
    return (
        f"GPU memory: each of {cluster.ranks} ranks would hold {share:,.1f} GiB of table weights and has room for "
        f"{room:,.1f} of {cluster.hbm_gib:,.1f} GiB (dense part, activations, exchange and a reserve of {reserve:g} "
        f"GiB aside, and {100 * PLANNER_KEEPS:.0f} % that TorchRec's planner keeps free), "
        f"{share - room:,.1f} GiB too much"
    )


def _way_out(asked: Question, found: CapacityPlan | None) -> str:
    """Ranks that would be enough, or what else to change."""
    cluster = asked.cluster
    if found is not None and found.hours_a_day is not None and found.too_slow:
        enough: int | None = math.ceil(cluster.ranks * found.hours_a_day / 24)
    elif asked.config.embedding.sharding == "replicated":
        return "replicated tables do not shrink with more ranks: use embedding.sharding=auto"
    else:
        enough = ranks_that_hold(asked.demand, cluster, asked.reserve_gib)
    if enough is None:
        return "more ranks do not help: use a smaller train.local_batch_size, or GPUs with more memory"
    larger = cluster.grown_to(max(enough, cluster.ranks + 1))
    for _ in range(MOST_TRIES):
        if larger.ranks > MOST_RANKS:
            break
        plan, problem = _placed(replace(asked, cluster=larger))
        if plan is not None and problem is None:
            return f"--world-size {larger.ranks} is enough"
        larger = cluster.grown_to(math.ceil(1.5 * larger.ranks))
    return (
        f"none of the larger numbers tried, up to {MOST_RANKS} ranks, was enough: use other embedding.tables "
        "(row_wise, or fused_uvm_caching for rows in host memory), another embedding.dim or train.local_batch_size"
    )
