"""Factorisation machine as a vector: the sum of all pairwise products of field embeddings.

Rendle, "Factorization Machines", ICDM 2010, equation 1 with the O(F D) form of lemma 3.1; kept as a vector
instead of summed over D as in He and Chua, "Neural Factorization Machines", arXiv 1708.05027, equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.types import Integer, TowerParams
from models.layers import MLP
from models.towers.tower import Tower, field_problems

Size = Annotated[Integer, Field(gt=0)]


def bi_interaction(field_BFD: Tensor) -> Tensor:
    """sum_{i<j} v_i * v_j = ((sum v)^2 - sum v^2) / 2: [B, F, D] -> [B, D]."""
    return 0.5 * (field_BFD.sum(dim=1).square() - field_BFD.square().sum(dim=1))


class FMTower(Tower):
    """W [bi_interaction(e); e; dense]: second-order and first-order terms, projected."""

    class Config(TowerParams):
        """Size of the projection."""

        out_dim: Size = 64

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """At least two fields of one dimension."""
            return field_problems("fm", embedding_dims, at_least=2)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        self.projection = nn.Linear(self.dim + sum(embedding_dims) + dense_dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        pairs_BD = bi_interaction(emb_BE.reshape(-1, self.fields, self.dim))
        result: Tensor = self.projection(torch.cat((pairs_BD, emb_BE, dense_BN), dim=1))
        return result


class DeepFMTower(Tower):
    """[FM(e, dense); MLP([dense; e])], projected.

    Guo et al., "DeepFM", arXiv 1703.04247, equation 1, with the sum of the two parts replaced by a projection,
    because a tower ends in a vector.
    """

    class Config(FMTower.Config):
        """Sizes of the deep part; ``out_dim`` of the projection."""

        hidden: tuple[Size, ...] = (128, 64)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fm = FMTower(config, dense_dim, embedding_dims)
        self.deep = MLP(dense_dim + sum(embedding_dims), config.hidden)
        self.projection = nn.Linear(config.out_dim + self.deep.out_dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        deep_BX = self.deep(torch.cat((dense_BN, emb_BE), dim=1))
        result: Tensor = self.projection(torch.cat((self.fm(dense_BN, emb_BE), deep_BX), dim=1))
        return result
