"""The over-arch: an MLP on the towers' outputs, with the local logits as inputs or as additive terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import OverArchConfig
from models.layers import MLP
from models.local_losses import at_least_float32


class OverArch(nn.Module):
    """logit = MLP([z_1 .. z_T (; logit_1 .. logit_T)]) (+ sum of logit_i)."""

    def __init__(self, config: OverArchConfig, out_dims: Sequence[int]) -> None:
        """Builds the MLP for towers of ``out_dims``."""
        super().__init__()
        self.logits = config.logits
        in_dim = sum(out_dims) + (len(out_dims) if config.logits == "inputs" else 0)
        self.mlp = MLP(in_dim, config.hidden, dropout=config.dropout)
        self.head = nn.Linear(self.mlp.out_dim, 1)

    def forward(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """[B, out_dim] and [B] a tower -> logit [B], float32 at least."""
        parts = list(outputs)
        if self.logits == "inputs":
            parts += [logit_B.unsqueeze(1).to(outputs[0].dtype) for logit_B in logits]
        logit_B = at_least_float32(self.head(self.mlp(torch.cat(parts, dim=1))).squeeze(1))
        if self.logits == "additive":
            for tower_logit_B in logits:
                logit_B = logit_B + tower_logit_B
        return logit_B
