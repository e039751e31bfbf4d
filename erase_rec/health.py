"""Signs that a model does not learn, read from the metrics of a training window."""

from __future__ import annotations

from collections.abc import Mapping

CONSTANT_STD = 1e-6
"""Predictions that vary less than this are constant: float32 noise stays below, any learned signal above."""


def health_warnings(window: Mapping[str, float]) -> list[str]:
    """Says which of the model and the towers predict a constant, or no better than one.

    Meant for windows after the learning rate's warm-up. The same problem gives the same sentence, so that a caller
    can say each once. nan is no sign of anything.

    Args:
        window: what :meth:`erase_rec.protocols.ProgressiveMetrics.window` gave; reads ``train/ne``,
            ``train/prediction_std``, ``tower/<name>/ne`` and ``tower/<name>/prediction_std``.
    """
    warnings = []
    for tag, value in window.items():
        block, _, metric = tag.rpartition("/")
        name = "the model" if block == "train" else f"tower {block.removeprefix('tower/')}"
        if metric == "prediction_std" and value < CONSTANT_STD:
            warnings.append(
                f"{name} predicts the same value for every row ({block}/prediction_std is below {CONSTANT_STD:g}); "
                "its inputs do not reach it or its units are dead: check towers[].inputs and lower the learning rate"
            )
        if metric == "ne" and value >= 1.0:
            warnings.append(
                f"{name} is no better than a constant prediction ({block}/ne is 1 or more); "
                "lower optimizer.dense.lr and optimizer.sparse.lr, or train longer"
            )
    return warnings
