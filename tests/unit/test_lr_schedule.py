"""Learning-rate schedules: exact values, pure in the step, plateau's memory survives a resume."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erase_rec.config.schema import LRScheduleConfig
from erase_rec.errors import UserError
from erase_rec.lr_schedule import LRSchedule

TOTAL = 20
CONFIGS = {
    "constant": LRScheduleConfig(kind="constant", warmup_steps=4),
    "linear": LRScheduleConfig(kind="linear", warmup_steps=4, min_factor=0.1),
    "cosine": LRScheduleConfig(kind="cosine", warmup_steps=4, min_factor=0.1),
    "poly": LRScheduleConfig(kind="poly", warmup_steps=4, min_factor=0.1, power=2.0),
    "step": LRScheduleConfig(kind="step", warmup_steps=4, step_every=5, gamma=0.5, min_factor=0.1),
    "plateau": LRScheduleConfig(kind="plateau", warmup_steps=4),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_warmup_rises_from_one_over_w_to_one(kind: str) -> None:
    schedule = LRSchedule(CONFIGS[kind], TOTAL)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_warmup_the_first_step_has_the_full_rate(kind: str) -> None:
    assert LRSchedule(CONFIGS[kind].model_copy(update={"warmup_steps": 0}), TOTAL).factor(0) == 1.0


@pytest.mark.parametrize(
    ("kind", "halfway"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 * 0.5),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("poly", 0.1 + 0.9 * 0.25),
        ("step", 0.5),
    ],
)
def test_value_halfway_through_decay(kind: str, halfway: float) -> None:
    assert LRSchedule(CONFIGS[kind], TOTAL).factor(4 + 8) == pytest.approx(halfway, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "poly"])
def test_decay_ends_one_step_after_training_and_stays(kind: str) -> None:
    schedule = LRSchedule(CONFIGS[kind], TOTAL)
    assert schedule.factor(TOTAL - 1) > 0.1
    assert schedule.factor(TOTAL) == pytest.approx(0.1, rel=1e-12)
    assert schedule.factor(10 * TOTAL) == schedule.factor(TOTAL)


def test_decay_steps_set_the_end() -> None:
    schedule = LRSchedule(LRScheduleConfig(kind="linear", warmup_steps=2, decay_steps=4), TOTAL)
    assert [schedule.factor(step) for step in range(2, 8)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_equals_its_formula() -> None:
    schedule = LRSchedule(LRScheduleConfig(kind="cosine"), 7)
    for step in range(7):
        assert schedule.factor(step) == pytest.approx((1 + math.cos(math.pi * step / 7)) / 2, rel=1e-12)


def test_step_decay_multiplies_every_so_many_steps_down_to_the_floor() -> None:
    schedule = LRSchedule(LRScheduleConfig(kind="step", step_every=2, gamma=0.5, min_factor=0.2), TOTAL)
    assert [schedule.factor(step) for step in range(8)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


@pytest.mark.parametrize("kind", CONFIGS)
def test_warmup_longer_than_training_is_harmless(kind: str) -> None:
    schedule = LRSchedule(CONFIGS[kind].model_copy(update={"warmup_steps": 100}), TOTAL)
    assert schedule.factor(TOTAL - 1) == 0.2


@given(
    kind=st.sampled_from(sorted(CONFIGS)),
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    stop=st.integers(0, 60),
)
def test_rates_after_a_resume_are_those_of_an_uninterrupted_run(kind: str, warmup: int, total: int, stop: int) -> None:
    config = CONFIGS[kind].model_copy(update={"warmup_steps": warmup})
    whole = LRSchedule(config, total)
    expected = [whole.factor(step) for step in range(total)]
    resumed = LRSchedule(config, total)
    resumed.load_state_dict(LRSchedule(config, total).state_dict())
    assert [resumed.factor(step) for step in range(stop, total)] == expected[stop:]
    assert all(0.0 < factor <= 1.0 for factor in expected)


def plateau(patience: int, min_factor: float = 0.0, metric: str = "eval.ne") -> LRSchedule:
    config = LRScheduleConfig(kind="plateau", patience=patience, gamma=0.5, min_factor=min_factor, metric=metric)
    return LRSchedule(config, TOTAL)


def test_plateau_drops_after_patience_evaluations_without_improvement() -> None:
    schedule = plateau(patience=2)
    drops = [schedule.observe(value) for value in (0.9, 0.8, 0.8, 0.81, 0.82, 0.83, 0.7, 0.71)]
    assert drops == [False, False, False, True, False, True, False, False]
    assert schedule.factor(0) == 0.25


def test_nan_is_no_improvement() -> None:
    schedule = plateau(patience=1)
    assert [schedule.observe(value) for value in (math.nan, 0.9, math.nan)] == [True, False, True]


def test_plateau_stops_at_the_floor_and_reports_no_drop_there() -> None:
    schedule = plateau(patience=1, min_factor=0.4)
    assert [schedule.observe(1.0) for _ in range(4)] == [False, True, True, False]
    assert schedule.factor(0) == 0.4


def test_plateau_watches_a_metric_that_rises() -> None:
    schedule = plateau(patience=1, metric="eval.auc")
    assert [schedule.observe(value) for value in (0.5, 0.6, 0.7, 0.65)] == [False, False, False, True]


def test_plateau_state_survives_json() -> None:
    values = [0.9, 0.91, 0.92, 0.8, math.nan, 0.85, 0.84, 0.83, 0.82]
    whole = plateau(patience=2)
    expected = [(whole.observe(value), whole.factor(50)) for value in values]
    for stop in range(len(values)):
        first, second = plateau(patience=2), plateau(patience=2)
        for value in values[:stop]:
            first.observe(value)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert [(second.observe(value), second.factor(50)) for value in values[stop:]] == expected[stop:]


def test_only_plateau_watches_a_metric() -> None:
    assert plateau(patience=1).watched_metric == "eval.ne"
    assert LRSchedule(CONFIGS["cosine"], TOTAL).watched_metric is None


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'eval\.acu'.*did you mean 'eval\.auc'"):
        plateau(patience=1, metric="eval.acu")
