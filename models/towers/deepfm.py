"""DeepFM: a factorisation machine and a deep part on shared embeddings.

Guo et al., "DeepFM", arXiv 1703.04247, equation 1 (y = y_FM + y_DNN), before the sigmoid. A tower ends in a
vector, so one projection of all terms takes the place of the sum.

Shapes: B rows, N dense features, F sparse features, D embedding dim, E = F * D, X any other width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedLastParams
from models.layers import MLP, project
from models.towers.fm import bi_interaction
from models.towers.tower import ProjectedTower, field_problems


class DeepFMTower(ProjectedTower):
    """W [bi_interaction(e); dense; e; MLP([dense; e])] + b."""

    class Config(ProjectedLastParams):
        """Sizes of the deep part and of the projection."""

        hidden: tuple[PositiveInt, ...] = (128, 64)

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """At least two fields of one dimension."""
            return field_problems("deepfm", embedding_dims, at_least=2)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        first_order_dim = dense_dim + sum(embedding_dims)
        self.deep = MLP(first_order_dim, config.hidden)
        self.projection = nn.Linear(self.dim + first_order_dim + self.deep.out_dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        first_order_BX = torch.cat((dense_BN, emb_BE), dim=1)
        pairs_BD = bi_interaction(emb_BE.reshape(-1, self.fields, self.dim))
        terms = (pairs_BD, first_order_BX, self.deep(first_order_BX))
        return project(self.projection, torch.cat(terms, dim=1), own_kernels=self.own_kernels)
