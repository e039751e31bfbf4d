"""Chooses the embedding backend and builds the tables."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

import torch

from erase_rec.config.schema import Config
from erase_rec.data_stream import make_data_stream
from erase_rec.distributed.replicated_tables import ReplicatedTables
from erase_rec.distributed.table_plan import ShardingPlan
from erase_rec.distributed.world import World
from erase_rec.environment import triple_problem
from erase_rec.errors import ConfigError, UserError
from erase_rec.protocols import Embeddings
from models.embeddings.data_parallel import DataParallelTables
from models.embeddings.layout import Table, tables_of
from models.embeddings.mixed import MixedTables
from models.embeddings.own_kernels import own_kernels_apply
from models.embeddings.sharding_plan import DATA_PARALLEL, Parameters, key_of, plan_sharding
from models.embeddings.torch_backend import TorchEmbeddings


def choose_backend(config: Config, device: torch.device) -> tuple[str, str]:
    """The backend to use, ``torchrec`` or ``torch``, and why, in one line.

    Raises:
        UserError: ``embedding.backend: torchrec`` cannot be had.
    """
    wanted = config.embedding.backend
    if wanted == "torch":
        return "torch", "as configured"
    if wanted == "auto" and device.type == "cpu":
        return "torch", "the faster one on a CPU"
    problem = _torchrec_problem(config, device)
    if problem is None:
        return "torchrec", "as configured" if wanted == "torchrec" else "TorchRec and FBGEMM are here"
    if wanted == "torchrec":
        raise UserError(f"embedding.backend: torchrec: {problem}; or use embedding.backend=torch")
    return "torch", problem


def build_embeddings(
    config: Config, table_rows: Mapping[str, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Embeddings:
    """Builds the tables of ``config`` on ``device``; initial weights depend on neither device nor backend.

    Args:
        config: features, dimensions, backend and sparse optimizer.
        table_rows: rows of each feature's table.
        device: where they live.
        dtype: of the pooled embeddings: what the model computes in. Weights and optimizer state are float32.

    Raises:
        ConfigError: there are no sparse features.
        UserError: ``embedding.backend: torchrec`` cannot be had.
    """
    if not config.features.sparse:
        raise ConfigError(["features.sparse: a model needs at least 1 sparse feature, found none"])
    tables = tables_of(config, table_rows)
    backend, _ = choose_backend(config, device)
    if backend == "torch":
        return TorchEmbeddings(tables, config.optimizer.sparse, seed=config.seed, device=device, pooled_dtype=dtype)
    from models.embeddings.torchrec_backend import TorchRecEmbeddings

    return TorchRecEmbeddings(
        tables,
        config.optimizer.sparse,
        seed=config.seed,
        device=device,
        pooled_dtype=dtype,
        own_kernels=config.model.kernels == "auto" and own_kernels_apply(device, config.optimizer.sparse),
    )


def build_rank_embeddings(
    config: Config,
    table_rows: Mapping[str, int],
    device: torch.device,
    dtype: torch.dtype,
    world: World,
) -> tuple[Embeddings, ShardingPlan | None]:
    """The tables of one of several ranks, spread as ``embedding.sharding`` says, and the plan by which; collective.

    A process without a group has whole tables whatever the configuration says. See :func:`build_embeddings`.

    Raises:
        UserError: TorchRec cannot be had, or finds no plan.
    """
    if not world.grouped or config.embedding.sharding == "replicated":
        local = build_embeddings(config, table_rows, device, dtype)
        return (local if world.size == 1 else ReplicatedTables(local, world)), None
    if problem := _torchrec_problem(config, device):
        raise UserError(
            f"embedding.sharding: {config.embedding.sharding}: {problem}; or use embedding.sharding=replicated"
        )
    from models.embeddings.exchanged import collection_of

    tables = tables_of(config, table_rows)
    keys = [key_of(position) for position in range(len(tables))]
    weighted = any(feature.weights is not None for feature in config.features.sparse)
    collection = collection_of(tables, keys, weighted=weighted)
    plan, parameters = plan_sharding(config, tables, collection, world, device)
    return _spread(config, tables, plan, parameters, device, dtype, world, weighted=weighted), plan


def _spread(
    config: Config,
    tables: Sequence[Table],
    plan: ShardingPlan,
    parameters: Parameters,
    device: torch.device,
    dtype: torch.dtype,
    world: World,
    *,
    weighted: bool,
) -> Embeddings:
    """Copies of some tables and parts of the others."""
    from models.embeddings.exchanged import ExchangedTables

    optimizer, seed = config.optimizer.sparse, config.seed
    copied = [at for at, table in enumerate(tables) if plan.tables[table.name].sharding == DATA_PARALLEL]
    spread = [at for at in range(len(tables)) if at not in copied]
    backends: list[Embeddings] = []
    stream = make_data_stream(device)
    if spread:
        chosen, keys = [tables[at] for at in spread], [key_of(at) for at in spread]
        backends.append(
            ExchangedTables(
                chosen,
                keys,
                optimizer,
                plan,
                parameters,
                world,
                seed=seed,
                device=device,
                weighted=weighted,
                data_stream=stream,
                pooled_dtype=dtype,
            )
        )
    if copied:
        chosen = [tables[at] for at in copied]
        backends.append(DataParallelTables(chosen, optimizer, world, seed=seed, device=device, pooled_dtype=dtype))
    if len(backends) == 1:
        return backends[0]
    return MixedTables(backends, [spread, copied], stream)


def _torchrec_problem(config: Config, device: torch.device) -> str | None:
    """Why TorchRec cannot serve this configuration here; None when it can."""
    problem = triple_problem()
    if problem is not None:
        return problem
    if config.optimizer.sparse.kind == "adam" and device.type == "cpu":
        return "FBGEMM has no Adam on the CPU: use another optimizer.sparse.kind"
    dims = {feature.name: feature.embedding_dim or config.embedding.dim for feature in config.features.sparse}
    odd = [f"{dim} of feature {name!r}" for name, dim in dims.items() if dim % 4]
    if odd:
        return f"FBGEMM needs embedding dimensions that are multiples of 4, found {', '.join(odd[:3])}"
    try:
        importlib.import_module("torchrec.modules.fused_embedding_modules")
    except (ImportError, OSError) as error:
        return f"TorchRec does not import ({error})"
    return None
