"""The metrics. To add one: a function in a file of ``eval/`` and a line here.

A registered metric is in every evaluation: in TensorBoard as ``eval/<name>``, in ``metrics.jsonl``, and beside
the fixed ones in ``summary.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from eval import metrics

SUM_METRICS: Mapping[str, Callable[[metrics.ClickSums], float]] = {
    "ne": metrics.normalized_entropy,
    "logloss": metrics.logloss,
    "calibration": metrics.calibration,
    "base_rate": metrics.base_rate,
    "prediction_std": metrics.prediction_std,
}
"""Metrics of sums: also reported while training, as ``train/<name>``."""

ROW_METRICS: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "auc": metrics.auc,
    "accuracy": metrics.accuracy,
}
"""Metrics that need all rows at once: (logit [n], label [n]), both on the host."""
