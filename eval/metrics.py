"""Metrics of click predictions: pure functions of sums, and AUC of pooled rows.

Cross-entropies are in nats and are computed from logits, so that a saturated prediction costs what it should
instead of what a clamp allows. Normalized entropy (NE) is He et al., "Practical Lessons from Predicting Clicks on
Ads at Facebook", ADKDD 2014, section 2. A metric that the rows leave undefined is nan; nothing here raises for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from erase_rec.kernels import triton_applies


@dataclass(frozen=True)
class ClickSums:
    """Sums over rows; windows, batches and ranks are pooled by adding them, never by averaging metrics.

    Attributes:
        rows: number of rows.
        positives: sum of labels.
        cross_entropy: sum of cross-entropies, nats.
        prediction: sum of predictions.
        squared_prediction: sum of squared predictions.
    """

    rows: float
    positives: float
    cross_entropy: float
    prediction: float
    squared_prediction: float


def cross_entropy(logit: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of each row in nats, in the logit's dtype; exact for logits of any size.

    Args:
        logit: [..., B].
        label: [B], 0 or 1.
    """
    return -functional.logsigmoid((2.0 * label - 1.0) * logit)


def click_sums(logit: Tensor, label: Tensor) -> Tensor:
    """Sums of one batch, float64 [..., 5] in the order of :class:`ClickSums`, on the logit's device.

    Does not synchronise the host.

    Args:
        logit: [..., B], any floating dtype; leading dimensions are models scored on the same rows.
        label: [B], 0 or 1.
    """
    logit, label = logit.double(), label.double()
    prediction = logit.sigmoid()
    models = logit.shape[:-1]
    return torch.stack(
        (
            logit.new_full(models, logit.shape[-1]),
            label.sum().expand(models),
            cross_entropy(logit, label).sum(-1),
            prediction.sum(-1),
            torch.linalg.vecdot(prediction, prediction),
        ),
        dim=-1,
    )


def add_click_sums(total: Tensor, logit: Tensor, label: Tensor) -> None:
    """Adds the sums of one batch to ``total``, on the current stream and without synchronising the host.

    One kernel on CUDA. There the cross-entropy of a row is exact to 1e-16, which is less than a float64 sum keeps.

    Args:
        total: float64 [models, 5].
        logit: [models, B], any floating dtype.
        label: [B], 0 or 1.
    """
    if triton_applies(logit):
        from erase_rec.kernels.click_sums_triton import add_click_sums_fused

        add_click_sums_fused(total, logit, label)
    else:
        total += click_sums(logit, label)


def base_rate(sums: ClickSums) -> float:
    """Share of positive labels; nan without rows."""
    return _ratio(sums.positives, sums.rows)


def logloss(sums: ClickSums) -> float:
    """Mean cross-entropy in nats; defined for one class, nan without rows."""
    return _ratio(sums.cross_entropy, sums.rows)


def normalized_entropy(sums: ClickSums, rate: float | None = None) -> float:
    """Cross-entropy over that of a constant prediction; below 1 is better than the constant.

    nan unless both classes were seen.

    Args:
        sums: of the rows.
        rate: the constant; None: the rows' own base rate, which no other constant is better than.
    """
    negatives = sums.rows - sums.positives
    if sums.positives <= 0 or negatives <= 0:
        return math.nan
    rate = sums.positives / sums.rows if rate is None else rate
    if not 0 < rate < 1:
        return math.nan
    constant = -sums.positives * math.log(rate) - negatives * math.log1p(-rate)
    return sums.cross_entropy / constant


def calibration(sums: ClickSums) -> float:
    """Predicted over observed clicks, 1 is right; nan without a positive label."""
    return _ratio(sums.prediction, sums.positives)


def prediction_std(sums: ClickSums) -> float:
    """Standard deviation of the predictions over the rows; nan with fewer than two.

    Sums in float64 leave an error near 1e-8 times the mean prediction: read anything below as constant.
    """
    if sums.rows < 2:
        return math.nan  # a single row says nothing of spread, and must not look like a constant model
    mean = _ratio(sums.prediction, sums.rows)
    return math.sqrt(max(_ratio(sums.squared_prediction, sums.rows) - mean * mean, 0.0))


def auc(score: Tensor, label: Tensor) -> float:
    """Area under the ROC curve, exact: the share of (positive, negative) pairs in order, a tie counting half.

    Counts pairs in integers, so the result does not depend on the order of the rows.

    Args:
        score: [n], any floating dtype; a logit does as well as a prediction.
        label: [n], 0 or 1.

    Returns:
        nan unless both classes are there and no score is nan.
    """
    positives = int(label.sum(dtype=torch.float64))
    negatives = label.numel() - positives
    if positives == 0 or negatives == 0 or bool(score.isnan().any()):
        return math.nan
    _, group, group_rows = torch.unique(score, return_inverse=True, return_counts=True)
    group_positives = torch.bincount(group[label > 0], minlength=group_rows.numel())
    group_negatives = group_rows - group_positives
    negatives_below = group_negatives.cumsum(0) - group_negatives
    twice_ordered = int((group_positives * (2 * negatives_below + group_negatives)).sum())
    return twice_ordered / (2 * positives * negatives)


def accuracy(logit: Tensor, label: Tensor) -> float:
    """Share of rows on the right side of prediction 0.5, which itself counts as a click.

    Says little where clicks are rare, as the constant prediction 0 has 1 - base rate.

    Args:
        logit: [n], any floating dtype.
        label: [n], 0 or 1.

    Returns:
        nan without rows, and where a logit is nan.
    """
    if label.numel() == 0 or bool(logit.isnan().any()):
        return math.nan
    return int(((logit >= 0) == (label > 0)).sum()) / label.numel()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
