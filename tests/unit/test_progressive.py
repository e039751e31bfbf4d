"""Progressive metrics: pooled over windows, the same after a resume, defined again after a window of one class."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from erase_rec.batch import StepOutput
from erase_rec.distributed.world import World
from erase_rec.health import health_warnings
from eval.metrics import ClickSums, click_sums, normalized_entropy
from eval.progressive import ProgressiveEvaluation

CPU = torch.device("cpu")


def output(logit: Tensor, tower: Tensor) -> StepOutput:
    return StepOutput(logit=logit, tower_logits={"deep": tower}, loss=torch.tensor(0.0), finite=torch.tensor([True]))


def step(seed: int, count: int = 64, positive_share: float = 0.3) -> tuple[StepOutput, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    label = (torch.rand(count, generator=generator) < positive_share).float()
    return output(torch.randn(count, generator=generator), torch.randn(count, generator=generator)), label


def test_lifetime_pools_rows_and_does_not_average_windows() -> None:
    progressive = ProgressiveEvaluation(["deep"], CPU, World())
    steps = [step(1, 10), step(2, 500, 0.05), step(3, 30)]
    window_ne = []
    for each in steps:
        progressive.update(*each)
        window_ne.append(progressive.window()["train/ne"])
    logit = torch.cat([out.logit for out, _ in steps])
    tower = torch.cat([out.tower_logits["deep"] for out, _ in steps])
    label = torch.cat([label for _, label in steps])
    lifetime = progressive.lifetime()
    for tag, scores in (("train/ne", logit), ("tower/deep/ne", tower)):
        expected = normalized_entropy(ClickSums(*click_sums(scores, label).tolist()))
        assert lifetime[tag] == pytest.approx(expected, rel=1e-12)
    assert abs(lifetime["train/ne"] - sum(window_ne) / 3) > 1e-3
    assert lifetime["train/base_rate"] == float(label.sum()) / 540


def test_a_window_starts_anew() -> None:
    progressive = ProgressiveEvaluation(["deep"], CPU, World())
    progressive.update(*step(1))
    progressive.window()
    progressive.update(*step(2))
    alone = ProgressiveEvaluation(["deep"], CPU, World())
    alone.update(*step(2))
    assert progressive.window() == alone.window()


def test_a_window_that_is_read_and_not_closed_goes_on() -> None:
    progressive, unread = (ProgressiveEvaluation(["deep"], CPU, World()) for _ in range(2))
    for seed in range(7):
        for each in (progressive, unread):
            each.update(*step(seed, 37))
        assert progressive.window(closes=False)["train/ne"] == progressive.lifetime()["train/ne"]
    assert progressive.window() == unread.window()
    assert progressive.lifetime() == unread.lifetime()


def test_resume_in_the_middle_of_a_window_is_bitwise() -> None:
    straight, before, after = (ProgressiveEvaluation(["deep"], CPU, World()) for _ in range(3))
    for seed in range(3):
        straight.update(*step(seed))
        before.update(*step(seed))
        if seed == 1:
            assert straight.window() == before.window()
    after.load_state_dict({name: value.clone() for name, value in before.state_dict().items()})
    straight.update(*step(9))
    after.update(*step(9))
    assert straight.window() == after.window()
    assert straight.lifetime() == after.lifetime()


def test_one_class_gives_nan_with_one_warning_until_both_classes_were_seen(caplog: pytest.LogCaptureFixture) -> None:
    progressive = ProgressiveEvaluation(["deep"], CPU, World())
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            progressive.update(*step(seed, positive_share=0.0))
            values = progressive.window()
            assert math.isnan(values["train/ne"])
            assert math.isfinite(values["train/logloss"])
    assert len(caplog.records) == 1
    assert "train/ne is undefined" in caplog.text
    progressive.update(*step(7))
    assert math.isfinite(progressive.lifetime()["train/ne"])


def test_health_names_the_block_that_is_constant_or_no_better_than_a_constant() -> None:
    progressive = ProgressiveEvaluation(["deep"], CPU, World())
    _, label = step(1, 5000)
    good = label * 2 - 1.5 + torch.linspace(-0.1, 0.1, 5000)
    progressive.update(output(good, torch.full((5000,), -0.3)), label)
    problems = health_warnings(progressive.window())
    assert len(problems) == 2
    assert all(problem.startswith("tower deep ") for problem in problems)
    assert any("same value for every row" in problem for problem in problems)
    assert any("no better than a constant" in problem for problem in problems)


def test_health_says_nothing_of_undefined_or_good_metrics() -> None:
    assert health_warnings({"train/ne": math.nan, "train/prediction_std": math.nan, "tower/a/ne": 0.9}) == []


def test_update_does_not_change_its_inputs() -> None:
    out, label = step(5)
    copies = out.logit.clone(), label.clone()
    ProgressiveEvaluation(["deep"], CPU, World()).update(out, label)
    assert torch.equal(out.logit, copies[0])
    assert torch.equal(label, copies[1])


def test_the_recent_base_rate_is_of_the_last_closed_window() -> None:
    progressive = ProgressiveEvaluation(["deep"], CPU, World())
    rates = []
    for seed in (1, 2, 3):
        out, label = step(seed)
        progressive.update(out, label)
        rates.append(float(label.mean()))
        if seed == 1:
            assert progressive.recent_base_rate() == pytest.approx(rates[0])
        if seed < 3:
            progressive.window()
    assert progressive.recent_base_rate() == pytest.approx(rates[1]) != rates[2]
