"""Mean binary cross-entropy of logits, with its gradient from the same pass on CUDA.

PyTorch's operation is a dozen launches forward and backward, each on the path from a tower's forward to its backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.kernels import triton_applies
from erase_rec.kernels.unit import is_unit

LARGEST = 65536
"""Rows up to which one program, which adds in a fixed order, is quick enough."""


def cross_entropy(logit: Tensor, label: Tensor) -> Tensor:
    """``binary_cross_entropy_with_logits`` with a mean over the batch.

    Args:
        logit: [B], float32 or float64.
        label: [B], float, from 0 to 1; no gradient flows to it.

    Returns:
        Scalar in the logit's dtype.
    """
    label = label.to(logit.dtype)
    if logit.dtype == torch.float32 and logit.numel() <= LARGEST and triton_applies(logit):
        loss: Tensor = _CrossEntropy.apply(logit.contiguous(), label)
        return loss
    return binary_cross_entropy_with_logits(logit, label)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the gradient that the forward computed."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logit: Tensor, label: Tensor) -> Tensor:
        from erase_rec.kernels.cross_entropy_triton import mean_cross_entropy

        loss, gradient = mean_cross_entropy(logit, label)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient if is_unit(outer) else gradient * outer, None
