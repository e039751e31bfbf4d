"""Best value and early stopping: the metric's direction, nan, the threshold, the memory across a resume."""

from __future__ import annotations

import json
import math

import pytest

from erase_rec.best_metric import COSTS, BestMetric
from erase_rec.config.schema import EarlyStoppingConfig
from erase_rec.early_stopping import EarlyStopping
from erase_rec.errors import UserError


@pytest.mark.parametrize(
    ("metric", "values", "improves"),
    [
        ("eval.ne", [0.9, 0.8, 0.85, 0.8], [True, True, False, False]),
        ("eval.logloss", [0.5, 0.4, 0.6], [True, True, False]),
        ("eval.auc", [0.5, 0.7, 0.6, 0.71], [True, True, False, True]),
        ("eval.calibration", [1.3, 0.8, 1.1, 0.5, 1.0], [True, True, True, False, True]),
    ],
)
def test_direction_of_each_metric(metric: str, values: list[float], improves: list[bool]) -> None:
    best = BestMetric(metric)
    assert [best.observe(value) for value in values] == improves


@pytest.mark.parametrize("metric", sorted(COSTS))
def test_nan_is_never_the_best(metric: str) -> None:
    best = BestMetric(metric)
    assert not best.observe(math.nan)
    assert best.observe(0.9)
    assert not best.observe(math.nan)
    assert best.since == 1


def test_an_improvement_is_larger_than_min_delta() -> None:
    best = BestMetric("eval.ne", min_delta=0.125)
    assert [best.observe(value) for value in (1.0, 0.875, 0.8125)] == [True, False, True]


def test_small_improvements_add_up_against_the_best_not_the_last() -> None:
    best = BestMetric("eval.ne", min_delta=0.125)
    assert [best.observe(value) for value in (1.0, 0.9, 0.85)] == [True, False, True]


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"'ne', expected one of eval\.ne, eval\.logloss"):
        BestMetric("ne")


def test_stops_after_patience_evaluations_in_a_row() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(patience=2))
    assert [stopping.observe(value) for value in (0.9, 0.95, 0.8, 0.85, math.nan)] == [False] * 4 + [True]


def test_only_nan_stops_too() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="eval.auc", patience=3))
    assert [stopping.observe(math.nan) for _ in range(3)] == [False, False, True]


def test_state_survives_json_at_every_point() -> None:
    config = EarlyStoppingConfig(metric="eval.auc", patience=2, min_delta=0.01)
    values = [math.nan, 0.6, 0.605, 0.7, math.nan, 0.705]
    whole = EarlyStopping(config)
    expected = [whole.observe(value) for value in values]
    assert expected[-1]
    for stop in range(len(values)):
        first, second = EarlyStopping(config), EarlyStopping(config)
        for value in values[:stop]:
            first.observe(value)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert [second.observe(value) for value in values[stop:]] == expected[stop:]


def test_a_resumed_run_knows_that_patience_was_used_up() -> None:
    stopped = EarlyStopping(EarlyStoppingConfig(patience=2))
    assert [stopped.observe(value) for value in (0.9, 0.95, 0.95)] == [False, False, True]
    same, patient = EarlyStopping(EarlyStoppingConfig(patience=2)), EarlyStopping(EarlyStoppingConfig(patience=3))
    assert not same.exhausted
    for resumed in (same, patient):
        resumed.load_state_dict(stopped.state_dict())
    assert same.exhausted
    assert not patient.exhausted
