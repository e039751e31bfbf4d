"""What one arm's normalized entropy is against a reference's, on the same held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eval.metrics import ClickSums, auc, calibration, click_sums, cross_entropy, logloss, normalized_entropy
from eval.statistics import (
    Interval,
    block_sums,
    joined,
    ratio_over_blocks,
    studentized_bootstrap,
    t_interval,
)

_COLOURS = ("#0072B2", "#D55E00")
"""Blue and vermilion of Okabe and Ito's palette, which colour-blind readers tell apart."""


@dataclass(frozen=True)
class ScoredRun:
    """The held-out rows of one run.

    Attributes:
        row_ids: int64 [n], ascending.
        label: float64 [n], 0 or 1.
        logit: float64 [n], of the model.
        towers: local logits, float64 [n] a tower.
    """

    row_ids: Tensor
    label: Tensor
    logit: Tensor
    towers: Mapping[str, Tensor]

    def same_rows(self, other: ScoredRun) -> bool:
        """Whether both runs scored the same rows."""
        return torch.equal(self.row_ids, other.row_ids) and torch.equal(self.label, other.label)


@dataclass(frozen=True)
class Arm:
    """Metrics of one arm, means over its seeds.

    Attributes:
        ne: mean over seeds, with Student's interval.
        auc: mean.
        logloss: mean, nats.
        calibration: mean of predicted over observed clicks.
        towers: mean NE of each tower's local logit.
    """

    ne: Interval
    auc: float
    logloss: float
    calibration: float
    towers: dict[str, float]


@dataclass(frozen=True)
class Gap:
    """NE of an arm against the reference, in per cent of the reference's; below zero the arm is better.

    Attributes:
        seeds: the paired seeds.
        rows: held-out rows of a pair.
        by_seed: gap of each pair.
        over_seeds: mean over pairs with Student's interval: another choice of seeds.
        over_seeds_bootstrap: the same by the studentized bootstrap.
        over_rows: pooled over pairs with the block bootstrap's interval: another choice of rows.
        total: both sources of chance together.
    """

    seeds: tuple[int, ...]
    rows: int
    by_seed: tuple[float, ...]
    over_seeds: Interval
    over_seeds_bootstrap: Interval
    over_rows: Interval
    total: Interval


def summarize(runs: Sequence[ScoredRun]) -> Arm:
    """Metrics of at least one run of an arm."""
    sums = [ClickSums(*click_sums(run.logit, run.label).tolist()) for run in runs]
    names = [name for name in runs[0].towers if all(name in run.towers for run in runs)]
    return Arm(
        ne=t_interval(np.array([normalized_entropy(each) for each in sums])),
        auc=_mean([auc(run.logit, run.label) for run in runs]),
        logloss=_mean([logloss(each) for each in sums]),
        calibration=_mean([calibration(each) for each in sums]),
        towers={name: _mean([ne_of(run.towers[name], run.label) for run in runs]) for name in names},
    )


def compare(arm: Mapping[int, ScoredRun], reference: Mapping[int, ScoredRun]) -> Gap:
    """The NE gap between runs of the same seeds.

    NE's denominator depends on the rows alone, so on the same rows the ratio of NEs is that of cross-entropies.

    Args:
        arm: by seed; the same seeds as ``reference``, and for each seed the same rows.
        reference: by seed.
    """
    assert arm.keys() == reference.keys()
    assert all(run.same_rows(reference[seed]) for seed, run in arm.items())
    seeds = tuple(sorted(arm))
    pairs = [(arm[seed], reference[seed]) for seed in seeds]
    ours, theirs = (
        [block_sums(cross_entropy(pair[side].logit, pair[side].label).numpy()) for pair in pairs] for side in (0, 1)
    )
    by_seed = np.array([100 * (own.sum() / other.sum() - 1) for own, other in zip(ours, theirs, strict=True)])
    same_rows = all(run.same_rows(pairs[0][0]) for run, _ in pairs)
    blocks = min(len(sums) for sums in ours)
    if len({len(sums) for sums in ours}) > 1:  # splits that depend on the seed may be a few rows apart
        ours, theirs = ([block_sums(sums, blocks) for sums in side] for side in (ours, theirs))
    ratio = ratio_over_blocks(np.stack(ours), np.stack(theirs), same_rows=same_rows)
    over_rows = Interval(*(100 * (bound - 1) for bound in (ratio.low, ratio.mid, ratio.high)))
    over_seeds = t_interval(by_seed)
    return Gap(
        seeds=seeds,
        rows=len(pairs[0][0].label),
        by_seed=tuple(by_seed.tolist()),
        over_seeds=over_seeds,
        over_seeds_bootstrap=studentized_bootstrap(by_seed),
        over_rows=over_rows,
        total=joined(over_seeds, over_rows),
    )


def plot_gaps(gaps: Mapping[str, Gap], reference: str, path: Path) -> None:
    """Draws each arm's gap with its intervals; the file's ending says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 0.5 * len(gaps)), layout="constrained")
    axes = figure.subplots()
    names = list(gaps)
    for position, name in enumerate(names):
        gap = gaps[name]
        for interval, colour, width, shift in (
            (gap.total, _COLOURS[0], 2.0, 0.12),
            (gap.over_seeds, _COLOURS[1], 1.2, -0.12),
        ):
            bounds = [[interval.mid - interval.low], [interval.high - interval.mid]]
            axes.errorbar(
                [interval.mid], [position + shift], xerr=bounds, fmt="o", color=colour, elinewidth=width, capsize=3
            )
        axes.plot(gap.by_seed, [position - 0.12] * len(gap.by_seed), "|", color="0.4")
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"NE gap to {reference} (%), 95 % intervals; left is better")
    for label, colour in (("seeds and rows", _COLOURS[0]), ("seeds", _COLOURS[1])):
        axes.plot([], [], "o-", color=colour, label=label)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=150)


def ne_of(logit: Tensor, label: Tensor) -> float:
    """NE of one run's rows; ``logit`` and ``label`` [B]."""
    return normalized_entropy(ClickSums(*click_sums(logit, label).tolist()))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
