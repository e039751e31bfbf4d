"""Local losses: each a class with its ``Config``, called with (logit [B], label [B]), mean over the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from erase_rec.config.schema import Fraction, LossConfig, NonNegativeNumber, PositiveInt, PositiveNumber
from erase_rec.config.types import Params
from erase_rec.kernels.cross_entropy import cross_entropy
from erase_rec.protocols import LocalLoss
from models.layers import at_least_float32
from models.registry import component


class BCELoss:
    """Binary cross-entropy on the logit."""

    class Config(Params):
        """Nothing to set."""

    def __init__(self, config: Config) -> None:
        pass

    def __call__(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Scalar in the logit's precision, float32 at least."""
        return cross_entropy(at_least_float32(logit_B), label_B)


class FocalLoss:
    """Cross-entropy times (1 - p_t)^gamma, with class weights alpha_t; p_t is the label's probability.

    Lin et al., "Focal Loss for Dense Object Detection", arXiv 1708.02002, equations 4 and 5.
    """

    class Config(Params):
        """``alpha`` weighs label 1 and ``1 - alpha`` label 0; unset: no class weights."""

        gamma: NonNegativeNumber = 2.0
        alpha: Fraction | None = None

    def __init__(self, config: Config) -> None:
        self._gamma, self._alpha = config.gamma, config.alpha

    def __call__(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Scalar in the logit's precision, float32 at least; finite gradients for every finite logit."""
        logit_B = at_least_float32(logit_B)
        label_B = label_B.to(logit_B.dtype)
        cross_entropy_B = binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        # log(1 - p_t) as a log-sigmoid: the power itself has an infinite slope at p_t = 1 for gamma below 1.
        modulation_B = torch.exp(self._gamma * logsigmoid((1 - 2 * label_B) * logit_B))
        loss_B = modulation_B * cross_entropy_B
        if self._alpha is not None:
            loss_B = loss_B * (self._alpha * label_B + (1 - self._alpha) * (1 - label_B))
        return loss_B.mean()


class PairwiseLoss:
    """Cross-entropy plus an auxiliary ranking loss on pairs of rows of the batch with different labels.

    The ranking loss is the mean of -log sigmoid(s_clicked - s_not) (Rendle et al., "BPR", arXiv 1205.2618). Pairs are
    rows that lie 1, 2 ... ``shifts`` apart in the batch, round its end: linear in the rows, of fixed shapes, and as
    good as random, because rows are shuffled. They are those of one rank. Without a pair it is 0.
    """

    class Config(Params):
        """``weight`` of the ranking loss beside the cross-entropy; pairs a row."""

        weight: PositiveNumber = 0.1
        shifts: PositiveInt = 8

    def __init__(self, config: Config) -> None:
        self._weight, self._shifts = config.weight, config.shifts

    def __call__(self, logit_B: Tensor, label_B: Tensor) -> Tensor:
        """Scalar in the logit's precision, float32 at least."""
        logit_B = at_least_float32(logit_B)
        label_B = label_B.to(logit_B.dtype)
        total, pairs = logit_B.new_zeros(()), logit_B.new_zeros(())
        for shift in range(1, self._shifts + 1):
            # 1: this row was clicked and the other was not; -1: the other way round; 0: no pair.
            order_B = label_B - label_B.roll(shift)
            loss_B = softplus(-order_B * (logit_B - logit_B.roll(shift)))
            total = total + (order_B.square() * loss_B).sum()
            pairs = pairs + order_B.square().sum()
        return cross_entropy(logit_B, label_B) + self._weight * total / pairs.clamp(min=1)


def build_local_loss(config: LossConfig) -> LocalLoss:
    """The loss of ``config.kind``, before its weight; weight and target are the schedule's."""
    kind = component("local_loss", config.kind)
    loss: LocalLoss = kind(kind.Config(**config.params))
    return loss
