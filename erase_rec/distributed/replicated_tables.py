"""Embedding tables of which every rank has a whole copy, all updated alike.

Each rank looks up the ids of all ranks and takes its own rows; each update sees the gradients of all ranks. So the
copies stay equal bit for bit, and equal to those of one process with the ranks' batches joined in rank order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, SparseBatch
from erase_rec.distributed.shards import Held
from erase_rec.distributed.world import World
from erase_rec.protocols import Embeddings


class ReplicatedTables(nn.Module):
    """Implements :class:`erase_rec.protocols.Embeddings` on several ranks around a rank's own tables.

    Every rank has as many rows in a step. Training forwards and updates run collectives on the current stream, on
    the main thread; a forward of bags of several lengths also exchanges their sizes on the host, which waits for the
    device. Without gradients (evaluation) a forward is a lookup of this rank's rows, without collectives.
    """

    def __init__(self, tables: Embeddings, world: World) -> None:
        """Wraps ``tables``, which every rank made alike."""
        super().__init__()
        self._tables = tables
        self._world = world
        self._pending: tuple[Tensor, Tensor] | None = None
        self._joined: tuple[SparseBatch, SparseBatch, torch.cuda.Event | None] | None = None

    @property
    def feature_dims(self) -> Sequence[int]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return self._tables.feature_dims

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`: this rank's rows."""
        if not torch.is_grad_enabled():
            return self._tables(sparse)
        joined = self._join(sparse)
        self._joined = (sparse, joined, torch.cuda.current_stream().record_event() if joined.values.is_cuda else None)
        pooled_of_all = self._tables(joined)
        pooled = pooled_of_all.detach().chunk(self._world.size)[self._world.rank]
        self._pending = (pooled, pooled_of_all)
        return pooled

    def order(self, sparse: SparseBatch) -> Any:
        """See :class:`erase_rec.protocols.Embeddings`: of the ids of all ranks, for which it waits on its stream."""
        assert self._joined is not None
        own, joined, ready = self._joined
        assert own is sparse
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        return self._tables.order(joined)

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: Any) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: with the mean over the ranks, whose losses are means."""
        assert self._pending is not None
        assert self._pending[0] is pooled
        (_, pooled_of_all), self._pending, self._joined = self._pending, None, None
        gradients = torch.cat(self._world.gather("tables.gradient", gradient))
        self._tables.backward_and_update(pooled_of_all, gradients / self._world.size, order)

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self._tables.set_lr(lr)

    def frozen_scalars(self) -> tuple[float, ...]:
        """See :class:`erase_rec.protocols.Embeddings`; the same on every rank."""
        return self._tables.frozen_scalars()

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        if not sparse.single_valued:
            return "ranks tell each other the sizes of their bags on the host"
        return self._tables.capture_problem(sparse)

    def verify(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; of training forwards every rank sees the ids of all."""
        self._tables.verify()

    def expect(self, batch: Batch | None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: every rank's ids are joined when they are looked up."""

    def idle(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: evaluation asks other ranks for nothing."""

    def tables(self) -> Mapping[str, Held]:
        """See :class:`erase_rec.protocols.Embeddings`; the same on every rank."""
        return self._tables.tables()

    def optimizer_state(self) -> Mapping[str, Mapping[str, Held]]:
        """See :class:`erase_rec.protocols.Embeddings`; the same on every rank."""
        return self._tables.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Held]]) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self._tables.load_optimizer_state(state)

    def _join(self, sparse: SparseBatch) -> SparseBatch:
        """The bags of all ranks, in rank order within each feature."""
        fields = sparse.num_features
        if sparse.single_valued:
            lengths = sparse.lengths.repeat(self._world.size)
            weights = None if sparse.weights is None else self._join_cells("weights", sparse.weights, fields)
            return SparseBatch(self._join_cells("ids", sparse.values, fields), lengths, weights, fields, True)
        # Host synchronisation, before the first collective of the step that a device runs.
        sizes_F = sparse.lengths.reshape(fields, -1).sum(dim=1).tolist()
        sizes_RF = self._world.gather_objects("tables.sizes", sizes_F)
        lengths = self._join_cells("lengths", sparse.lengths, fields)
        # Padding stays behind: the joined bags fill what they are joined to.
        weights = None if sparse.weights is None else self._join_values("weights", sparse.weights, sizes_RF)
        return SparseBatch(self._join_values("ids", sparse.values, sizes_RF), lengths, weights, fields)

    def _join_cells(self, name: str, cells: Tensor, fields: int) -> Tensor:
        """One value a row and feature of all ranks, feature by feature."""
        cells_RFB = torch.stack(self._gather(name, cells)).reshape(self._world.size, fields, -1)
        return cells_RFB.transpose(0, 1).flatten()

    def _join_values(self, name: str, values: Tensor, sizes_RF: list[list[int]]) -> Tensor:
        """Values of all ranks, feature by feature; gathered at the largest rank's length."""
        padded = values.new_zeros(max(sum(sizes_F) for sizes_F in sizes_RF))
        own = sum(sizes_RF[self._world.rank])
        padded[:own] = values[:own]
        parts_RF = [
            torch.split(of_rank[: sum(sizes_F)], sizes_F)
            for of_rank, sizes_F in zip(self._gather(name, padded), sizes_RF, strict=True)
        ]
        return torch.cat([part for parts_R in zip(*parts_RF, strict=True) for part in parts_R])

    def _gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        return self._world.gather(f"tables.{name}", tensor)
