"""Embedding tables in plain PyTorch: needs neither torchrec nor fbgemm, gives the same results to tolerance.

Tables of one dimension lie in one tensor, so a lookup, a gradient and an update are a few operations whatever the
number of features. Tables are no autograd parameters: the gradient of the pooled embeddings is turned into row
gradients here, duplicates summed first, and only touched rows move, as in FBGEMM's exact optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import Table, bag_weights, check_ids

STATE_NAMES = {"rowwise_adagrad": ("sum",), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}


@dataclass
class _Lookup:
    """The ids of one dimension's features in the last training forward."""

    rows: Tensor  # int64 [V], in the joined table
    bags: Tensor  # int64 [V], feature-major bag of each id
    weights: Tensor | None  # [V]


class _Group(nn.Module):
    """The tables of one dimension, joined."""

    weight: Tensor
    first_row: Tensor

    def __init__(self, tables: Sequence[Table], seed: int, optimizer: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.tables = list(tables)
        self.dim = tables[0].dim
        weight = torch.cat([table.initial_weight(seed, dtype) for table in tables])
        self.register_buffer("weight", weight)
        starts = [sum(table.rows for table in tables[:index]) for index in range(len(tables))]
        self.register_buffer("first_row", torch.tensor(starts), persistent=False)
        for name in STATE_NAMES[optimizer]:
            shape = weight.shape[:1] if optimizer == "rowwise_adagrad" else weight.shape
            self.register_buffer(f"state_{name}", torch.zeros(shape, dtype=dtype))

    def split(self, joined: Tensor) -> list[Tensor]:
        """Each table's rows of a tensor over all rows; views."""
        return list(torch.split(joined, [table.rows for table in self.tables]))

    def pool(self, values: Tensor, lengths: Tensor, weights: Tensor | None, bag_size: int) -> tuple[Tensor, _Lookup]:
        """[F, B, D] from this group's ids, feature-major, and what the update needs."""
        fields = len(self.tables)
        ids_a_field = lengths.reshape(fields, -1).sum(dim=1)
        rows = values + self.first_row.repeat_interleave(ids_a_field, output_size=values.numel())
        offsets = lengths.cumsum(0) - lengths
        if weights is not None:
            weights = weights.to(self.weight.dtype)
        pooled = embedding_bag(rows, self.weight, offsets, mode="sum", per_sample_weights=weights)
        bags = torch.arange(fields * bag_size, device=rows.device)
        bags = bags.repeat_interleave(lengths, output_size=values.numel())
        return pooled.reshape(fields, bag_size, self.dim), _Lookup(rows, bags, weights)


class TorchEmbeddings(nn.Module):
    """Implements :class:`erase_rec.protocols.Embeddings`."""

    iteration: Tensor

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: SparseOptimizerConfig,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Builds tables with their initial weights on ``device``; float64 serves exactness tests."""
        super().__init__()
        self._tables = list(tables)
        self.feature_dims = [table.dim for table in tables]
        self._config = optimizer
        self._lr = optimizer.lr
        dims = list(dict.fromkeys(self.feature_dims))
        self._members = [[i for i, table in enumerate(tables) if table.dim == dim] for dim in dims]
        self.groups = nn.ModuleList(
            _Group([tables[i] for i in members], seed, optimizer.kind, dtype) for members in self._members
        )
        self.register_buffer("iteration", torch.zeros((), dtype=torch.int64))
        self.to(device)
        self._lookups: list[_Lookup] = []

    def forward(self, sparse: SparseBatch) -> Tensor:
        """See :class:`erase_rec.protocols.Embeddings`."""
        check_ids(sparse, self._tables)
        bag_size = sparse.lengths.numel() // max(sparse.num_features, 1)
        weights = bag_weights(sparse, self._tables)
        if not self._tables:
            return sparse.values.new_zeros((bag_size, 0), dtype=torch.float32)
        pooled: list[Tensor | None] = [None] * len(self._tables)
        lookups = []
        with torch.no_grad():
            for members, group in zip(self._members, self.groups, strict=True):
                assert isinstance(group, _Group)
                ids, lengths, group_weights = _select(sparse, weights, members, bag_size)
                pooled_FBD, lookup = group.pool(ids, lengths, group_weights, bag_size)
                lookups.append(lookup)
                for position, feature in enumerate(members):
                    pooled[feature] = pooled_FBD[position]
            result = torch.cat([part for part in pooled if part is not None], dim=1)
        if torch.is_grad_enabled():
            self._lookups = lookups
            result.requires_grad_()
        return result

    @torch.no_grad()
    def backward_and_update(self, pooled: Tensor, gradient: Tensor) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self.iteration += 1
        parts = torch.split(gradient, self.feature_dims, dim=1)
        for members, group, lookup in zip(self._members, self.groups, self._lookups, strict=True):
            assert isinstance(group, _Group)
            gradient_FBD = torch.stack([parts[i] for i in members]).to(group.weight.dtype)
            per_id = gradient_FBD.reshape(-1, group.dim)[lookup.bags]
            if lookup.weights is not None:
                per_id = per_id * lookup.weights.unsqueeze(1)
            rows, inverse = torch.unique(lookup.rows, return_inverse=True)
            per_row = per_id.new_zeros(rows.numel(), group.dim).index_add_(0, inverse, per_id)
            self._update(group, rows, per_row)
        self._lookups = []

    def _update(self, group: _Group, rows: Tensor, gradient: Tensor) -> None:
        """One optimizer step of the touched rows: FBGEMM's exact (rowwise) Adagrad, Adam and SGD."""
        config = self._config
        state = {f"state_{name}": group.get_buffer(f"state_{name}") for name in STATE_NAMES[config.kind]}
        if config.kind == "rowwise_adagrad":
            total = state["state_sum"].index_add_(0, rows, gradient.square().mean(dim=1))[rows]
            gradient = gradient / (total.sqrt() + config.eps).unsqueeze(1)
        elif config.kind == "adagrad":
            total = state["state_sum"].index_add_(0, rows, gradient.square())[rows]
            gradient = gradient / (total.sqrt() + config.eps)
        elif config.kind == "adam":
            first = state["state_exp_avg"][rows].lerp_(gradient, 1 - config.beta1)
            second = state["state_exp_avg_sq"][rows].lerp_(gradient.square(), 1 - config.beta2)
            state["state_exp_avg"][rows], state["state_exp_avg_sq"][rows] = first, second
            step = self.iteration.to(gradient.dtype)
            first = first / (1 - config.beta1**step)
            gradient = first / ((second / (1 - config.beta2**step)).sqrt() + config.eps)
        group.weight.index_add_(0, rows, gradient, alpha=-self._lr)

    def set_lr(self, lr: float) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        self._lr = lr

    def tables(self) -> Mapping[str, Tensor]:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return self._by_table("weight")

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """See :class:`erase_rec.protocols.Embeddings`; ``iteration`` is shared by all tables."""
        state: dict[str, dict[str, Tensor]] = {table.name: {"iteration": self.iteration} for table in self._tables}
        for name in STATE_NAMES[self._config.kind]:
            for table, value in self._by_table(f"state_{name}").items():
                state[table][name] = value
        return state

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        for table, entries in self.optimizer_state().items():
            for name, value in entries.items():
                value.copy_(state[table][name])

    def _by_table(self, buffer: str) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for group in self.groups:
            assert isinstance(group, _Group)
            names = [table.name for table in group.tables]
            parts.update(zip(names, group.split(group.get_buffer(buffer)), strict=True))
        return {table.name: parts[table.name] for table in self._tables}


def _select(
    sparse: SparseBatch, weights: Tensor | None, members: Sequence[int], bag_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, lengths and weights of some features, feature-major."""
    if len(members) == sparse.num_features:
        return sparse.values, sparse.lengths.long(), weights
    lengths_FB = sparse.lengths.reshape(sparse.num_features, bag_size).long()
    sizes = lengths_FB.sum(dim=1).tolist()  # host synchronisation; only with several embedding dims
    ids = torch.split(sparse.values, sizes)
    chosen = None if weights is None else torch.cat([torch.split(weights, sizes)[i] for i in members])
    return torch.cat([ids[i] for i in members]), lengths_FB[list(members)].flatten(), chosen
