"""A pre-layer-norm transformer block. Blocks chain: each reads the tokens that the one before it leaves.

Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, section 3; layer norm before each sublayer: Xiong et al.,
"On Layer Normalization in the Transformer Architecture", arXiv 2002.04745, figure 1(b), with GELU in the feed-forward
part. There is no position embedding: a token is a field, known by its table.

Shapes: B rows, T tokens, D token dim, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from erase_rec.config.schema import PositiveInt
from erase_rec.config.types import Boolean, Number, TowerParams
from models.towers.tower import Tower


class TransformerTower(Tower):
    """h = x + attention(LN(x)), then h + W_2 GELU(W_1 LN(h)), on the dense input and the embeddings as T tokens."""

    class Config(TowerParams):
        """The input is cut into tokens of ``dim`` columns; ``feed_forward``: hidden size in multiples of it."""

        dim: PositiveInt = 16
        heads: PositiveInt = 2
        feed_forward: PositiveInt = 4
        causal: Boolean = False
        """A token attends to itself and those before it."""
        fused: Boolean = True
        """Attention as one operation; false: as products, mask and softmax, which keep the [T, T] scores in memory."""
        dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
        """On the result of each sublayer."""

        def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
            """Whole tokens, whole heads."""
            problems = []
            if self.dim % self.heads:
                problems.append(f"transformer needs dim to be a multiple of heads, found {self.dim} and {self.heads}")
            if dense_dim % self.dim:
                problems.append(
                    f"transformer needs a dense input of whole tokens of dim {self.dim}, found {dense_dim} columns; "
                    "choose inputs.dense and inputs.towers, or another dim"
                )
            if uneven := sorted({dim for dim in embedding_dims if dim % self.dim}):
                problems.append(
                    f"transformer needs each embedding_dim to be a multiple of dim {self.dim}, found {uneven}"
                )
            return problems

        def output_dim(self, dense_dim: int, embedding_dims: Sequence[int]) -> int:
            """As many columns as it reads."""
            return dense_dim + sum(embedding_dims)

    def __init__(self, config: Config, dense_dim: int, embedding_dims: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.heads, self.causal, self.fused = config.dim, config.heads, config.causal, config.fused
        self.attention_norm = nn.LayerNorm(config.dim)
        self.query_key_value = nn.Linear(config.dim, 3 * config.dim)
        self.attention_output = nn.Linear(config.dim, config.dim)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        hidden = config.feed_forward * config.dim
        self.feed_forward = nn.Sequential(nn.Linear(config.dim, hidden), nn.GELU(), nn.Linear(hidden, config.dim))
        self.dropout = nn.Dropout(config.dropout)
        self.out_dim = config.output_dim(dense_dim, embedding_dims)
        self.tokens = self.out_dim // config.dim

    def forward(self, dense_BN: Tensor, emb_BE: Tensor) -> Tensor:
        """[B, N], [B, E] -> [B, T * D] with T * D = N + E: the dense input's tokens, then the fields'."""
        token_BTD = torch.cat((dense_BN, emb_BE), dim=1).reshape(-1, self.tokens, self.dim)
        token_BTD = token_BTD + self.dropout(self._attention(self.attention_norm(token_BTD)))
        token_BTD = token_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(token_BTD)))
        result: Tensor = token_BTD.flatten(1)
        return result

    def _attention(self, token_BTD: Tensor) -> Tensor:
        merged = self.query_key_value(token_BTD).reshape(-1, self.tokens, 3, self.heads, self.dim // self.heads)
        query_BHTK, key_BHTK, value_BHTK = merged.permute(2, 0, 3, 1, 4)
        if self.fused:
            attended_BHTK = scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=self.causal)
        else:
            score_BHTT = query_BHTK @ key_BHTK.transpose(-1, -2) * (self.dim // self.heads) ** -0.5
            if self.causal:
                later_TT = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=score_BHTT.device).triu(1)
                score_BHTT = score_BHTT.masked_fill(later_TT, -torch.inf)
            attended_BHTK = score_BHTT.softmax(dim=-1) @ value_BHTK
        result: Tensor = self.attention_output(attended_BHTK.transpose(1, 2).flatten(2))
        return result
