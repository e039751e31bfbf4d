"""What decides in the comparison with peers: measures, early stopping, and which points get seeds."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind
from sklearn.metrics import log_loss, roc_auc_score

from benchmarks.peers.encode import _padded

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its scripts import each other by plain names, as they do in a peer's environment."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module("rows")
    for name in ("rows", "run", "report"):
        sys.modules.pop(name, None)


def made(peers: ModuleType, labels: list[int]) -> Any:
    label = np.array(labels, np.float32)
    return peers.Part(np.zeros((len(label), 0), np.float32), np.zeros((len(label), 1), np.int32), {}, label)


def test_measures_are_those_of_scikit_learn(peers: ModuleType) -> None:
    random = np.random.default_rng(0)
    label, prediction = (random.random(500) < 0.3).astype(np.float32), random.random(500).round(1).clip(0.05, 0.95)
    rate = np.full(500, label.mean(dtype=np.float64))
    assert peers.normalized_entropy(label, prediction) == pytest.approx(
        log_loss(label, prediction) / log_loss(label, rate), rel=1e-9
    )
    assert peers.area_under_curve(label, prediction) == pytest.approx(roc_auc_score(label, prediction), rel=1e-12)


def test_watch_tests_where_validation_is_best_and_stops_after_its_patience(peers: ModuleType) -> None:
    valid, test = made(peers, [0, 1]), made(peers, [0, 1, 1])
    watch = peers.Watch(valid, test, patience=2)

    def answers(of_valid: float, of_test: float) -> Any:
        return lambda part: np.abs(1 - part.label - (of_valid if part is valid else of_test))

    assert not watch.stops(answers(0.7, 0.6))
    assert not watch.stops(answers(0.9, 0.8))
    best = watch.test_ne
    assert not watch.stops(answers(0.8, 0.99))  # better on test rows, and nobody may know
    assert watch.stops(answers(0.85, 0.99))
    assert (watch.best, watch.test_ne) == (2, best)
    assert best == pytest.approx(peers.normalized_entropy(test.label, np.array([0.2, 0.8, 0.8])))


def finished(task: dict[str, Any], ne: float) -> dict[str, Any]:
    return task | {"valid_ne": [ne + 1, ne], "test_ne": ne if task["test"] else None, "test_auc": 0.5}


def test_best_point_gets_the_seeds_and_what_is_done_is_not_run_again(peers: ModuleType, tmp_path: Path) -> None:
    run = importlib.import_module("run")
    out = tmp_path / "results.jsonl"
    arguments = argparse.Namespace(rows=tmp_path, out=out, seeds=2, points=3)
    plan = run.Plan(["a"], [("fuxictr", "DLRM")], arguments)
    for ne in (0.9, 0.7):
        plan.finish(finished(plan.take(), ne))
    again = run.Plan(["a"], [("fuxictr", "DLRM")], arguments)
    again.finish(finished(again.take(), 0.8))
    seeds = [again.take(), again.take()]
    assert [(task["seed"], task["test"]) for task in seeds] == [(1, True), (2, True)]
    assert [seeds[0][name] for name in run.RATES] == list(run.PYTORCH_GRID[1])
    assert again.take() is None
    for task in seeds:
        again.finish(finished(task, 0.6))
    report = importlib.import_module("report")
    (row,) = report.rows_of([json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()])
    assert (row["seeds"], row["points"], row["ne"], row["validation_ne"]) == (2, 3, 0.6, 0.7)


def test_models_are_told_apart_by_welchs_interval(peers: ModuleType) -> None:
    report, random = importlib.import_module("report"), np.random.default_rng(0)
    ours, theirs = random.normal(0.8, 0.01, 5), random.normal(0.7, 0.03, 7)
    rows = [{"ne": each.mean(), "ne_sd": each.std(ddof=1), "seeds": len(each)} for each in (ours, theirs)]
    expected = ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    low, middle, high = (each * theirs.mean() / 100 for each in report.welch(*rows))
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert middle == pytest.approx(ours.mean() - theirs.mean())


def test_grids_that_are_closed_give_their_best_point_so_far(peers: ModuleType, tmp_path: Path) -> None:
    run = importlib.import_module("run")
    arguments = argparse.Namespace(rows=tmp_path, out=tmp_path / "results.jsonl", seeds=1, points=5)
    plan = run.Plan(["a", "b"], [("torchrec", "DLRM")], arguments)
    plan.finish(finished(plan.take(), 0.9))
    plan.close_grids()
    task = plan.take()
    assert (task["set"], task["test"]) == ("a", True)  # of b nothing is known
    assert plan.take() is None


def test_bags_are_padded_at_their_end() -> None:
    bags = [
        (torch.tensor([3, 0, 5]), torch.tensor([2, 0, 1])),
        (torch.tensor([1]), torch.tensor([1])),
    ]
    assert _padded(bags).tolist() == [[4, 1], [0, 0], [6, 0], [2, 0]]
