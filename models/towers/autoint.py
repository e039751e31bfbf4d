"""AutoInt: multi-head self-attention over fields.

Song et al., "AutoInt", arXiv 1810.11921, equations 5 to 8 (no scaling of the scores).

Shapes: B rows, N dense features, F sparse features, D embedding dim, E = F * D, H heads, K head dim, X any other width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedLastParams
from models.kernels import own_kernel_applies
from models.layers import project, side_by_side
from models.towers.tower import ProjectedTower, field_problems


class AutoIntTower(ProjectedTower):
    """ReLU(attention(e) + W_res e) a layer, then a linear projection of all fields (and the dense features)."""

    class Config(ProjectedLastParams):
        """A layer's output is ``num_heads * head_dim`` a field."""

        num_layers: PositiveInt = 1
        num_heads: PositiveInt = 2
        head_dim: PositiveInt = 16

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Fields of one dimension."""
            return field_problems("autoint", embedding_dims)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        width = config.num_heads * config.head_dim
        sizes = [self.dim, *[width] * config.num_layers]
        self.layers = nn.ModuleList(
            AttentionLayer(size, config.num_heads, config.head_dim) for size in sizes[: config.num_layers]
        )
        self.projection = nn.Linear(len(embedding_dims) * width + dense_dim, config.out_dim)
        self.out_dim = config.out_dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        field_BFD = emb_BE.reshape(-1, self.fields, self.dim)
        for layer in self.layers:
            field_BFD = layer(field_BFD, own_kernels=self.own_kernels)
        flat_BX = field_BFD.flatten(1)
        # Without dense columns nothing is copied: the fields are by far the larger part.
        parts = (flat_BX, dense_BN.to(flat_BX.dtype)) if dense_BN.shape[1] else (flat_BX,)
        return project(self.projection, side_by_side(parts), own_kernels=self.own_kernels)


class AttentionLayer(nn.Module):
    """One interacting layer. Attention is written out: 26 fields are too few for a general fused kernel to pay."""

    def __init__(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.query_key_value_residual = nn.Linear(dim, 4 * num_heads * head_dim, bias=False)

    def forward(self, field_BFD: Tensor, *, own_kernels: bool = False) -> Tensor:
        """[B, F, D] -> [B, F, H * K] with H heads of dimension K."""
        if own_kernels and own_kernel_applies(field_BFD):
            from models.kernels.attention import attention_applies, field_attention

            weight = self.query_key_value_residual.weight
            if attention_applies(field_BFD, weight, self.num_heads):
                return field_attention(field_BFD, weight, self.num_heads)
        projected = self.query_key_value_residual(field_BFD)
        query, key, value, residual_BFX = projected.chunk(4, dim=2)
        query_BHFK, key_BHFK, value_BHFK = (self._split(x) for x in (query, key, value))
        weight_BHFF = torch.softmax(query_BHFK @ key_BHFK.transpose(2, 3), dim=3)
        attended_BFX = (weight_BHFF.to(value_BHFK.dtype) @ value_BHFK).transpose(1, 2).flatten(2)
        result: Tensor = torch.relu(attended_BFX + residual_BFX)
        return result

    def _split(self, x_BFX: Tensor) -> Tensor:
        batch, fields, _ = x_BFX.shape
        return x_BFX.reshape(batch, fields, self.num_heads, self.head_dim).transpose(1, 2)
