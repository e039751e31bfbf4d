"""What both embedding backends share: table shapes, initial weights, bag weights, the check of ids, Adam's count.

Shapes: B rows, F features, V ids of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import Config, SparseOptimizerConfig
from erase_rec.distributed.shards import Held, Shards
from erase_rec.errors import UserError
from models.layers import seeded

STATE_NAMES = {"rowwise_adagrad": ("sum",), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""Optimizer state of a table by optimizer: [rows] for ``rowwise_adagrad``, else [rows, dim]."""


class IdRangeError(UserError):
    """An id lies outside its feature's table."""


@dataclass(frozen=True)
class Table:
    """One feature's table.

    Attributes:
        name: the feature's name, any text.
        rows: rows, the reserved ones included.
        dim: columns.
        mean: bags are averaged instead of summed.
    """

    name: str
    rows: int
    dim: int
    mean: bool

    def initial_weight(self, seed: int) -> Tensor:
        """Float32 [rows, dim], uniform in +-1/sqrt(rows) as in DLRM; depends on (seed, name) and shape alone."""
        weight = torch.empty(self.rows, self.dim, dtype=torch.float32)
        self.draw(seed, lambda start, rows: weight[start : start + len(rows)].copy_(rows))
        return weight

    def draw(self, seed: int, write: Callable[[int, Tensor], object], rows_at_once: int = 2**16) -> None:
        """Gives ``initial_weight`` to ``write`` piece by piece, with the first row's number: no table is ever whole.

        torch's CPU generator fills elements one after the other, so that pieces are those of the whole.
        """
        bound = 1.0 / math.sqrt(self.rows)
        with seeded(seed, f"embeddings.{self.name}"):
            for start in range(0, self.rows, rows_at_once):
                rows = min(rows_at_once, self.rows - start)
                write(start, torch.empty(rows, self.dim, dtype=torch.float32).uniform_(-bound, bound))


def without_padding(sparse: SparseBatch) -> SparseBatch:
    """The same bags with ``values`` cut after the last one; may synchronise, see ``SparseBatch.ids_of_features``."""
    if sparse.single_valued:
        return sparse
    count = sum(sparse.ids_of_features())
    weights = None if sparse.weights is None else sparse.weights[:count]
    return replace(sparse, values=sparse.values[:count], weights=weights)


def select_features(sparse: SparseBatch, features: Sequence[int]) -> SparseBatch:
    """The bags of some features, in the order of ``features``; ``sparse`` holds no padding.

    May synchronise the host, see ``SparseBatch.ids_of_features``.
    """
    lengths_FB = sparse.lengths.reshape(sparse.num_features, -1)
    sizes = sparse.ids_of_features()

    def pick(values: Tensor) -> Tensor:
        parts = torch.split(values, sizes)
        return torch.cat([parts[feature] for feature in features])

    weights = None if sparse.weights is None else pick(sparse.weights)
    lengths = torch.cat([lengths_FB[feature] for feature in features])
    counts = tuple(sizes[feature] for feature in features)
    return SparseBatch(pick(sparse.values), lengths, weights, len(features), sparse.single_valued, counts)


def tables_of(config: Config, table_rows: Mapping[str, int]) -> list[Table]:
    """The tables of a configuration.

    Args:
        config: features and the common dimension.
        table_rows: rows of each feature's table, by feature name.
    """
    return [
        Table(
            feature.name,
            table_rows[feature.name],
            feature.embedding_dim or config.embedding.dim,
            feature.pooling == "mean",
        )
        for feature in config.features.sparse
    ]


class TableModule(nn.Module):
    """Base of the backends: one table a feature, in feature order.

    Every table is looked up with sum pooling; ``mean`` is a weight of 1 / length, so that one kernel serves all
    features whatever their pooling.
    """

    table_rows: Tensor
    averaged: Tensor

    def __init__(self, tables: Sequence[Table], optimizer: SparseOptimizerConfig) -> None:
        super().__init__()
        assert tables
        self._lr = optimizer.lr
        self.feature_dims = [table.dim for table in tables]
        self._tables = tuple(tables)
        self._state_names = STATE_NAMES[optimizer.kind]
        # On the host: Adam's bias correction is a host scalar in both backends.
        self._iteration = torch.zeros((), dtype=torch.int64) if optimizer.kind == "adam" else None
        self.register_buffer("table_rows", torch.tensor([table.rows for table in tables]), persistent=False)
        self.register_buffer("averaged", torch.tensor([table.mean for table in tables]), persistent=False)
        self._any_mean = any(table.mean for table in tables)

    def bag_weights(self, sparse: SparseBatch, dtype: torch.dtype) -> Tensor | None:
        """Weight [V] of each id with which a sum gives its feature's pooling; None: every weight is 1.

        ``sparse`` holds no padding, here and below.
        """
        weights = None if sparse.weights is None else sparse.weights.to(dtype)
        if sparse.single_valued or not self._any_mean:
            return weights
        lengths_FB = sparse.lengths.reshape(len(self._tables), -1)
        factor_FB = torch.where(self.averaged.unsqueeze(1), lengths_FB.clamp_min(1).to(dtype).reciprocal(), 1.0)
        factors = factor_FB.flatten().repeat_interleave(sparse.lengths, output_size=sparse.values.numel())
        return factors if weights is None else factors * weights

    def order(self, sparse: SparseBatch) -> Any:
        """See :class:`erase_rec.protocols.Embeddings`: the update sorts by itself."""
        return None

    def verify(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: lookups have checked."""

    def idle(self) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: a lookup asks other ranks for nothing."""

    def expect(self, batch: Batch | None) -> None:
        """See :class:`erase_rec.protocols.Embeddings`: a lookup asks other ranks for nothing."""

    def check_ids(self, sparse: SparseBatch) -> None:
        """Refuses ids outside their table: a kernel would read another row, or no memory of ours at all.

        Synchronises the host.

        Raises:
            IdRangeError: names feature, id and rows of the table.
        """
        if sparse.single_valued:
            limits = self.table_rows.unsqueeze(1)
        else:
            ids_F = sparse.lengths.reshape(len(self._tables), -1).sum(dim=1)
            limits = self.table_rows.repeat_interleave(ids_F, output_size=sparse.values.numel())
        ids = sparse.values.reshape(len(self._tables), -1) if sparse.single_valued else sparse.values
        bad = (ids < 0) | (ids >= limits)
        if bool(bad.any()):
            position = int(bad.flatten().nonzero()[0])
            ends_F = sparse.lengths.reshape(len(self._tables), -1).sum(dim=1).cumsum(0)
            self._refuse(int((ends_F <= position).sum()), int(sparse.values[position]))

    def frozen_scalars(self) -> tuple[float, ...]:
        """See :class:`erase_rec.protocols.Embeddings`: the learning rate, and Adam's count of updates."""
        return (self._lr,) if self._iteration is None else (self._lr, float(self._iteration))

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        """See :class:`erase_rec.protocols.Embeddings`."""
        return None

    def optimizer_state(self) -> Mapping[str, Mapping[str, Held]]:
        """By feature name: ``sum``, or ``exp_avg``, ``exp_avg_sq`` and ``iteration`` (one count for all tables)."""
        count = {} if self._iteration is None else {"iteration": self._iteration}
        return {
            table.name: dict(zip(self._state_names, values, strict=True)) | count
            for table, values in zip(self._tables, self._table_states(), strict=True)
        }

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Held]]) -> None:
        """Copies what ``optimizer_state`` gave; parts of tensors share storage with what they are of already."""
        for name, entries in self.optimizer_state().items():
            for key, value in entries.items():
                given = state[name][key]
                if not isinstance(value, Shards):
                    assert not isinstance(given, Shards)
                    value.copy_(given)

    def _table_states(self) -> Sequence[Sequence[Held]]:
        """The optimizer's tensors of each table in the order of ``STATE_NAMES``; views."""
        raise NotImplementedError

    def _refuse(self, feature: int, bad_id: int) -> None:
        table = self._tables[feature]
        raise IdRangeError(
            f"feature {table.name!r}: id {bad_id} is outside its embedding table, "
            f"expected 0 to {table.rows - 1} ({table.rows} rows)"
        )
