"""MaskNet: an instance-guided mask multiplies the layer-normalised embeddings.

Wang et al., "MaskNet", arXiv 2102.07619: the instance-guided mask, the layer norm of each feature's embedding,
and one MaskBlock on the feature embedding. The mask is guided by the dense features too.

Shapes: B rows, N dense features, F sparse features, D embedding dim, E = F * D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import ProjectedTowerParams
from models.kernels import own_kernel_applies
from models.kernels.linear import linear, product
from models.layers import MLP
from models.towers.tower import Tower, field_problems


class MaskNetTower(Tower):
    """MLP(ReLU(LN(W (mask * LN_EMB(e))))) with mask = W_2 ReLU(W_1 [dense; e] + b_1) + b_2.

    LN_EMB normalises each field over D, with a scale and a shift of its own.
    """

    class Config(ProjectedTowerParams):
        """``mask_hidden``: the mask's aggregation layer; ``hidden``: the block's output, then the MLP's layers."""

        mask_hidden: PositiveInt = 128
        hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128,)

        @property
        def liftable(self) -> int:
            """Those after the block."""
            return len(self.hidden)

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Fields of one dimension."""
            return field_problems("masknet", embedding_dims)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.fields, self.dim = len(embedding_dims), embedding_dims[0]
        emb_dim, block_dim = sum(embedding_dims), config.hidden[0]
        self.block_dim = block_dim
        self.mask = nn.Sequential(
            nn.Linear(dense_dim + emb_dim, config.mask_hidden), nn.ReLU(), nn.Linear(config.mask_hidden, emb_dim)
        )
        self.norm_scale = nn.Parameter(torch.ones(self.fields, self.dim))
        self.norm_shift = nn.Parameter(torch.zeros(self.fields, self.dim))
        self.block = nn.Sequential(nn.Linear(emb_dim, block_dim), nn.LayerNorm(block_dim), nn.ReLU())
        self.mlp = MLP(block_dim, (*config.hidden[1:], config.out_dim))
        self.out_dim = config.out_dim

    def lift(self, layers: int) -> nn.Module:
        """See :class:`Tower`."""
        top = self.mlp.lift(layers)
        self.out_dim = self.mlp.out_dim
        return top

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, F*D] -> [B, out_dim]."""
        result: Tensor
        if self.own_kernels and own_kernel_applies(emb_BE):
            from models.kernels.masked_norm import masked_norm_applies

            if masked_norm_applies(self.dim, self.block_dim):
                result = self.mlp(self._fused_block(dense_BN, emb_BE))
                return result
        mask_BE = self.mask(torch.cat((dense_BN, emb_BE), dim=1))
        field_BFD = emb_BE.reshape(-1, self.fields, self.dim)
        norm_BFD = nn.functional.layer_norm(field_BFD, (self.dim,)) * self.norm_scale + self.norm_shift
        result = self.mlp(self.block(mask_BE * norm_BFD.flatten(1)))
        return result

    def _fused_block(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """The block's output; biases go to the operation after their product, which sums their gradient on its way."""
        from models.kernels.masked_norm import masked_norm, norm_relu

        to_hidden, _, to_mask = self.mask
        to_block, norm, _ = self.block
        assert isinstance(to_hidden, nn.Linear)
        assert isinstance(to_mask, nn.Linear)
        assert isinstance(to_block, nn.Linear)
        assert isinstance(norm, nn.LayerNorm)
        hidden_BX = linear(torch.cat((dense_BN.to(emb_BE.dtype), emb_BE), dim=1), to_hidden, relu=True)
        mask_BE = product(hidden_BX, to_mask.weight)
        masked_BE = masked_norm(mask_BE, to_mask.bias, emb_BE, self.norm_scale, self.norm_shift)
        block_BX = product(masked_BE, to_block.weight)
        result: Tensor = norm_relu(block_BX, to_block.bias, norm.weight, norm.bias)
        return result
