"""A plain multilayer perceptron on everything that the tower reads.

Shapes: B rows, N dense features, E sum of embedding dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import Boolean, Number, ProjectedTowerParams
from models.layers import MLP
from models.towers.tower import Tower


class MLPTower(Tower):
    """ReLU(W_k ... ReLU(W_1 [dense; embeddings]))."""

    class Config(ProjectedTowerParams):
        """Layer sizes; ``out_dim`` is the last."""

        hidden: tuple[PositiveInt, ...] = (256, 128)
        dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
        batch_norm: Boolean = False
        """A training batch of one row uses the running statistics."""

        @property
        def liftable(self) -> int:
            """All but the first."""
            return len(self.hidden)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.mlp = MLP(
            dense_dim + sum(embedding_dims),
            (*config.hidden, config.out_dim),
            dropout=config.dropout,
            batch_norm=config.batch_norm,
        )
        self.out_dim = config.out_dim

    def lift(self, layers: int) -> nn.Module:
        """See :class:`Tower`."""
        top = self.mlp.lift(layers)
        self.out_dim = self.mlp.out_dim
        return top

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""
        result: Tensor = self.mlp(torch.cat((dense_BN, emb_BE), dim=1))
        return result
