"""The over-arch: an MLP on the towers' outputs, with the local logits as inputs or as additive terms.

Shapes: B rows, T towers, X any width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from erase_rec.config.schema import OverArchConfig
from models.heads import LogitHead
from models.layers import MLP, missing_columns, side_by_side


class OverArch(nn.Module):
    """logit = head(h) (+ sum of g_i * logit_i) with h = MLP([z_1 .. z_T (; logit_1 .. logit_T); 0 ..]).

    ``additive``: every g_i is 1. ``gated``: g = 2 sigmoid(W h + b), one factor a row and tower, which starts as 1.
    Zero columns align the width of the input (:data:`models.layers.ALIGNMENT`), on every device and in every precision.
    The last layers of a tower that is cut below them (``towers[].cut_at``) are part of the over-arch: they come after
    the cut, and its loss trains them. Implements :class:`erase_rec.protocols.OverArch`.
    """

    def __init__(
        self, config: OverArchConfig, out_dims: Sequence[int], lifted: Mapping[int, nn.Module] | None = None
    ) -> None:
        """Builds the MLP for towers whose outputs have ``out_dims`` columns.

        Args:
            config: its form.
            out_dims: columns of each tower's output, after its lifted layers where it has some.
            lifted: layers above a tower's cut, by the tower's position.
        """
        super().__init__()
        self.logits = config.logits
        in_dim = sum(out_dims) + (len(out_dims) if config.logits == "inputs" else 0)
        self.zero_columns = missing_columns(in_dim)
        self.mlp = MLP(in_dim + self.zero_columns, config.hidden, dropout=config.dropout)
        self.head = LogitHead(self.mlp.out_dim)
        self.gate: nn.Linear | None = None
        if config.logits == "gated":
            self.gate = nn.Linear(self.mlp.out_dim, len(out_dims))
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)
        self._lifted_at = tuple(lifted or ())
        self.lifted = nn.ModuleList((lifted or {}).values())

    def forward(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """[B, X] and [B] a tower -> logit [B], float32 at least."""
        hidden_BX = self._hidden(outputs, logits)
        logit_B: Tensor = self.head(hidden_BX)
        if self.gate is not None:
            return torch.stack((logit_B, *self._gated(hidden_BX, logits))).sum(dim=0)
        if self.logits == "additive":
            logit_B = torch.stack((logit_B, *logits)).sum(dim=0)
        return logit_B

    def terms(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor | None:
        """What each tower's logit adds to the logit, [T, B]; None where logits are not added."""
        if self.gate is not None:
            return torch.stack(self._gated(self._hidden(outputs, logits), logits))
        return torch.stack(tuple(logits)) if self.logits == "additive" else None

    def _hidden(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        parts = list(outputs)
        for position, layers in zip(self._lifted_at, self.lifted, strict=True):
            parts[position] = layers(parts[position])
        if self.logits == "inputs":
            parts.append(torch.stack(tuple(logits), dim=1).to(outputs[0].dtype))
        hidden_BX: Tensor = self.mlp(side_by_side(parts, self.zero_columns))
        return hidden_BX

    def _gated(self, hidden_BX: Tensor, logits: Sequence[Tensor]) -> list[Tensor]:
        assert self.gate is not None
        gates_BT = 2 * torch.sigmoid(self.gate(hidden_BX))
        return [gate_B * logit_B for gate_B, logit_B in zip(gates_BT.unbind(dim=1), logits, strict=True)]
