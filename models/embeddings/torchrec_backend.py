"""Embedding tables through TorchRec: one FusedEmbeddingBagCollection, its optimizer fused into FBGEMM's backward.

Every feature is looked up with sum pooling and ``mean`` is a weight of 1 / length: all tables share one kernel
whatever their pooling, and the kernel's output is in feature order (the collection joins its per-pooling kernels
in kernel order, which is not the order of its names when poolings alternate; torchrec 1.6 to 1.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import Table, bag_weights, check_ids

STATE_NAMES = {"rowwise_adagrad": ("sum",), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def _optimizer(config: SparseOptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    if config.kind == "sgd":
        return torch.optim.SGD, {"lr": config.lr}
    if config.kind == "adam":
        return torch.optim.Adam, {
            "lr": config.lr,
            "beta1": config.beta1,
            "beta2": config.beta2,
            "eps": config.eps,
        }
    return (RowWiseAdagrad if config.kind == "rowwise_adagrad" else torch.optim.Adagrad), {
        "lr": config.lr,
        "eps": config.eps,
    }


class TorchRecEmbeddings(nn.Module):
    """Implements :class:`erase_rec.protocols.Embeddings`."""

    def __init__(
        self, tables: Sequence[Table], optimizer: SparseOptimizerConfig, *, seed: int, device: torch.device
    ) -> None:
        """Builds tables with their initial weights on ``device``, in float32."""
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        super().__init__()
        self._tables = list(tables)
        self.feature_dims = [table.dim for table in tables]
        self._kind = optimizer.kind
        # Positions instead of the features' own names: torch and TorchRec refuse some texts as module names.
        self._keys = [f"f{position}" for position in range(len(tables))]
        optimizer_type, optimizer_kwargs = _optimizer(optimizer)
        self.collection = FusedEmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=key, feature_names=[key])
                for key, table in zip(self._keys, tables, strict=True)
            ],
            optimizer_type=optimizer_type,
            optimizer_kwargs=optimizer_kwargs,
            is_weighted=True,
            device=device,
        )
        # FBGEMM's kernel module: the collection has no public way to the learning rate of the next update and
        # to Adam's iteration count.
        self._kernel = self.collection._emb_modules[0]._emb_module
        for table, weight in zip(tables, self._kernel.split_embedding_weights(), strict=True):
            weight.copy_(table.initial_weight(seed))

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        check_ids(sparse, self._tables)
        weights = bag_weights(sparse, self._tables)
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=sparse.values,
            lengths=sparse.lengths,
            weights=torch.ones_like(sparse.values, dtype=torch.float32) if weights is None else weights.float(),
        )
        pooled: Tensor = self.collection(features).values()
        return pooled

    def backward_and_update(self, pooled: Tensor, gradient: Tensor) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        torch.autograd.backward(pooled, gradient)

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self._kernel.set_learning_rate(lr)

    def tables(self) -> Mapping[str, Tensor]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        weights = self._kernel.split_embedding_weights()
        return {table.name: weight for table, weight in zip(self._tables, weights, strict=True)}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """See :class:`erase_rec.protocols.Embeddings`; ``iteration`` is shared by all tables."""
        state: dict[str, dict[str, Tensor]] = {
            table.name: {"iteration": self._kernel.iter.detach().clone().reshape(())} for table in self._tables
        }
        names = STATE_NAMES[self._kind]
        if names:
            for table, entries in zip(self._tables, self._kernel.split_optimizer_states(), strict=True):
                state[table.name].update(zip(names, entries, strict=True))
        return state

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for table, entries in self.optimizer_state().items():
            for name, value in entries.items():
                if name == "iteration":
                    self._kernel.set_optimizer_step(int(state[table][name]))
                else:
                    value.copy_(state[table][name])
