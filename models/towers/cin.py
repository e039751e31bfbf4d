"""Compressed interaction network of xDeepFM.

Lian et al., "xDeepFM", arXiv 1803.05170, equations 6 to 8 (sum pooling, no activation).

Shapes: B rows, N dense features, F sparse features, D embedding dim, H feature maps, X any other width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedLastParams
from models.layers import project
from models.towers.tower import ProjectedTower, field_problems


class CINTower(ProjectedTower):
    """X^k_h = sum_ij W^{k,h}_ij (X^{k-1}_i * X^0_j); every X^k is summed over D, concatenated and projected."""

    class Config(ProjectedLastParams):
        """``layer_sizes``: feature maps H_k of each layer."""

        layer_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (32, 32)

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Fields of one dimension."""
            return field_problems("cin", embedding_dims)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        sizes = (self.fields, *config.layer_sizes)
        self.compress = nn.ModuleList(
            nn.Linear(sizes[k] * self.fields, sizes[k + 1], bias=False) for k in range(len(config.layer_sizes))
        )
        self.projection = nn.Linear(sum(config.layer_sizes) + dense_dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        x0_BDF = emb_BE.reshape(-1, self.fields, self.dim).transpose(1, 2)
        x_BDH = x0_BDF
        pooled = []
        for compress in self.compress:
            outer_BDX = (x_BDH.unsqueeze(3) * x0_BDF.unsqueeze(2)).flatten(2)
            x_BDH = compress(outer_BDX)
            pooled.append(x_BDH.sum(dim=1))
        pooled_BX = torch.cat(pooled, dim=1)
        return project(
            self.projection, torch.cat((pooled_BX, dense_BN.to(pooled_BX.dtype)), dim=1), own_kernels=self.own_kernels
        )
