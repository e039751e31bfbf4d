"""Two MLP streams joined by a multi-head bilinear fusion.

Mao et al., "FinalMLP", arXiv 2304.00902: stream-specific feature selection (gated by learned parameters, the paper's
context-free case), two MLPs, and the multi-head form of the bilinear fusion
b + w_1 o_1 + w_2 o_2 + o_1 W_3 o_2. A tower ends in a vector, so each output has weights of its own.

Shapes: B rows, N dense features, E sum of embedding dims, K heads, I and J head dims of the streams, O outputs,
X any other width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedTowerParams
from models.layers import MLP
from models.towers.tower import Tower


class BilinearTower(Tower):
    """b + w_1 o_1 + w_2 o_2 + sum over heads k of o_1k W_k o_2k, as a vector of ``out_dim``.

    Each stream's input is multiplied by 2 sigmoid(g) with learned g, so that the streams see different views.
    """

    class Config(ProjectedTowerParams):
        """Sizes of both streams; their last size must split into ``num_heads``."""

        hidden1: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64)
        hidden2: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64)
        num_heads: PositiveInt = 2

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Heads divide both streams' last size."""
            return [
                f"{name}: the last size {sizes[-1]} does not split into num_heads={self.num_heads}"
                for name, sizes in (("hidden1", self.hidden1), ("hidden2", self.hidden2))
                if sizes[-1] % self.num_heads
            ]

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        dim = dense_dim + sum(embedding_dims)
        self.num_heads = config.num_heads
        self.gate1 = nn.Parameter(0.01 * torch.randn(dim))
        self.gate2 = nn.Parameter(0.01 * torch.randn(dim))
        self.stream1 = MLP(dim, config.hidden1)
        self.stream2 = MLP(dim, config.hidden2)
        self.linear1 = nn.Linear(self.stream1.out_dim, config.out_dim)
        self.linear2 = nn.Linear(self.stream2.out_dim, config.out_dim, bias=False)
        size1, size2 = self.stream1.out_dim // self.num_heads, self.stream2.out_dim // self.num_heads
        self.size1, self.size2 = size1, size2
        self.fusion = nn.Parameter(torch.empty(self.num_heads, size1, config.out_dim, size2))
        nn.init.normal_(self.fusion, std=(size1 * size2 * self.num_heads) ** -0.5)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, out_dim]."""
        x_BX = torch.cat((dense_BN, emb_BE), dim=1)
        h1_BX = self.stream1(x_BX * (2 * torch.sigmoid(self.gate1)))
        h2_BX = self.stream2(x_BX * (2 * torch.sigmoid(self.gate2)))
        h1_BKI = h1_BX.reshape(x_BX.shape[0], self.num_heads, self.size1)
        h2_BKJ = h2_BX.reshape(x_BX.shape[0], self.num_heads, self.size2)
        product_BO = torch.einsum("bki,kioj,bkj->bo", h1_BKI, self.fusion, h2_BKJ)
        result: Tensor = self.linear1(h1_BX) + self.linear2(h2_BX) + product_BO
        return result
