"""Mean binary cross-entropy and its gradient in one launch of one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def _cross_entropy_kernel(logit_ptr, label_ptr, loss_ptr, gradient_ptr, rows, TILES: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float32)
    for tile in range(TILES):
        row = tile * TILE + tl.arange(0, TILE)
        mask = row < rows
        logit = tl.load(logit_ptr + row, mask=mask, other=0.0)
        label = tl.load(label_ptr + row, mask=mask, other=0.0)
        small = tl.exp(-tl.abs(logit))
        log1p = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
        loss = tl.maximum(logit, 0.0) - logit * label + log1p
        total += tl.where(mask, loss, 0.0)
        positive = tl.where(logit >= 0, 1.0, small) / (1.0 + small)
        # A logit of nan or infinity makes a nan here too, as it does in the loss.
        tl.store(gradient_ptr + row, (positive - label) / rows, mask=mask)
    tl.store(loss_ptr, tl.sum(total) / rows)


def mean_cross_entropy(logit: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (scalar) and its gradient [B] for float32 ``logit`` [B] and ``label`` [B], both contiguous."""
    loss, gradient = torch.empty((), device=logit.device), torch.empty_like(logit)
    rows = logit.numel()
    _cross_entropy_kernel[(1,)](
        logit, label.contiguous(), loss, gradient, rows, TILES=triton.cdiv(rows, TILE), TILE=TILE, num_warps=16
    )
    return loss, gradient
