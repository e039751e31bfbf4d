"""Tables of which some are kept one way and some another, such as large ones spread over ranks and small ones not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, SparseBatch
from erase_rec.data_stream import DataStream
from erase_rec.distributed.shards import Held
from erase_rec.protocols import Embeddings
from models.embeddings.layout import select_features, without_padding


@dataclass(frozen=True)
class _Pending:
    """What a training forward left for the update."""

    joined: Tensor
    parts: list[Tensor]


class MixedTables(nn.Module):
    """Implements :class:`erase_rec.protocols.Embeddings` by several backends, each with some of the features.

    They are called in one order on every rank: the collectives of one follow those of the one before.
    """

    def __init__(
        self, backends: Sequence[Embeddings], features: Sequence[Sequence[int]], data_stream: DataStream
    ) -> None:
        """Joins backends.

        Args:
            backends: together they have every table once.
            features: positions of those whose tables each holds.
            data_stream: where a batch that is expected is taken apart; the one that they send ids on.
        """
        super().__init__()
        self._backends = list(backends)
        self.backends = nn.ModuleList(backend for backend in backends if isinstance(backend, nn.Module))
        self._features = [list(positions) for positions in features]
        dims: dict[int, int] = {}
        for backend, positions in zip(backends, features, strict=True):
            dims.update(zip(positions, backend.feature_dims, strict=True))
        self.feature_dims = [dims[position] for position in sorted(dims)]
        self._pending: _Pending | None = None
        self._data_stream = data_stream
        self._expected: list[tuple[SparseBatch, list[SparseBatch]]] = []

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`."""
        shares = self._shares(sparse)
        parts: list[Tensor] = []
        columns: dict[int, Tensor] = {}
        for backend, positions, share in zip(self._backends, self._features, shares, strict=True):
            pooled = backend(share)
            parts.append(pooled)
            columns.update(zip(positions, torch.split(pooled.detach(), [*backend.feature_dims], dim=1), strict=True))
        joined = torch.cat([columns[position] for position in range(len(columns))], dim=1)
        if torch.is_grad_enabled():
            self._pending = _Pending(joined.requires_grad_(), parts)
        return joined

    def expect(self, batch: Batch | None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        if batch is None:
            self._expected.clear()
            for backend in self._backends:
                backend.expect(None)
            return
        with self._data_stream.run(batch.arrived):
            shares = self._select(batch.sparse)
        there = self._data_stream.mark()
        self._expected.append((batch.sparse, shares))
        for backend, share in zip(self._backends, shares, strict=True):
            backend.expect(replace(batch, sparse=share, arrived=there))

    def order(self, sparse: SparseBatch) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: updates sort by themselves."""

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        assert self._pending is not None
        assert self._pending.joined is pooled
        pending, self._pending = self._pending, None
        columns = torch.split(gradient, self.feature_dims, dim=1)
        for backend, positions, part in zip(self._backends, self._features, pending.parts, strict=True):
            backend.backward_and_update(part, torch.cat([columns[at] for at in positions], dim=1), None)

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for backend in self._backends:
            backend.set_lr(lr)

    def frozen_scalars(self) -> tuple[float, ...]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return tuple(value for backend in self._backends for value in backend.frozen_scalars())

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return next(filter(None, (backend.capture_problem(sparse) for backend in self._backends)), None)

    def verify(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for backend in self._backends:
            backend.verify()

    def idle(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for backend in self._backends:
            backend.idle()

    def tables(self) -> Mapping[str, Held]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return {name: weight for backend in self._backends for name, weight in backend.tables().items()}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Held]]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return {name: state for backend in self._backends for name, state in backend.optimizer_state().items()}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Held]]) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for backend in self._backends:
            backend.load_optimizer_state(state)

    def _shares(self, sparse: SparseBatch) -> list[SparseBatch]:
        """What each backend looks up, usable on the current stream; the same objects that it expects."""
        for position, (expected, shares) in enumerate(self._expected):
            if expected is sparse and torch.is_grad_enabled():
                self._expected.pop(position)
                self._data_stream.use(*(tensor for share in shares for tensor in share.tensors()))
                return shares
        return self._select(sparse)

    def _select(self, sparse: SparseBatch) -> list[SparseBatch]:
        sparse = without_padding(sparse)
        return [select_features(sparse, positions) for positions in self._features]
