"""Metrics against torchrec, scikit-learn and plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from eval import metrics
from eval.metrics import ClickSums, click_sums


def sums_of(logit: Tensor, label: Tensor) -> ClickSums:
    return ClickSums(*click_sums(logit, label).tolist())


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logit = torch.randn(count, generator=generator, dtype=dtype)
    label = (torch.rand(count, generator=generator) < logit.sigmoid() * 0.5).float()
    return logit, label


def test_ne_and_logloss_equal_torchrec() -> None:
    ne = pytest.importorskip("torchrec.metrics.ne")
    logit, label = rows(5000)
    prediction, weight = logit.sigmoid(), torch.ones(5000, dtype=torch.float64)
    # torchrec clamps in place: it gets clones
    states = ne.get_ne_states(label.double(), prediction.clone(), weight, 1e-12)
    expected = ne.compute_ne(
        states["cross_entropy_sum"],
        states["weighted_num_samples"],
        states["pos_labels"].clone(),
        states["neg_labels"].clone(),
        1e-12,
    )
    sums = sums_of(logit, label)
    assert metrics.normalized_entropy(sums) == pytest.approx(float(expected), rel=1e-12)
    assert metrics.logloss(sums) == pytest.approx(log_loss(label.numpy(), prediction.numpy()), rel=1e-12)


def test_cross_entropy_of_saturated_logits_is_exact() -> None:
    logit = torch.tensor([-800.0, -30.0, 21.0, 800.0], dtype=torch.float64)
    wrong = metrics.cross_entropy(logit, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    right = metrics.cross_entropy(logit, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert wrong.tolist() == pytest.approx([800.0, 30.0 + math.log1p(math.exp(-30)), 21.0 + math.exp(-21), 800.0])
    assert right.tolist() == pytest.approx([0.0, math.log1p(math.exp(-30)), math.log1p(math.exp(-21)), 0.0], rel=1e-12)


def test_predicting_the_base_rate_has_an_ne_of_one_and_a_calibration_of_one() -> None:
    label = torch.tensor([1.0] + [0.0] * 7)
    sums = sums_of(torch.full((8,), math.log(1 / 7), dtype=torch.float64), label)
    assert metrics.normalized_entropy(sums) == pytest.approx(1.0, rel=1e-14)
    assert metrics.calibration(sums) == pytest.approx(1.0, rel=1e-14)
    assert metrics.base_rate(sums) == 0.125
    assert metrics.prediction_std(sums) == pytest.approx(0.0, abs=1e-9)


def test_counters_do_not_freeze_at_the_limits_of_float32() -> None:
    count, updates = 100_000, 300
    label = torch.zeros(count)
    label[:100] = 1.0
    logit = torch.full((count,), math.log(0.001 / 0.999))  # float32, as a model gives it
    total = torch.zeros(5, dtype=torch.float64)
    batch = click_sums(logit, label)
    for _ in range(updates):
        total += batch
    sums = ClickSums(*total.tolist())
    assert sums.rows == 30_000_000
    assert sums.positives == 30_000
    assert metrics.normalized_entropy(sums) == pytest.approx(1.0, abs=1e-6)
    exact = -np.float64(0.001) * np.log(0.001) - np.float64(0.999) * np.log(0.999)
    assert metrics.logloss(sums) == pytest.approx(exact, rel=1e-6)


def test_sums_of_batches_pool_to_the_sums_of_all_rows() -> None:
    logit, label = rows(1000)
    pooled = sum(click_sums(logit[i : i + 7], label[i : i + 7]) for i in range(0, 1000, 7))
    torch.testing.assert_close(pooled, click_sums(logit, label), rtol=1e-12, atol=0.0)


def test_leading_dimensions_are_models_on_the_same_rows() -> None:
    logit, label = rows(300)
    both = click_sums(torch.stack([logit, -logit]), label)
    torch.testing.assert_close(both[0], click_sums(logit, label))
    torch.testing.assert_close(both[1], click_sums(-logit, label))


@pytest.mark.parametrize("label", [torch.zeros(5), torch.ones(5), torch.zeros(0)])
def test_one_class_leaves_ne_and_auc_undefined(label: Tensor) -> None:
    logit = torch.linspace(-1, 1, label.numel())
    sums = sums_of(logit, label)
    assert math.isnan(metrics.normalized_entropy(sums))
    assert math.isnan(metrics.auc(logit, label))
    assert math.isnan(metrics.logloss(sums)) == (label.numel() == 0)
    assert math.isnan(metrics.calibration(sums)) == (label.sum() == 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_equals_sklearn_with_ties(pairs: list[tuple[int, bool]]) -> None:
    score = torch.tensor([float(value) for value, _ in pairs])
    label = torch.tensor([float(positive) for _, positive in pairs])
    if 0 < label.sum() < len(pairs):
        assert metrics.auc(score, label) == pytest.approx(roc_auc_score(label.numpy(), score.numpy()), abs=1e-14)


def test_auc_does_not_depend_on_the_order_of_rows_and_is_none_for_nan() -> None:
    logit, label = rows(2000, dtype=torch.float32)
    logit = (logit * 8).round() / 8
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    assert metrics.auc(logit, label) == metrics.auc(logit[order], label[order])
    logit[3] = math.nan
    assert math.isnan(metrics.auc(logit, label))


def test_accuracy_counts_the_right_side_of_a_half() -> None:
    logit, label = torch.tensor([0.1, -0.1, 3.0, 0.0, -0.2]), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    assert metrics.accuracy(logit, label) == 3 / 5
    assert math.isnan(metrics.accuracy(logit[:0], label[:0]))
    assert math.isnan(metrics.accuracy(logit * math.nan, label))


def test_a_single_row_has_no_spread() -> None:
    """One row must not look like a model that predicts a constant; two rows show their spread."""
    logit, label = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    assert math.isnan(metrics.prediction_std(sums_of(logit[:1], label[:1])))
    half_the_gap = (1 / (1 + math.exp(-1)) - 0.5) / 2
    assert metrics.prediction_std(sums_of(logit, label)) == pytest.approx(half_the_gap)
