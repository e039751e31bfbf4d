"""TorchRec: DLRM and DLRM_DCN under DistributedModelParallel on one gloo rank, on encoded rows.

TorchRec has no trainer of its own, so the loop here is that of its examples: ``DLRMTrain`` on a ``KeyedJaggedTensor``,
Adagrad, row-wise or not, fused into the tables' backward, Adam for the dense layers. Its DLRM
wants numbers: a set without any gets a column of ones.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator

import absent  # noqa: F401 (stands in for what TorchRec imports)
import numpy as np
import torch
import torch.distributed as dist
from rows import Array, Fields, Part, Setting, Watch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

HIDDEN = [128, 64]
PREDICTED_ROWS = 8192
CPU = torch.device("cpu")
KINDS = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad}
MODELS = ("DLRM", "DLRM_DCN")


class Rows:
    """Batches as ``DLRMTrain`` takes them."""

    def __init__(self, part: Part, batch_size: int, *, shuffle: bool) -> None:
        """Keeps the columns side by side."""
        dense = part.dense if part.dense.shape[1] else np.ones((part.num_rows, 1), np.float32)
        self._dense, self._label = torch.from_numpy(dense), torch.from_numpy(part.label)
        self._ids = torch.from_numpy(part.ids.astype(np.int64))
        self._bags = {name: torch.from_numpy(ids.astype(np.int64)) for name, ids in part.bags.items()}
        self._batch_size, self._shuffle = batch_size, shuffle

    def batches(self, keys: list[str]) -> Iterator[Batch]:
        """One epoch."""
        count = len(self._label)
        order = torch.randperm(count) if self._shuffle else torch.arange(count)
        for rows in order.split(self._batch_size):
            yield Batch(self._dense[rows], self._features(rows, keys), self._label[rows])

    def _features(self, rows: Tensor, keys: list[str]) -> KeyedJaggedTensor:
        ids = self._ids[rows]
        values, lengths = [ids.t().reshape(-1)], [torch.ones(ids.numel(), dtype=torch.int32)]
        for padded in self._bags.values():
            bag = padded[rows]
            values.append(bag[bag > 0] - 1)
            lengths.append((bag > 0).sum(1, dtype=torch.int32))
        if not self._bags:
            return KeyedJaggedTensor(keys, values[0], lengths=lengths[0])
        return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))


def fused_plan(model: nn.Module, collection: EmbeddingBagCollection) -> ShardingPlan:
    """Each table whole, in the kernel with the fused optimizer: the planner would train small tables without it."""
    constraint = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    constraints = {table.name: constraint for table in collection.embedding_bag_configs()}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints)
    return planner.plan(DLRMTrain(model), [EmbeddingBagCollectionSharder()])


@functools.cache
def join_rank() -> None:
    """One rank over gloo, for the life of the process."""
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)


class Peer:
    """A model with its loop."""

    def __init__(self, name: str, fields: Fields, setting: Setting) -> None:
        """Builds ``name`` of :data:`MODELS`."""
        join_rank()
        torch.manual_seed(setting.seed)
        random.seed(setting.seed)
        bags = {column: rows for column, (rows, _) in fields.bags.items()}
        self._keys = [*fields.tables, *bags]
        self._batch_size, self._eval_every_steps = fields.batch_size, fields.eval_every_steps
        collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table_{column}",
                    embedding_dim=fields.dim,
                    num_embeddings=rows,
                    feature_names=[column],
                    pooling=PoolingType.MEAN if column in bags else PoolingType.SUM,
                )
                for column, rows in (fields.tables | bags).items()
            ],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(KINDS[setting.table_optimizer], collection.parameters(), {"lr": setting.table_lr})
        sizes = {
            "embedding_bag_collection": collection,
            "dense_in_features": max(1, len(fields.dense)),
            "dense_arch_layer_sizes": [32, fields.dim],
            "over_arch_layer_sizes": [*HIDDEN, 1],
            "dense_device": CPU,
        }
        model = DLRM(**sizes) if name == "DLRM" else DLRM_DCN(**sizes, dcn_num_layers=2, dcn_low_rank_dim=32)
        self.model: nn.Module = DistributedModelParallel(
            DLRMTrain(model), device=CPU, plan=fused_plan(model, collection)
        )
        dense = [p for key, p in self.model.named_parameters() if "embedding_bags" not in key]
        self._optimizer = torch.optim.Adam(dense, lr=setting.dense_lr)

    def rows(self, part: Part) -> Rows:
        """What :meth:`train` takes."""
        return Rows(part, self._batch_size, shuffle=True)

    def train(self, rows: Rows, epochs: int = 1, watch: Watch | None = None) -> None:
        """Trains on ``rows``; judged now and then by ``watch``."""
        steps = 0
        for _ in range(epochs):
            for batch in rows.batches(self._keys):
                self._step(batch)
                steps += 1
                if watch is not None and steps % self._eval_every_steps == 0 and watch.stops(self.scores):
                    return

    def _step(self, batch: Batch) -> None:
        self.model.train()
        self._optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self._optimizer.step()

    def scores(self, part: Part) -> Array:
        """Probabilities [R]."""
        self.model.eval()
        with torch.no_grad():
            batches = Rows(part, PREDICTED_ROWS, shuffle=False).batches(self._keys)
            found: Array = torch.cat([self.model(batch)[1][1].sigmoid() for batch in batches]).numpy()
        return found
