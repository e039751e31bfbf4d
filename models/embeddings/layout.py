"""What both embedding backends share: table shapes, initial weights, bag weights, and the check of ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import Config
from models.layers import seeded


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

    def initial_weight(self, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in +-1/sqrt(rows), as in DLRM; depends on (seed, name) and shape alone."""
        with seeded(seed, f"embeddings.{self.name}"):
            bound = 1.0 / math.sqrt(self.rows)
            return torch.empty(self.rows, self.dim, dtype=torch.float32).uniform_(-bound, bound).to(dtype)


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


def bag_weights(sparse: SparseBatch, tables: Sequence[Table]) -> Tensor | None:
    """Weight of each id so that a weighted sum gives every feature's pooling; None: all are 1.

    Returns:
        float32 [total ids]: 1 / length of its bag for ``mean`` features, the batch's weight or 1 for the others.
    """
    if sparse.single_valued or (sparse.weights is None and not any(table.mean for table in tables)):
        return sparse.weights
    lengths_FB = sparse.lengths.reshape(sparse.num_features, -1)
    mean_F1 = torch.tensor([[table.mean] for table in tables], device=lengths_FB.device)
    factor_FB = torch.where(mean_F1, 1.0 / lengths_FB.clamp_min(1), 1.0)
    factors = torch.repeat_interleave(factor_FB.flatten(), sparse.lengths, output_size=sparse.values.numel())
    return factors if sparse.weights is None else factors * sparse.weights


def check_ids(sparse: SparseBatch, tables: Sequence[Table]) -> None:
    """Refuses ids outside their table, on the CPU, where a kernel would read past the end or another row.

    Raises:
        IndexError: names feature, id and rows of the table.
    """
    if sparse.values.device.type != "cpu" or sparse.values.numel() == 0:
        return
    rows_F = torch.tensor([table.rows for table in tables])
    limits = rows_F.repeat_interleave(sparse.lengths.reshape(sparse.num_features, -1).sum(dim=1))
    bad = (sparse.values < 0) | (sparse.values >= limits)
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        ends_F = sparse.lengths.reshape(sparse.num_features, -1).sum(dim=1).cumsum(0)
        table = tables[int((ends_F <= position).sum())]
        raise IndexError(
            f"feature {table.name!r}: row {int(sparse.values[position])} is outside its table of {table.rows} rows"
        )
