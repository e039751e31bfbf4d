"""The over-arch: an MLP on the towers' outputs, with the local logits as inputs or as additive terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import OverArchConfig
from models.heads import LogitHead
from models.layers import MLP, missing_columns, side_by_side


class OverArch(nn.Module):
    """logit = head(MLP([z_1 .. z_T (; logit_1 .. logit_T); 0 ..])) (+ sum of logit_i).

    Zero columns align the width of the input (:data:`models.layers.ALIGNMENT`), on every device and in every precision.
    Implements :class:`erase_rec.protocols.OverArch`.
    """

    def __init__(self, config: OverArchConfig, out_dims: Sequence[int]) -> None:
        """Builds the MLP for towers whose outputs have ``out_dims`` columns."""
        super().__init__()
        self.logits = config.logits
        in_dim = sum(out_dims) + (len(out_dims) if config.logits == "inputs" else 0)
        self.zero_columns = missing_columns(in_dim)
        self.mlp = MLP(in_dim + self.zero_columns, config.hidden, dropout=config.dropout)
        self.head = LogitHead(self.mlp.out_dim)

    def forward(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """[B, out_dim] and [B] a tower -> logit [B], float32 at least."""
        parts = list(outputs)
        if self.logits == "inputs":
            parts.append(torch.stack(tuple(logits), dim=1).to(outputs[0].dtype))
        logit_B: Tensor = self.head(self.mlp(side_by_side(parts, self.zero_columns)))
        if self.logits == "additive":
            logit_B = torch.stack((logit_B, *logits)).sum(dim=0)
        return logit_B
