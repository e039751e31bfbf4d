"""Intervals cover what they claim, and the NE gap finds what was planted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from eval.comparison import ScoredRun, compare, plot_gaps, summarize
from eval.statistics import Interval, block_sums, joined, ratio_over_blocks, studentized_bootstrap, t_interval

EXPERIMENTS = 300


@pytest.mark.parametrize("interval", [t_interval, studentized_bootstrap])
@pytest.mark.parametrize(("count", "effect"), [(5, 0.0), (12, 1.0)])
def test_intervals_over_seeds_cover_the_mean(
    interval: Callable[[np.ndarray], Interval], count: int, effect: float
) -> None:
    """About 95 % of the time; the bootstrap of five values is wider than it needs to be, never narrower."""
    generator = np.random.default_rng(3)
    found = [interval(effect + generator.standard_normal(count)) for _ in range(EXPERIMENTS)]
    missed = np.mean([not each.low <= effect <= each.high for each in found])
    assert 0.005 < missed < 0.08


def test_one_seed_gives_no_bounds() -> None:
    for interval in (t_interval, studentized_bootstrap):
        found = interval(np.array([0.3]))
        assert found.mid == 0.3
        assert math.isnan(found.low)
        assert not found.excludes_zero


def test_blocks_hold_every_row_once() -> None:
    values = np.arange(14.0).reshape(2, 7)
    assert np.array_equal(block_sums(values, 3), [[0 + 1, 2 + 3, 4 + 5 + 6], [7 + 8, 9 + 10, 11 + 12 + 13]])
    assert np.array_equal(block_sums(values, 100), values)


def dependent_rows(generator: np.random.Generator, rows: int, run: int) -> np.ndarray:
    """Values that stay equal for ``run`` rows: a user's requests."""
    return np.repeat(generator.standard_normal(rows // run), run)


def test_resampling_blocks_covers_where_rows_depend_on_their_neighbours() -> None:
    """And resampling single rows does not: the control."""
    generator = np.random.default_rng(4)
    missed = {80: 0, 800: 0}
    for _ in range(30):
        values = 1 + 0.1 * dependent_rows(generator, 800, 8)[None]
        for blocks in missed:
            sums = block_sums(values, blocks)
            found = ratio_over_blocks(sums, np.full_like(sums, 800 / blocks), same_rows=True)
            missed[blocks] += not found.low <= 1 <= found.high
    assert missed[80] < 6
    assert missed[800] > 7


def test_two_sources_of_chance_add_in_squares() -> None:
    found = joined(Interval(-3.0, 0.0, 3.0), Interval(6.0, 10.0, 14.0))
    assert (found.low, found.mid, found.high) == (-5.0, 0.0, 5.0)


def make_arm(
    generator: np.random.Generator, seeds: int, rows: int, noise: float, scale: float = 1.0
) -> tuple[dict[int, ScoredRun], dict[int, ScoredRun]]:
    """An arm and a reference that see the truth through noise of their own; ``scale`` spoils the arm's logits."""
    truth = torch.from_numpy(generator.standard_normal(rows))
    label = (torch.from_numpy(generator.random(rows)) < truth.sigmoid()).double()
    ids = torch.arange(rows)

    def run(factor: float) -> ScoredRun:
        logit = factor * (truth + noise * torch.from_numpy(generator.standard_normal(rows)))
        return ScoredRun(ids, label, logit, {"deep": 0.5 * logit})

    return {seed: run(scale) for seed in range(seeds)}, {seed: run(1.0) for seed in range(seeds)}


def test_a_planted_gap_is_found() -> None:
    """Logits stretched by 1.3 cost what the cross-entropy of a million rows says they cost."""
    big_arm, big_reference = make_arm(np.random.default_rng(5), 1, 1_000_000, 0.1, 1.3)
    planted = compare(big_arm, big_reference).by_seed[0]
    assert 0.5 < planted < 3
    gap = compare(*make_arm(np.random.default_rng(6), 5, 20_000, 0.1, 1.3))
    assert gap.total.low <= planted <= gap.total.high
    assert gap.total.excludes_zero
    assert gap.over_rows.mid == pytest.approx(gap.over_seeds.mid, rel=1e-3)
    assert gap.seeds == (0, 1, 2, 3, 4)
    assert gap.rows == 20_000


def test_equal_arms_are_seldom_told_apart() -> None:
    """A/A: about 5 % false positives over seeds, and fewer over seeds and rows together."""
    generator = np.random.default_rng(7)
    gaps = [compare(*make_arm(generator, 5, 500, 0.3)) for _ in range(120)]
    assert 0.01 < np.mean([gap.over_seeds.excludes_zero for gap in gaps]) < 0.10
    assert np.mean([gap.total.excludes_zero for gap in gaps]) < 0.08


def test_splits_that_differ_from_seed_to_seed_are_compared_pair_by_pair() -> None:
    arm, reference = {}, {}
    for seed, rows in enumerate((600, 601, 640)):
        one, other = make_arm(np.random.default_rng(seed), 1, rows, 0.2)
        arm[seed], reference[seed] = one[0], other[0]
    gap = compare(arm, reference)
    assert len(gap.by_seed) == 3
    assert gap.over_rows.low < gap.over_rows.mid < gap.over_rows.high


def test_an_arm_is_the_mean_of_its_runs() -> None:
    arm, _ = make_arm(np.random.default_rng(8), 3, 5000, 0.2)
    found = summarize(list(arm.values()))
    single = [summarize([run]) for run in arm.values()]
    assert found.ne.mid == pytest.approx(np.mean([each.ne.mid for each in single]))
    assert found.auc == pytest.approx(np.mean([each.auc for each in single]))
    assert found.towers["deep"] > found.ne.mid


def test_the_plot_is_a_picture(tmp_path) -> None:  # type: ignore[no-untyped-def]
    gap = compare(*make_arm(np.random.default_rng(9), 5, 500, 0.3))
    plot_gaps({"own": gap, "joint": gap}, "exact", tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
