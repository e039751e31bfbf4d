"""Metrics over ranks are those of one process: every row counts once, and every rank gets the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from erase_rec.batch import Batch, Scores, SparseBatch, StepOutput
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World
from eval.evaluator import PooledEvaluator
from eval.progressive import ProgressiveEvaluation

CPU = torch.device("cpu")
SPARSE = SparseBatch(torch.empty(0).long(), torch.empty(0).int(), None, 0)


def logits_of(row_ids: Tensor) -> Scores:
    """Many ties, so that a wrong pairing of rows shows in AUC."""
    logit = (row_ids * 7 % 5).double() - 2.0
    return Scores(logit, {"deep": -logit / 3}, {"deep": logit / 4}, {"deep": 3 * logit / 4})


def batch_of(rows: range) -> Batch:
    row_ids = torch.arange(rows.start, rows.stop)
    return Batch(torch.empty(len(rows), 0), SPARSE, (row_ids % 3 == 0).float(), row_ids)


def cut(rows: int, rank: int, size: int, step: int = 10) -> list[Batch]:
    """As the loader cuts held-out rows: each step's part of a rank, perhaps empty."""
    batches = []
    for start in range(0, rows, step * size):
        count = min(step * size, rows - start)
        batches.append(batch_of(range(start + count * rank // size, start + count * (rank + 1) // size)))
    return batches


def evaluate(rows: int) -> Any:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        evaluator = PooledEvaluator(["deep"], world)
        return evaluator.evaluate(lambda batch: logits_of(batch.row_ids), cut(rows, world.rank, world.size), True)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [61, 200, 1])
def test_evaluation_counts_every_row_once(run_ranks: Any, size: int, rows: int) -> None:
    results = run_ranks(size, evaluate, rows)
    alone = PooledEvaluator(["deep"], World())
    expected = alone.evaluate(lambda batch: logits_of(batch.row_ids), [batch_of(range(rows))], True)
    for rank, result in enumerate(results):
        assert result.rows == rows
        assert repr((result.ne, result.auc, result.towers, result.extra)) == repr(
            (expected.ne, expected.auc, expected.towers, expected.extra)
        )
        assert (result.scores is None) == (rank > 0)
    assert results[0].scores.equals(expected.scores)


def outputs(seed: int, rows: int = 40) -> tuple[StepOutput, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logit, tower = torch.randn(2, rows, generator=generator)
    label = (torch.rand(rows, generator=generator) < 0.3).float()
    return StepOutput(logit, {"deep": tower}, torch.tensor(0.0), torch.tensor([True])), label


def progress(saved_after: int | None) -> dict[str, Any]:
    """Five steps; a window is closed after the second; a checkpoint taken and loaded into another after ``saved``."""
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        metrics = ProgressiveEvaluation(["deep"], CPU, world)
        kept = metrics
        windows = []
        for step in range(5):
            kept.update(*outputs(step * world.size + world.rank))
            if kept is not metrics:
                metrics.update(*outputs(step * world.size + world.rank))
            if step == 1:
                windows.append(kept.window())
            if step == saved_after:
                state = {name: value.clone() for name, value in metrics.state_dict().items()}
                for value in state.values():
                    torch.distributed.broadcast(value, 0)  # as a file that the first rank wrote
                kept = ProgressiveEvaluation(["deep"], CPU, world)
                kept.load_state_dict(state)
        windows.append(kept.window())
        lifetime = kept.lifetime()
        assert kept is metrics or (metrics.window() == windows[-1] and metrics.lifetime() == lifetime)
        return {"windows": windows, "lifetime": lifetime}


@pytest.mark.parametrize("saved_after", [None, 3])
def test_progressive_metrics_pool_the_ranks(run_ranks: Any, saved_after: int | None) -> None:
    results = run_ranks(2, progress, saved_after)
    assert results[0] == results[1]
    alone = ProgressiveEvaluation(["deep"], CPU, World())
    for seed in range(10):
        alone.update(*outputs(seed))
        if seed == 3:
            # Sums of the same rows in another order.
            assert results[0]["windows"][0] == pytest.approx(alone.window(), rel=1e-12)
    assert results[0]["windows"][1] == pytest.approx(alone.window(), rel=1e-12)
    assert results[0]["lifetime"] == pytest.approx(alone.lifetime(), rel=1e-12)
    assert not math.isnan(results[0]["lifetime"]["train/ne"])


def count_on_one_rank_less() -> float:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        metrics = ProgressiveEvaluation(["deep"], CPU, world)
        metrics.load_state_dict({"window": torch.ones(2, 5).double(), "closed": torch.full((2, 5), 3.0).double()})
        return metrics.lifetime()["train/logloss"] * 4 + float(metrics.state_dict()["window"][0, 0])


def test_a_checkpoint_counts_once_whatever_the_number_of_ranks(run_ranks: Any) -> None:
    assert run_ranks(3, count_on_one_rank_less) == [5.0, 4.0, 4.0]
