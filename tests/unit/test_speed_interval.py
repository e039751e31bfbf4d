"""The interval of a speed ratio: finds what is there, and claims little where nothing is."""

from __future__ import annotations

import numpy as np

from erase_rec.cli.bench import speed_interval

TURNS, EXPERIMENTS = 12, 400


def turns(generator: np.random.Generator, faster_by: float) -> tuple[float, float, float]:
    """Two arms in the same turns: the machine's pace drifts by 10 %, each turn is noisy by 1 %."""
    pace = 10 * np.exp(0.1 * generator.standard_normal(TURNS))
    reference, times = (pace * np.exp(0.01 * generator.standard_normal(TURNS)) for _ in range(2))
    return speed_interval(reference, times / (1 + faster_by))


def test_an_effect_of_one_percent_is_recovered() -> None:
    """Paired turns cancel the drift, which is ten times the effect."""
    generator = np.random.default_rng(1)
    found = np.array([turns(generator, 0.01) for _ in range(EXPERIMENTS)])
    assert abs(found[:, 1].mean() - 1.01) < 0.001
    covered = (found[:, 0] <= 1.01) & (found[:, 2] >= 1.01)
    assert covered.mean() > 0.92


def test_equal_arms_are_seldom_told_apart() -> None:
    """About 5 % false positives."""
    generator = np.random.default_rng(2)
    found = np.array([turns(generator, 0.0) for _ in range(EXPERIMENTS)])
    false_positives = ((found[:, 0] > 1) | (found[:, 2] < 1)).mean()
    assert 0.02 < false_positives < 0.08
