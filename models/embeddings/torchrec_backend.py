"""Embedding tables through TorchRec: one FusedEmbeddingBagCollection, its optimizer fused into FBGEMM's backward.

The collection makes tables, kernel and optimizer; lookups call its kernel (FBGEMM's table-batched embeddings)
directly. The collection's own forward takes the batch apart feature by feature and joins it again: 0.82 ms against
0.19 ms on an H200 (26 features, 1024 rows, dim 64; torchrec 1.6.1), 4.4 ms against 1.2 ms on one CPU core (dim 16;
torchrec 1.8.0), and on CUDA a host synchronisation. It also joins its per-pooling kernels in kernel order, which is
not the order of its names when poolings alternate; here there is one kernel, see
:class:`models.embeddings.layout.TableModule`.

On CUDA the kernels of :mod:`models.embeddings.own_kernels` can work on the collection's tensors in FBGEMM's place: they
read the learning rate on the device, so that a captured update follows its schedule, and sort beside the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import Table, TableModule, without_padding
from models.embeddings.own_kernels import Order, OwnKernels


class TorchRecEmbeddings(TableModule):
    """Implements :class:`erase_rec.protocols.Embeddings`; dims are multiples of 4, and Adam needs CUDA.

    An id outside its table raises :class:`models.embeddings.layout.IdRangeError` on the CPU. On CUDA a check by the
    host would stall it: own kernels leave it to :meth:`verify`, FBGEMM stops the device with an assertion.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: SparseOptimizerConfig,
        *,
        seed: int,
        device: torch.device,
        pooled_dtype: torch.dtype = torch.float32,
        own_kernels: bool = False,
    ) -> None:
        """Builds tables with their initial weights on ``device``, in float32.

        Args:
            tables: one a feature.
            optimizer: kind, first learning rate and constants.
            seed: of the initial weights.
            device: where they live.
            pooled_dtype: of the pooled embeddings, which are summed in float32.
            own_kernels: look up and update without FBGEMM, see ``own_kernels_apply``.
        """
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        super().__init__(tables, optimizer)
        self._pooled_dtype = pooled_dtype
        self._pending: tuple[Tensor, Tensor] | None = None
        optimizer_type, optimizer_kwargs = _fused_optimizer(optimizer)
        # Positions instead of the features' own names: torch and TorchRec refuse some texts as module names.
        keys = [f"f{position}" for position in range(len(tables))]
        self.collection = FusedEmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(num_embeddings=table.rows, embedding_dim=table.dim, name=key, feature_names=[key])
                for key, table in zip(keys, tables, strict=True)
            ],
            optimizer_type=optimizer_type,
            optimizer_kwargs=optimizer_kwargs,
            device=device,
        )
        (lookups,) = self.collection._emb_modules  # one, since pooling and data type are common
        self._kernel = lookups._emb_module
        for table, weight in zip(tables, self._kernel.split_embedding_weights(), strict=True):
            weight.copy_(table.initial_weight(seed))
        self.to(device)
        weights = self._kernel.split_embedding_weights()
        self._own = OwnKernels(tables, weights, self._table_states(), optimizer) if own_kernels else None

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`.

        Raises:
            IdRangeError: an id is outside its table; on the CPU only.
        """
        if self._own is not None:
            pooled = self._own.lookup(sparse, self._pooled_dtype)
            return pooled.requires_grad_() if torch.is_grad_enabled() else pooled
        # FBGEMM takes every id for one of a bag.
        sparse = without_padding(sparse)
        if not sparse.values.is_cuda:
            self.check_ids(sparse)
        if sparse.single_valued:
            offsets = torch.arange(sparse.values.numel() + 1, device=sparse.values.device)
        else:
            offsets = pad(sparse.lengths.cumsum(0), (1, 0))
        if self._iteration is not None:
            # FBGEMM counts forwards, evaluation's too, and gives Adam the count of this forward plus 1.
            self._kernel.iter_cpu.copy_(self._iteration)
            self._kernel.iter.fill_(int(self._iteration))
        summed: Tensor = self._kernel(sparse.values, offsets, self.bag_weights(sparse, torch.float32))
        pooled = summed.to(self._pooled_dtype)
        if torch.is_grad_enabled():
            self._pending = (pooled, summed)
        return pooled

    def order(self, sparse: SparseBatch) -> Order | None:
        """See :class:`erase_rec.protocols.Embeddings`; FBGEMM sorts within its update."""
        return None if self._own is None else self._own.order(sparse)

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: Order | None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; ``pooled`` is what the last training forward returned."""
        if self._own is not None:
            assert order is not None
            self._own.update(gradient, order)
            return
        assert self._pending is not None
        assert self._pending[0] is pooled
        (_, summed), self._pending = self._pending, None
        torch.autograd.backward(summed, gradient.float())
        if self._iteration is not None:
            self._iteration += 1

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; FBGEMM updates with the rate that was set before its forward."""
        if self._own is not None:
            self._own.set_lr(lr)
            return
        self._lr = lr
        self._kernel.set_learning_rate(lr)

    def frozen_scalars(self) -> tuple[float, ...]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return super().frozen_scalars() if self._own is None else ()

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        if self._own is None and not sparse.single_valued:
            return "FBGEMM's own kernels take bags without padding, whose ids are counted on the host"
        return None

    def verify(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; where FBGEMM looks up, its assertion has stopped the device."""
        found = None if self._own is None else self._own.first_outside()
        if found is not None:
            self._refuse(*found)

    def tables(self) -> Mapping[str, Tensor]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        weights = self._kernel.split_embedding_weights()
        return {table.name: weight for table, weight in zip(self._tables, weights, strict=True)}

    def _table_states(self) -> Sequence[Sequence[Tensor]]:
        if not self._state_names:
            return [[] for _ in self._tables]
        states: Sequence[Sequence[Tensor]] = self._kernel.split_optimizer_states()
        return states


def _fused_optimizer(config: SparseOptimizerConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """What the collection takes; it hands all but ``lr`` to the kernel as they are."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "rowwise_adagrad": RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    kwargs: dict[str, Any] = {"lr": config.lr, "bounds_check_mode": BoundsCheckMode.FATAL}
    if config.kind != "sgd":
        kwargs["eps"] = config.eps
    if config.kind == "adam":
        kwargs |= {"beta1": config.beta1, "beta2": config.beta2}
    return kinds[config.kind], kwargs
