"""Which rank holds what of each table: TorchRec's planner under the configuration's constraints.

Sharding types, as TorchRec has them: ``table_wise`` (a rank holds the table), ``row_wise`` (each rank some rows),
``column_wise`` (ranks hold groups of columns), ``data_parallel`` (each rank holds a copy).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from erase_rec.config.schema import Config, TableShardingConfig
from erase_rec.distributed.table_plan import Place, ShardingPlan, TablePlan
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from models.embeddings.layout import Table

if TYPE_CHECKING:
    from torchrec.distributed.types import ParameterSharding
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

Parameters = Mapping[str, "ParameterSharding"]
"""By the table's key, see :func:`key_of`."""
DATA_PARALLEL = "data_parallel"
LARGEST_COPY_BYTES = 16 * 2**20
"""Float32 weights of the largest table that ``auto`` may copy to every rank."""
WORSE_PROPOSALS = 20
"""Proposals in a row that are no better, after which the planner stops: each costs a second on hundreds of ranks."""
SPREAD = ("table_wise", "row_wise", "column_wise")
"""Sharding types by which no rank holds a copy of the whole table, unless it is the only one."""


def key_of(position: int) -> str:
    """TorchRec's name of a feature and its table: it refuses some texts that features may have as names."""
    return f"f{position}"


def plan_sharding(
    config: Config, tables: Sequence[Table], collection: EmbeddingBagCollection, world: World, device: torch.device
) -> tuple[ShardingPlan, Parameters]:
    """Plans on the first rank and tells the others; collective.

    Args:
        config: ``embedding.sharding`` and ``embedding.tables``.
        tables: one a feature.
        collection: the same tables on the meta device, named by :func:`key_of`.
        world: several ranks.
        device: where tables live.

    Returns:
        The plan, and what TorchRec takes of it for the tables of which no rank holds a copy.

    Raises:
        UserError: no plan keeps the constraints and fits into memory.
    """
    found: tuple[ShardingPlan, Parameters] | str | None = None
    if world.is_first:
        try:
            found = _plan(config, tables, collection, world, device)
        except UserError as error:
            found = str(error)
    plan = world.broadcast_object("tables.plan", found)
    if plan is None or isinstance(plan, str):
        raise UserError(str(plan))
    return plan


def _plan(
    config: Config, tables: Sequence[Table], collection: EmbeddingBagCollection, world: World, device: torch.device
) -> tuple[ShardingPlan, Parameters]:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    here = {
        "world_size": world.size,
        "compute_device": device.type,
        "local_world_size": local_ranks,
        **_memory(device, local_ranks),
    }
    return place_tables(config, tables, collection, here)


def place_tables(
    config: Config, tables: Sequence[Table], collection: EmbeddingBagCollection, machines: Mapping[str, Any]
) -> tuple[ShardingPlan, Parameters]:
    """Asks TorchRec's planner for machines that need not be there; see :func:`plan_sharding`.

    Args:
        config: ``embedding.sharding`` and ``embedding.tables``.
        tables: one a feature.
        collection: the same tables on the meta device.
        machines: arguments of TorchRec's ``Topology``: ``world_size``, ``compute_device``, memory in bytes, bandwidths
            in bytes a millisecond.

    Raises:
        UserError: no plan keeps the constraints and fits into memory.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
    from torchrec.distributed.planner.types import PlannerError

    from models.embeddings.equal_shards import make_enumerator

    ranks, batch = machines["world_size"], config.train.local_batch_size
    with _quiet():
        topology = Topology(**machines)
        constraints = _constraints(config, tables, ranks, torch.device(machines["compute_device"]))
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch,
            enumerator=make_enumerator(topology, batch, constraints),
            proposer=[GreedyProposer(use_depth=False, threshold=WORSE_PROPOSALS), UniformProposer()],
            constraints=constraints,
        )
        try:
            parameters = planner.plan(collection, [make_sharder({})]).plan[""]
        except (PlannerError, RuntimeError) as error:
            raise UserError(
                f"embedding.sharding: TorchRec's planner finds no place for the tables on {ranks} ranks "
                f"({str(error).strip().splitlines()[0]}); ask less of embedding.tables, or use more ranks"
            ) from error
    named = {table.name: _table_plan(table, parameters[key_of(at)], ranks) for at, table in enumerate(tables)}
    spread = {key: value for key, value in parameters.items() if value.sharding_type != DATA_PARALLEL}
    return ShardingPlan(ranks, named), spread


def make_sharder(fused_params: dict[str, Any]) -> Any:
    """TorchRec's sharder, which also offers ``row_wise`` on the CPU: gloo has what it needs."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]  # torchrec has no types
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [DATA_PARALLEL, *SPREAD]

    return Sharder(fused_params=fused_params)


def _constraints(config: Config, tables: Sequence[Table], ranks: int, device: torch.device) -> dict[str, Any]:
    from torchrec.distributed.planner import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    entries = {entry.name: entry for entry in config.embedding.tables}
    constraints = {}
    for position, table in enumerate(tables):
        entry = entries.get(table.name, TableShardingConfig(name=table.name))
        sharding = entry.sharding or config.embedding.sharding
        types = _automatic(config, table) if sharding == "auto" else [sharding]
        if "row_wise" in types and _leaves_ranks_empty(table.rows, ranks):
            if entry.sharding == "row_wise":
                raise UserError(
                    f"embedding.tables.{table.name}.sharding: row_wise: {table.rows} rows leave some of {ranks} ranks "
                    "without any; use data_parallel"
                )
            types = [kind for kind in types if kind != "row_wise"] or [DATA_PARALLEL]
        if entry.kernel in {"fused_uvm", "fused_uvm_caching"} and device.type != "cuda":
            raise UserError(f"embedding.tables.{table.name}.kernel: {entry.kernel} needs CUDA; leave it out here")
        if entry.kernel is not None:
            types = [kind for kind in types if kind != DATA_PARALLEL]
        constraints[key_of(position)] = ParameterConstraints(
            sharding_types=types,
            compute_kernels=["dense", entry.kernel or "fused"],
            min_partition=entry.column_width,
            cache_params=None if entry.cache_share is None else CacheParams(load_factor=entry.cache_share),
        )
    return constraints


def _leaves_ranks_empty(rows: int, ranks: int) -> bool:
    """Whether ``row_wise`` gives some ranks no row: FBGEMM's CPU kernels then mix up the tables that come after."""
    block = -(-rows // ranks)
    return -(-rows // block) < ranks


def _automatic(config: Config, table: Table) -> list[str]:
    """What the planner may choose from: parts of a row must not have a learning rate of their own.

    Copies only of small tables, as each step averages them whole. That also spares the planner, which begins with what
    it takes for fastest, hundreds of proposals of copies that fit nowhere: minutes on hundreds of ranks.
    """
    whole_rows = config.optimizer.sparse.kind == "rowwise_adagrad"
    spread = [kind for kind in SPREAD if not (whole_rows and kind == "column_wise")]
    return [*spread, DATA_PARALLEL] if 4 * table.rows * table.dim <= LARGEST_COPY_BYTES else spread


def _memory(device: torch.device, local_ranks: int) -> dict[str, int]:
    """Bytes that a rank has: of its device, and of the machine's memory, which its ranks share."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_ranks
    if device.type != "cuda":
        return {"ddr_cap": host}
    return {"ddr_cap": host, "hbm_cap": torch.cuda.get_device_properties(device).total_memory}


def _table_plan(table: Table, parameter: ParameterSharding, ranks: int) -> TablePlan:
    if parameter.sharding_type == DATA_PARALLEL:
        places = [Place(rank, (0, table.rows), (0, table.dim)) for rank in range(ranks)]
        return TablePlan(table.rows, table.dim, DATA_PARALLEL, "torch", tuple(places))
    places = []
    for shard in parameter.sharding_spec.shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rows:
            rank = shard.placement.rank()
            places.append(Place(rank, (row, row + rows), (column, column + columns)))
    return TablePlan(table.rows, table.dim, parameter.sharding_type, parameter.compute_kernel, tuple(places))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the planner's remarks on how it was called, which a user can do nothing about."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
