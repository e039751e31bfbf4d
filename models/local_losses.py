"""Local losses: each a class with its ``Config``, called with (logit [B], label [B]), mean over the batch."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.config.types import Number, Params


class BCELoss:
    """Binary cross-entropy on the logit."""

    class Config(Params):
        """Nothing to set."""

    def __init__(self, config: Config) -> None:
        pass

    def __call__(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Scalar in the logit's precision, float32 at least."""
        logit_B = at_least_float32(logit_B)
        return binary_cross_entropy_with_logits(logit_B, label_B.to(logit_B.dtype))


class FocalLoss:
    """Cross-entropy times (1 - p_t)^gamma, class-weighted by alpha.

    Lin et al., "Focal Loss for Dense Object Detection", arXiv 1708.02002, equation 5.
    """

    class Config(Params):
        """``alpha`` weighs label 1, ``1 - alpha`` label 0; unset: no class weights."""

        gamma: Annotated[Number, Field(ge=0)] = 2.0
        alpha: Annotated[Number, Field(gt=0, lt=1)] | None = None

    def __init__(self, config: Config) -> None:
        self._gamma, self._alpha = config.gamma, config.alpha

    def __call__(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Scalar in the logit's precision, float32 at least."""
        logit_B = at_least_float32(logit_B)
        label_B = label_B.to(logit_B.dtype)
        cross_entropy_B = binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        p_t_B = torch.exp(-cross_entropy_B)
        loss_B = (1 - p_t_B).clamp_min(0) ** self._gamma * cross_entropy_B
        if self._alpha is not None:
            loss_B = loss_B * (self._alpha * label_B + (1 - self._alpha) * (1 - label_B))
        return loss_B.mean()


def at_least_float32(x: Tensor) -> Tensor:
    """Half precisions become float32; float64 stays."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x
