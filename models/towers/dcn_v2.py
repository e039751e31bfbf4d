"""Deep & Cross Network v2: explicit feature crosses of bounded degree.

Wang et al., "DCN V2", arXiv 2008.13535: the cross layer (equation 1) and its low-rank form without the mixture of
experts, then a linear projection.

Shapes: B rows, N dense features, E sum of embedding dims, X = N + E.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedLastParams
from models.kernels import own_kernel_applies
from models.layers import project
from models.towers.tower import ProjectedTower


class DCNv2Tower(ProjectedTower):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, then a linear projection; with a rank, W_l = U_l V_l^T."""

    class Config(ProjectedLastParams):
        """``rank`` unset: full matrices."""

        num_layers: PositiveInt = 3
        rank: PositiveInt | None = None

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        dim = dense_dim + sum(embedding_dims)

        def cross() -> nn.Module:
            if config.rank is None:
                return nn.Linear(dim, dim)
            return nn.Sequential(nn.Linear(dim, config.rank, bias=False), nn.Linear(config.rank, dim))

        self.rank = config.rank
        self.crosses = nn.ModuleList(cross() for _ in range(config.num_layers))
        self.projection = nn.Linear(dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""
        rank, projection = self.rank, self.projection
        if self.own_kernels and rank is not None and projection is not None and own_kernel_applies(emb_BE):
            from models.kernels.cross import cross_applies, cross_network

            if cross_applies(rank, self.out_dim):
                return cross_network(dense_BN.to(emb_BE.dtype), emb_BE, self.crosses, projection)
        x0_BX = torch.cat((dense_BN, emb_BE), dim=1)
        x_BX = x0_BX
        for cross in self.crosses:
            x_BX = x0_BX * cross(x_BX) + x_BX
        return project(self.projection, x_BX, own_kernels=False)
