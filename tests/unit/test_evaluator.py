"""Evaluation: one result whatever the batch size, equal to scikit-learn's on the rows it hands out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from erase_rec.batch import Batch, Scores, SparseBatch
from erase_rec.distributed.world import World
from eval import registry
from eval.evaluator import PooledEvaluator

ROWS = 257


def batches(label: torch.Tensor, batch_size: int) -> Iterator[Batch]:
    count = len(label)
    dense = torch.randn(count, 2, generator=torch.Generator().manual_seed(3))
    dense[:, 0] = (dense[:, 0] * 4).round() / 4  # ties
    for i in range(0, count, batch_size):
        rows = slice(i, i + batch_size)
        empty = SparseBatch(torch.empty(0).long(), torch.empty(0).int(), None, 0)
        yield Batch(dense[rows], empty, label[rows], torch.arange(1000, 1000 + count)[rows])


def score(batch: Batch) -> Scores:
    return Scores(batch.dense[:, 0], {"deep": batch.dense[:, 1], "cross": -batch.dense[:, 0]})


@pytest.fixture
def label() -> torch.Tensor:
    return (torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) < 0.3).float()


def test_the_batch_size_changes_nothing_and_every_row_counts_once(label: torch.Tensor) -> None:
    evaluator = PooledEvaluator(["deep", "cross"], World())
    whole = evaluator.evaluate(score, batches(label, ROWS))
    assert whole.rows == ROWS
    for batch_size in (1, 128, 1000):
        assert evaluator.evaluate(score, batches(label, batch_size)) == whole


def test_metrics_equal_sklearn_on_the_written_scores(label: torch.Tensor, tmp_path: Path) -> None:
    result = PooledEvaluator(["deep", "cross"], World()).evaluate(score, batches(label, 100), keep_scores=True)
    pq.write_table(result.scores, tmp_path / "scores.parquet")
    table = pq.read_table(tmp_path / "scores.parquet").to_pandas()
    assert list(table.columns) == ["row_id", "label", "prediction", "logit", "tower_deep", "tower_cross"]
    assert table.row_id.tolist() == list(range(1000, 1000 + ROWS))
    assert table.label.tolist() == label.tolist()
    assert result.auc == pytest.approx(roc_auc_score(table.label, table.prediction), abs=1e-14)
    assert result.logloss == pytest.approx(log_loss(table.label, table.prediction), rel=1e-12)
    assert result.calibration == pytest.approx(table.prediction.sum() / table.label.sum(), rel=1e-12)
    entropy = log_loss(table.label, [table.label.mean()] * ROWS)
    assert result.ne == pytest.approx(result.logloss / entropy, rel=1e-12)
    for tower in ("deep", "cross"):
        assert result.towers[tower]["auc"] == pytest.approx(roc_auc_score(table.label, table[f"tower_{tower}"]))
    assert result.towers["cross"]["auc"] == pytest.approx(1 - result.auc, abs=1e-14)


def test_scores_are_kept_only_when_asked_for(label: torch.Tensor) -> None:
    assert PooledEvaluator(["deep"], World()).evaluate(score, batches(label, 64)).scores is None


@pytest.mark.parametrize("label", [torch.zeros(20), torch.ones(20), torch.zeros(0)])
def test_undefined_metrics_are_nan_with_one_warning(label: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    evaluator = PooledEvaluator(["deep"], World())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = evaluator.evaluate(score, batches(label, 8), keep_scores=True)
    assert math.isnan(result.ne)
    assert math.isnan(result.auc)
    assert math.isnan(result.towers["deep"]["ne"])
    assert math.isfinite(result.logloss) == (len(label) > 0)
    assert result.rows == result.scores.num_rows == len(label)
    assert len(caplog.records) == 1


def test_a_registered_metric_is_reported(label: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry.ROW_METRICS, "accuracy", lambda logit, y: float(((logit > 0) == (y > 0)).float().mean())
    )
    result = PooledEvaluator(["deep"], World()).evaluate(score, batches(label, 64))
    assert 0 < result.extra["accuracy"] < 1


def test_ne_compares_with_the_constant_that_is_asked_for(label: torch.Tensor) -> None:
    constants = iter([0.1, 0.9, 1.0])
    own = PooledEvaluator(["deep"], World()).evaluate(score, batches(label, 64))
    evaluator = PooledEvaluator(["deep"], World(), lambda: next(constants))
    for constant in (0.1, 0.9):
        result = evaluator.evaluate(score, batches(label, 64))
        entropy = log_loss(label, [constant] * ROWS)
        assert result.ne == pytest.approx(result.logloss / entropy, rel=1e-12)
        assert result.ne < own.ne, "no constant is better than the rows' own base rate"
        assert result.towers["deep"]["ne"] / result.ne == pytest.approx(own.towers["deep"]["ne"] / own.ne, rel=1e-12)
        assert (result.extra["ne_base_rate"], result.base_rate) == (constant, own.base_rate)
    assert own.extra["ne_base_rate"] == own.base_rate
    assert math.isnan(evaluator.evaluate(score, batches(label, 64)).ne), "nothing compares with certainty"
