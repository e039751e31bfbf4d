"""Factorisation machine as a vector: the sum of all pairwise products of field embeddings.

Rendle, "Factorization Machines", ICDM 2010, equation 1 in the linear-time form of lemma 3.1; the second-order
term is kept as a vector instead of summed over D, as in He and Chua, "Neural Factorization Machines",
arXiv 1708.05027 (bi-interaction pooling).

Shapes: B rows, N dense features, F sparse features, D embedding dim, E = F * D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.types import ProjectedTowerParams
from models.layers import project
from models.towers.tower import Tower, field_problems


class FMTower(Tower):
    """W [bi_interaction(e); e; dense] + b: the second-order and the first-order terms, projected."""

    class Config(ProjectedTowerParams):
        """Size of the projection."""

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
        return project(self.projection, torch.cat((pairs_BD, emb_BE, dense_BN), dim=1), own_kernels=self.own_kernels)


def bi_interaction(field_BFD: Tensor) -> Tensor:
    """sum_{i<j} v_i * v_j = ((sum v)^2 - sum v^2) / 2: [B, F, D] -> [B, D]."""
    return 0.5 * (field_BFD.sum(dim=1).square() - field_BFD.square().sum(dim=1))
