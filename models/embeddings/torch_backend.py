"""Embedding tables in plain PyTorch: needs neither torchrec nor fbgemm, gives the same results to tolerance.

Tables of one dimension lie in one tensor, so a lookup, a gradient and an update are a few operations whatever the
number of features. Tables are no autograd parameters: the gradient of the pooled embeddings becomes row gradients
in :mod:`models.embeddings.row_optimizer`, and nothing of the size of a table is ever made.

Shapes: B rows, F features (of one dimension: of the group), D embedding dim, V ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import STATE_NAMES, Table, TableModule, without_padding
from models.embeddings.row_optimizer import sum_by_row, update_rows


@dataclass(frozen=True)
class _Bags:
    """Ids of the features of one dimension, feature-major."""

    values: Tensor  # int64 [V]
    lengths: Tensor | None  # int64 [F * B]; None: all are 1
    weights: Tensor | None  # [V]; None: all are 1


@dataclass(frozen=True)
class _Lookup:
    """What the update needs of a training forward. Bag b * F + f is row b's of feature f."""

    rows: Tensor  # int64 [V], in the joined table
    bags: Tensor | None  # int64 [V], the bag of each id; None: id v is bag v
    weights: Tensor | None  # [V]


class _Group(nn.Module):
    """The tables of one dimension, joined."""

    weight: Tensor
    first_rows: Tensor

    def __init__(
        self, tables: Sequence[Table], seed: int, optimizer: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._rows = [table.rows for table in tables]
        self._state_names = STATE_NAMES[optimizer]
        shape = (sum(self._rows), tables[0].dim)
        self.register_buffer("weight", torch.empty(shape, device=device, dtype=dtype))
        for table, weight in zip(tables, self.split(self.weight), strict=True):
            weight.copy_(table.initial_weight(seed))
        rows_F = torch.tensor(self._rows, device=device)
        self.register_buffer("first_rows", rows_F.cumsum(0) - rows_F, persistent=False)
        for name in self._state_names:
            state_shape = shape[:1] if optimizer == "rowwise_adagrad" else shape
            self.register_buffer(name, torch.zeros(state_shape, device=device, dtype=dtype))

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors over all rows."""
        return {name: self.get_buffer(name) for name in self._state_names}

    def split(self, joined: Tensor) -> Sequence[Tensor]:
        """Each table's rows of a tensor over all rows; views."""
        return torch.split(joined, self._rows)

    def pool(self, ids: _Bags) -> tuple[Tensor, _Lookup]:
        """[B, F, D], and what the update needs."""
        num_ids, fields = ids.values.numel(), len(self._rows)
        if ids.lengths is None:
            # Row by row: what is looked up lies as the model reads it, and its gradient as the update does.
            rows = (ids.values.reshape(fields, -1).t() + self.first_rows).flatten()
            weights = None if ids.weights is None else ids.weights.reshape(fields, -1).t().flatten()
            offsets = torch.arange(num_ids, device=rows.device)
            pooled = embedding_bag(rows, self.weight, offsets, mode="sum", per_sample_weights=weights)
            return pooled.view(-1, fields, self.weight.shape[1]), _Lookup(rows, None, weights)
        ids_F = ids.lengths.reshape(fields, -1).sum(dim=1)
        rows = ids.values + self.first_rows.repeat_interleave(ids_F, output_size=num_ids)
        offsets = ids.lengths.cumsum(0) - ids.lengths
        bags = torch.arange(ids.lengths.numel(), device=rows.device).reshape(-1, fields).t().flatten()
        bags = bags.repeat_interleave(ids.lengths, output_size=num_ids)
        pooled = embedding_bag(rows, self.weight, offsets, mode="sum", per_sample_weights=ids.weights)
        return pooled.view(fields, -1, self.weight.shape[1]).transpose(0, 1), _Lookup(rows, bags, ids.weights)


class TorchEmbeddings(TableModule):
    """Implements :class:`erase_rec.protocols.Embeddings` on any device. Synchronises the host on CUDA."""

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: SparseOptimizerConfig,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        pooled_dtype: torch.dtype | None = None,
    ) -> None:
        """Builds tables with their initial weights on ``device``.

        Args:
            tables: one a feature.
            optimizer: kind, first learning rate and constants.
            seed: of the initial weights.
            device: where they live.
            dtype: of weights and optimizer state; float64 serves exactness tests.
            pooled_dtype: of the pooled embeddings, which are summed in ``dtype``; None: ``dtype``.
        """
        super().__init__(tables, optimizer)
        self._config = optimizer
        self._pooled_dtype = pooled_dtype or dtype
        dims = dict.fromkeys(self.feature_dims)
        self._members = [[i for i, table in enumerate(tables) if table.dim == dim] for dim in dims]
        self._groups = [
            _Group([tables[i] for i in members], seed, optimizer.kind, device, dtype) for members in self._members
        ]
        self.groups = nn.ModuleList(self._groups)
        self.to(device)
        self._pending: tuple[Tensor, list[_Lookup]] | None = None

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`.

        Raises:
            IdRangeError: an id is outside its table.
        """
        sparse = without_padding(sparse)
        self.check_ids(sparse)
        pooled: list[Tensor] = []
        lookups: list[_Lookup] = []
        with torch.no_grad():
            for group, ids in zip(self._groups, self._select(sparse), strict=True):
                of_group, lookup = group.pool(ids)
                pooled.append(of_group)
                lookups.append(lookup)
            result = self._joined(pooled).to(self._pooled_dtype)
        if torch.is_grad_enabled():
            self._pending = (result.requires_grad_(), lookups)
        return result

    def _joined(self, pooled: Sequence[Tensor]) -> Tensor:
        """Pooled embeddings of the groups, each [B, F, D], in the order of the features; one group's as they lie."""
        if len(pooled) == 1:
            return pooled[0].flatten(1)
        of_feature: dict[int, Tensor] = {}
        for members, of_group in zip(self._members, pooled, strict=True):
            of_feature.update(zip(members, of_group.unbind(1), strict=True))
        return torch.cat([of_feature[feature] for feature in range(len(of_feature))], dim=1)

    @torch.no_grad()
    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`; ``pooled`` is what the last training forward returned."""
        assert self._pending is not None
        assert self._pending[0] is pooled
        (_, lookups), self._pending = self._pending, None
        if self._iteration is not None:
            self._iteration += 1
        iteration = 0 if self._iteration is None else int(self._iteration)
        parts = torch.split(gradient, self.feature_dims, dim=1)
        for number, (members, lookup) in enumerate(zip(self._members, lookups, strict=True)):
            group = self._groups[number]
            of_group = gradient if len(self._groups) == 1 else torch.cat([parts[i] for i in members], dim=1)
            bag_gradient = of_group.reshape(-1, group.weight.shape[1]).to(group.weight.dtype)
            rows, row_gradient = self._rows_of_all(number, *self._own_rows(lookup, bag_gradient))
            if rows.numel():
                update_rows(group.weight, group.state(), rows, row_gradient, self._config, self._lr, iteration)

    def _own_rows(self, lookup: _Lookup, bag_gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct rows of a lookup and their gradients."""
        if lookup.rows.numel() == 0:
            return lookup.rows, bag_gradient[:0]
        return sum_by_row(lookup.rows, lookup.bags, lookup.weights, bag_gradient)

    def _rows_of_all(self, number: int, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What group ``number`` is updated with: here what this process's batch touched."""
        return rows, gradient

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self._lr = lr

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return "embedding.backend: torch counts the distinct rows of a batch on the host"

    def tables(self) -> Mapping[str, Tensor]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return {table.name: self._of_table(i, "weight") for i, table in enumerate(self._tables)}

    def _table_states(self) -> Sequence[Sequence[Tensor]]:
        return [[self._of_table(i, name) for name in self._state_names] for i in range(len(self._tables))]

    def _of_table(self, feature: int, buffer: str) -> Tensor:
        """The rows of one table in a group's buffer; a view."""
        index = next(index for index, members in enumerate(self._members) if feature in members)
        group = self._groups[index]
        return group.split(group.get_buffer(buffer))[self._members[index].index(feature)]

    def _select(self, sparse: SparseBatch) -> list[_Bags]:
        """Each group's ids. Synchronises the host for multi-valued bags of several embedding dims."""
        weights = self.bag_weights(sparse, self._groups[0].weight.dtype)
        lengths = None if sparse.single_valued else sparse.lengths.long()
        if len(self._groups) == 1:
            return [_Bags(sparse.values, lengths, weights)]
        fields = len(self._tables)
        if lengths is None:
            sizes = [sparse.values.numel() // fields] * fields
        else:
            sizes = lengths.reshape(fields, -1).sum(dim=1).tolist()
        ids_F = torch.split(sparse.values, sizes)
        weights_F = None if weights is None else torch.split(weights, sizes)
        lengths_F = None if lengths is None else lengths.reshape(fields, -1)
        return [
            _Bags(
                torch.cat([ids_F[i] for i in members]),
                None if lengths_F is None else torch.cat([lengths_F[i] for i in members]),
                None if weights_F is None else torch.cat([weights_F[i] for i in members]),
            )
            for members in self._members
        ]
