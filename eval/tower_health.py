"""What part each tower has in the model's logit, from held-out rows.

Shapes: T towers, n rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eval.metrics import ClickSums, click_sums, normalized_entropy


def tower_health(
    logit: Tensor,
    tower_logits: Tensor,
    label: Tensor,
    *,
    terms: Tensor | None = None,
    without: Tensor | None = None,
    rate: float | None = None,
) -> tuple[list[dict[str, float]], list[int | None]]:
    """Share of the logit, NE without the tower, and likeness to other towers.

    Args:
        logit: [n], the model's.
        tower_logits: [T, n].
        label: [n].
        terms: [T, n], what each tower's logit adds to the model's; the over-arch's own term is the rest.
        without: [T, n], the model's logit without each tower.
        rate: the constant prediction of NE's denominator; None: the rows' own base rate.

    Returns:
        Of each tower ``share``, ``ne_without`` and ``correlation`` (the largest absolute one of its logit with another
        tower's), as far as known; and the position of that other tower. A constant logit has no correlation.
    """
    health: list[dict[str, float]] = [{} for _ in tower_logits]
    if terms is not None and logit.numel():
        sizes = [float(term.double().abs().sum()) for term in (*terms, logit.double() - terms.double().sum(dim=0))]
        for found, size in zip(health, sizes, strict=False):
            found["share"] = size / sum(sizes) if sum(sizes) else math.nan
    if without is not None:
        for found, of_tower in zip(health, without, strict=True):
            found["ne_without"] = normalized_entropy(ClickSums(*click_sums(of_tower, label).tolist()), rate)
    most_like: list[int | None] = [None] * len(health)
    if len(health) > 1 and logit.numel() > 1:
        alike = torch.corrcoef(tower_logits.double()).abs().fill_diagonal_(-1.0).nan_to_num(nan=-1.0)
        for position, (found, row) in enumerate(zip(health, alike, strict=True)):
            correlation, other = row.max(dim=0)
            if correlation >= 0:
                found["correlation"], most_like[position] = float(correlation), int(other)
    return health, most_like
