"""Tables spread over the ranks through TorchRec: ids go to the ranks that hold their rows, pooled rows come back.

One ShardedEmbeddingBagCollection, without DistributedDataParallel around it: towers and over-arch keep this project's
reductions. A training step runs TorchRec's collectives at two places, the same on every rank: ``tables.exchange`` in
the lookup (pooled rows), before any reduction of dense gradients, and ``tables.gradient`` in the update. Ids are sent
before, in the lookup or, of a batch that is expected, in the step before (:mod:`models.embeddings.sent_ids`). In
evaluation there are ids and rows alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from erase_rec.data_stream import DataStream, InPlace
from erase_rec.distributed.shards import Shard, Shards
from erase_rec.distributed.table_plan import ShardingPlan
from erase_rec.distributed.world import World
from models.embeddings.layout import Table, TableModule, without_padding
from models.embeddings.sent_ids import INPUT, Ids, SentIds
from models.embeddings.sharding_plan import Parameters, make_sharder

if TYPE_CHECKING:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

EXCHANGE, GRADIENT = "tables.exchange", "tables.gradient"
"""Groups of the log of collectives."""


def collection_of(tables: Sequence[Table], keys: Sequence[str], *, weighted: bool) -> EmbeddingBagCollection:
    """TorchRec's description of ``tables``, without memory for them."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=key, feature_names=[key])
        for key, table in zip(keys, tables, strict=True)
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))


class ExchangedTables(TableModule):
    """Implements :class:`erase_rec.protocols.Embeddings` on several ranks; dims are multiples of 4, Adam needs CUDA.

    Every rank has as many rows in a training step; in evaluation ranks may have different numbers, or none
    (:meth:`idle`). Forward and update run collectives and synchronise the host: ranks tell each other how many ids they
    exchange. On CUDA the host waits for the device's main stream in a lookup whose batch was not expected; ids of one
    that was are checked and sent on a stream of their own, and the host waits for that alone. TorchRec divides
    gradients by the number of ranks, so that the mean over a rank's rows becomes the mean over all.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        keys: Sequence[str],
        optimizer: SparseOptimizerConfig,
        plan: ShardingPlan,
        parameters: Parameters,
        world: World,
        *,
        seed: int,
        device: torch.device,
        weighted: bool,
        data_stream: DataStream,
        pooled_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Builds this rank's parts with their initial weights; collective.

        Args:
            tables: one a feature.
            keys: their names in ``parameters``.
            optimizer: kind, first learning rate and constants.
            plan: of the same tables, equal on every rank.
            parameters: the plan as TorchRec takes it.
            world: the ranks.
            seed: of the initial weights, which do not depend on the plan.
            device: where parts live.
            weighted: ids may have weights.
            data_stream: where the ids of a batch that is expected are sent.
            pooled_dtype: of the pooled embeddings, which are summed in float32.
        """
        import torch.distributed as dist
        from torchrec.distributed.types import ShardingEnv

        # torchrec 1.8.0 calls what torch 2.13.0 renamed.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # torchrec 1.6.1 asks for the one device of the group, which is for two: gloo carries what lies on the host.
        several = r"`_get_pg_default_device` will be deprecated|Multiple backends are registered"
        warnings.filterwarnings("ignore", several, UserWarning)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # torchrec asks torch.fx in its old way
        super().__init__(tables, optimizer)
        self._keys, self._world, self._plan = list(keys), world, plan
        self._weighted = weighted or self._any_mean
        self._pooled_dtype = pooled_dtype
        self._pending: tuple[Tensor, Tensor] | None = None
        self._data_stream = data_stream
        self._expected: list[SentIds] = []
        self._row_wise_state = optimizer.kind == "rowwise_adagrad"
        self.to(device)
        self._first_outside = torch.full((2,), -1, dtype=torch.int64, device=device)
        collection = collection_of(tables, keys, weighted=self._weighted)
        group = dist.group.WORLD
        assert group is not None
        self.collection = make_sharder(_fused_params(optimizer)).shard(
            collection, {key: parameters[key] for key in keys}, ShardingEnv.from_process_group(group), device
        )
        self._kernels, self._weights, self._states = self._find_parts()
        for table in tables:
            self._draw(table, seed)

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`.

        Raises:
            IdRangeError: an id is outside its table; on the CPU. On CUDA :meth:`verify` says so.
        """
        sent = self._sent(sparse)
        self._refuse_outside(sent)
        if self._iteration is not None:
            for kernel in self._kernels:
                # FBGEMM counts forwards, evaluation's too, and gives Adam the count of this forward plus 1.
                kernel.iter_cpu.copy_(self._iteration)
                kernel.iter.fill_(int(self._iteration))
        summed = self._exchange(sent)
        pooled = summed.to(self._pooled_dtype)
        if torch.is_grad_enabled():
            self._pending = (pooled, summed)
            for following in self._expected:
                following.announce()
        return pooled

    def expect(self, batch: Batch | None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        if batch is not None:
            self._expected.append(self._to_send(batch.sparse, self._data_stream, batch.arrived))
            return
        for abandoned in self._expected:
            abandoned.send()
            abandoned.receive()
        self._expected.clear()

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; ``pooled`` is what the last training forward returned."""
        assert self._pending is not None
        assert self._pending[0] is pooled
        (_, summed), self._pending = self._pending, None
        for following in self._expected:
            following.send()
        with self._world.lent(GRADIENT):
            torch.autograd.backward(summed, gradient.float())
        self._world.collectives.sent(GRADIENT, gradient.numel() * torch.float32.itemsize)
        if self._iteration is not None:
            self._iteration += 1

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; FBGEMM updates with the rate that was set before its forward."""
        self._lr = lr
        for kernel in self._kernels:
            kernel.set_learning_rate(lr)

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return "ranks tell each other through their hosts how many ids they exchange"

    def idle(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; collective."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.table_rows.device)
        weights = nothing.float() if self._weighted else None
        with torch.no_grad():
            nobody = SparseBatch(nothing, nothing.int(), weights, len(self._tables))
            self._exchange(self._to_send(nobody, InPlace(), None))

    def verify(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; of the ids that this rank looked up."""
        feature, bad_id = self._first_outside.tolist()
        if feature >= 0:
            self._refuse(feature, bad_id)

    def tables(self) -> Mapping[str, Shards]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for kernel in self._kernels:
            kernel.flush()  # rows of a cache go back to the memory that the weights are views of
        return {
            table.name: Shards((table.rows, table.dim), torch.float32, self._weights[table.name])
            for table in self._tables
        }

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        super().load_optimizer_state(state)
        for kernel in self._kernels:
            kernel.reset_cache_states()  # of rows that were loaded since

    def _table_states(self) -> Sequence[Sequence[Shards]]:
        return [
            [
                Shards(
                    (table.rows,) if self._row_wise_state else (table.rows, table.dim),
                    torch.float32,
                    self._states[table.name][number],
                )
                for number in range(len(self._state_names))
            ]
            for table in self._tables
        ]

    def _sent(self, sparse: SparseBatch) -> SentIds:
        """The ids of ``sparse``, which are under way where they were expected."""
        for position, expected in enumerate(self._expected):
            if expected.sparse is sparse and torch.is_grad_enabled():
                return self._expected.pop(position)
        return self._to_send(sparse, InPlace(), None)

    def _to_send(self, sparse: SparseBatch, stream: DataStream, arrived: Any) -> SentIds:
        return SentIds(
            sparse,
            collection=self.collection,
            make=self._checked,
            world=self._world,
            stream=stream,
            arrived=arrived,
        )

    def _refuse_outside(self, sent: SentIds) -> None:
        """Refuses an id outside its table; on CUDA, where that would stop the host, leaves it to :meth:`verify`."""
        outside = sent.ids().outside
        if not outside.is_cuda and int(outside[0]) >= 0:
            self._refuse(*outside.tolist())

    def _checked(self, sparse: SparseBatch) -> Ids:
        """``sparse`` as TorchRec takes it, its ids inside their tables: another would go to a rank that is none."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        sparse = without_padding(sparse)
        counts, device = sparse.ids_of_features(), sparse.values.device
        values, outside = sparse.values, torch.full((2,), -1, dtype=torch.int64, device=device)
        if sum(counts):
            features = torch.arange(len(self._tables), device=device)
            ids_F = sparse.lengths.reshape(len(self._tables), -1).sum(dim=1)
            feature_V = features.repeat_interleave(ids_F, output_size=sum(counts))
            bad = (values < 0) | (values >= self.table_rows[feature_V])
            at = bad.to(torch.int8).argmax()
            outside = torch.where(bad.any(), torch.stack([feature_V[at], values[at]]), outside)
            values = values.masked_fill(bad, 0)
        weights = self.bag_weights(sparse, torch.float32)
        if weights is None and self._weighted:
            weights = torch.ones_like(values, dtype=torch.float32)
        rows = sparse.lengths.numel() // len(self._tables)
        features = KeyedJaggedTensor(
            self._keys, values, weights=weights, lengths=sparse.lengths.int(), stride=rows, length_per_key=counts
        )
        return Ids(features, outside, rows, counts)

    def _exchange(self, sent: SentIds) -> Tensor:
        """Pooled rows [B, E] of this rank's ids, float32."""
        sent.send()
        with self._world.lent(EXCHANGE):
            context, received = sent.receive()
            pooled = self.collection.compute_and_output_dist(context, received).wait()
        ids = sent.ids()
        if ids.outside.is_cuda:
            self._first_outside = torch.where(self._first_outside[0] < 0, ids.outside, self._first_outside)
        if torch.is_grad_enabled():
            self._count(ids)
        return self._in_feature_order(pooled)

    def _in_feature_order(self, pooled: Any) -> Tensor:
        """Columns feature by feature: TorchRec has them by the rank that they come from."""
        values: Tensor = pooled.values()
        if list(pooled.keys()) == self._keys:
            return values
        columns = dict(zip(pooled.keys(), torch.split(values, pooled.length_per_key(), dim=1), strict=True))
        return torch.cat([columns[key] for key in self._keys], dim=1)

    def _find_parts(self) -> tuple[list[Any], dict[str, list[Shard]], dict[str, list[list[Shard]]]]:
        """FBGEMM's kernels, and by table this rank's parts of the weight and of each optimizer state; views."""
        names = {key: table.name for key, table in zip(self._keys, self._tables, strict=True)}
        kernels: list[Any] = []
        weights: dict[str, list[Shard]] = {table.name: [] for table in self._tables}
        states: dict[str, list[list[Shard]]] = {table.name: [[] for _ in self._state_names] for table in self._tables}
        for module in (module for lookup in self.collection._lookups for module in lookup._emb_modules):
            kernel = module.emb_module
            kernels.append(kernel)
            held = kernel.split_optimizer_states() if self._state_names else [()] * len(module.config.embedding_tables)
            for part, weight, values in zip(
                module.config.embedding_tables, kernel.split_embedding_weights(), held, strict=True
            ):
                name, offsets = names[part.name], tuple(part.local_metadata.shard_offsets)
                weights[name].append(Shard(offsets, weight))
                for of_state, value in zip(states[name], values, strict=True):
                    of_state.append(Shard(offsets[: value.dim()], value))
        return kernels, weights, states

    def _draw(self, table: Table, seed: int) -> None:
        """Writes the initial weight of this rank's parts."""
        parts = [part for part in self._weights[table.name] if part.tensor.numel()]

        def write(start: int, rows: Tensor) -> None:
            for part in parts:
                row, column = part.offsets
                low, high = max(start, row), min(start + len(rows), row + len(part.tensor))
                if low < high:
                    cells = rows[low - start : high - start, column : column + part.tensor.shape[1]]
                    part.tensor[low - row : high - row].copy_(cells)

        if parts:
            table.draw(seed, write)

    def _count(self, ids: Ids) -> None:
        """Counts the bytes that this rank gave to the exchange of a training step.

        Left out are the numbers by which ranks announce what they send: some dozens of bytes a rank.
        """
        ranks, id_bytes = self._world.size, 8 + (4 if self._weighted else 0)
        sent = pooled = 0
        for table, count in zip(self._tables, ids.counts, strict=True):
            plan = self._plan.tables[table.name]
            by_row = plan.sharding == "row_wise"
            # Ids of rows go to the rank of their row, and ids of columns to each part, with the bags' lengths.
            copies, lengths = (1, ranks) if by_row else (len(plan.places), len(plan.places))
            sent += copies * count * id_bytes + lengths * ids.rows * 4
            own = [place for place in plan.places if place.rank == self._world.rank]
            # Sums over the own rows, of which some are none, go to every rank; columns to every rank, too.
            columns = table.dim if by_row else sum(place.columns[1] - place.columns[0] for place in own)
            pooled += ranks * ids.rows * columns * torch.float32.itemsize
        self._world.collectives.sent(INPUT, sent)
        self._world.collectives.sent(EXCHANGE, pooled)


def _fused_params(config: SparseOptimizerConfig) -> dict[str, Any]:
    """What TorchRec hands to FBGEMM's kernels."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

    kinds = {
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "adam": EmbOptimType.ADAM,
        "sgd": EmbOptimType.EXACT_SGD,
    }
    params: dict[str, Any] = {
        "optimizer": kinds[config.kind],
        "learning_rate": config.lr,
        "bounds_check_mode": BoundsCheckMode.NONE,  # ids are checked before they are sent
    }
    if config.kind != "sgd":
        params["eps"] = config.eps
    if config.kind == "adam":
        params |= {"beta1": config.beta1, "beta2": config.beta2}
    return params
