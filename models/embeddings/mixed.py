"""Tables of which some are kept one way and some another, such as large ones spread over ranks and small ones not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from erase_rec.batch import SparseBatch
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

    def __init__(self, backends: Sequence[Embeddings], features: Sequence[Sequence[int]]) -> None:
        """Joins ``backends``, which hold the tables of ``features`` (positions); together they have every one once."""
        super().__init__()
        self._backends = list(backends)
        self.backends = nn.ModuleList(backend for backend in backends if isinstance(backend, nn.Module))
        self._features = [list(positions) for positions in features]
        dims: dict[int, int] = {}
        for backend, positions in zip(backends, features, strict=True):
            dims.update(zip(positions, backend.feature_dims, strict=True))
        self.feature_dims = [dims[position] for position in sorted(dims)]
        self._pending: _Pending | None = None

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`."""
        sparse = without_padding(sparse)
        parts: list[Tensor] = []
        columns: dict[int, Tensor] = {}
        for backend, positions in zip(self._backends, self._features, strict=True):
            pooled = backend(select_features(sparse, positions))
            parts.append(pooled)
            columns.update(zip(positions, torch.split(pooled.detach(), [*backend.feature_dims], dim=1), strict=True))
        joined = torch.cat([columns[position] for position in range(len(columns))], dim=1)
        if torch.is_grad_enabled():
            self._pending = _Pending(joined.requires_grad_(), parts)
        return joined

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
