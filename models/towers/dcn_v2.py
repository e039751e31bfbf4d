"""Deep & Cross Network v2: explicit feature crosses of bounded degree.

Wang et al., "DCN V2", arXiv 2008.13535, equations 1 (full) and 3 (low rank, without the mixture of experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.types import Integer, TowerParams
from models.towers.tower import Tower

Size = Annotated[Integer, Field(gt=0)]


class DCNv2Tower(Tower):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, then a linear projection; low rank: W_l = V_l U_l."""

    class Config(TowerParams):
        """``rank`` unset: full matrices."""

        num_layers: Size = 3
        rank: Size | None = None
        out_dim: Size = 64

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        dim = dense_dim + sum(embedding_dims)

        def cross() -> nn.Module:
            if config.rank is None:
                return nn.Linear(dim, dim)
            return nn.Sequential(nn.Linear(dim, config.rank, bias=False), nn.Linear(config.rank, dim))

        self.crosses = nn.ModuleList(cross() for _ in range(config.num_layers))
        self.projection = nn.Linear(dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""
        x0_BX = torch.cat((dense_BN, emb_BE), dim=1)
        x_BX = x0_BX
        for cross in self.crosses:
            x_BX = x0_BX * cross(x_BX) + x_BX
        result: Tensor = self.projection(x_BX)
        return result
