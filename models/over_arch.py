"""The over-arch: an MLP on the towers' outputs, with the local logits as inputs or as additive terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import OverArchConfig
from models.heads import LogitHead
from models.layers import MLP


class OverArch(nn.Module):
    """logit = head(MLP([z_1 .. z_T (; logit_1 .. logit_T)])) (+ sum of logit_i).

    Implements :class:`erase_rec.protocols.OverArch`.
    """

    def __init__(self, config: OverArchConfig, out_dims: Sequence[int]) -> None:
        """Builds the MLP for towers whose outputs have ``out_dims`` columns."""
        super().__init__()
        self.logits = config.logits
        in_dim = sum(out_dims) + (len(out_dims) if config.logits == "inputs" else 0)
        self.mlp = MLP(in_dim, config.hidden, dropout=config.dropout)
        self.head = LogitHead(self.mlp.out_dim)

    def forward(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """[B, out_dim] and [B] a tower -> logit [B], float32 at least."""
        parts = list(outputs)
        if self.logits == "inputs":
            parts.append(torch.stack(tuple(logits), dim=1).to(outputs[0].dtype))
        logit_B: Tensor = self.head(self.mlp(torch.cat(parts, dim=1)))
        if self.logits == "additive":
            logit_B = torch.stack((logit_B, *logits)).sum(dim=0)
        return logit_B
