"""MaskNet: an instance-guided mask multiplies the layer-normalised embeddings.

Wang et al., "MaskNet", arXiv 2102.07619, equations 4 to 6 (serial MaskBlock on feature embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.types import Integer, TowerParams
from models.layers import MLP
from models.towers.tower import Tower

Size = Annotated[Integer, Field(gt=0)]


class MaskNetTower(Tower):
    """hidden = ReLU(LN(W (LN(e) * mask))), mask = W_2 ReLU(W_1 [dense; e])."""

    class Config(TowerParams):
        """``mask_hidden``: the aggregation layer; ``hidden``: block outputs before the last projection."""

        mask_hidden: Size = 128
        hidden: tuple[Size, ...] = (128,)
        out_dim: Size = 64

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """There must be embeddings to mask."""
            return [] if embedding_dims else ["masknet needs at least 1 sparse feature, found none"]

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        dim = sum(embedding_dims)
        self.mask = nn.Sequential(
            nn.Linear(dense_dim + dim, config.mask_hidden), nn.ReLU(), nn.Linear(config.mask_hidden, dim)
        )
        self.norm = nn.LayerNorm(dim)
        first = config.hidden[0] if config.hidden else config.out_dim
        self.block = nn.Sequential(nn.Linear(dim, first), nn.LayerNorm(first), nn.ReLU())
        rest = (*config.hidden[1:], config.out_dim) if config.hidden else ()
        self.projection = MLP(first, rest)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""
        mask_BE = self.mask(torch.cat((dense_BN, emb_BE), dim=1))
        masked_BE = mask_BE * self.norm(emb_BE)
        result: Tensor = self.projection(self.block(masked_BE))
        return result
