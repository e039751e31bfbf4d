"""Signs that a model or a tower does not learn, read from the metrics of a training window or an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from erase_rec.protocols import EvalResult

CONSTANT_STD = 1e-6
"""Predictions that vary less than this are constant: float32 noise stays below, any learned signal above."""

DEAD_SHARE = 1e-3
"""A tower whose terms are a smaller share of the logit's moves no prediction in the third digit."""
WORTHLESS = 1e-5
"""A tower without which NE rises by less than this, relatively, is not missed; 20 times as much counts in the field."""
DUPLICATE = 0.999
"""Two logits with a larger absolute correlation leave 0.2 % of each other's variance unexplained."""


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


def tower_warnings(result: EvalResult) -> list[str]:
    """Says which towers have no part in the model's logit, and which are another's double.

    Args:
        result: of an evaluation after training; what it does not know is no sign of anything.
    """
    return [*_dead(result), *_duplicates(result)]


def _dead(result: EvalResult) -> Iterator[str]:
    way_out = "train it longer or with a larger loss.weight, give it other inputs, or take it out"
    for name, tower in result.towers.items():
        if tower.get("share", 1.0) < DEAD_SHARE:
            share = 100 * tower["share"]
            yield f"tower {name} is {share:.2g} % of the final logit (share; dead below 0.1 %); {way_out}"
        elif tower.get("ne_without", math.inf) / result.ne - 1 < WORTHLESS:
            yield (
                f"tower {name} is not missed: NE is {result.ne:.5f} with it and {tower['ne_without']:.5f} without it; "
                f"{way_out}"
            )


def _duplicates(result: EvalResult) -> Iterator[str]:
    said: set[frozenset[str]] = set()
    for name, other in result.most_like.items():
        correlation, pair = result.towers[name]["correlation"], frozenset((name, other))
        if correlation > DUPLICATE and pair not in said:
            said.add(pair)
            yield (
                f"towers {name} and {other} say the same: the correlation of their logits is {correlation:.5f} "
                f"(double above {DUPLICATE}); give one other inputs or another kind, or take it out"
            )
