"""Local objectives, and steps that cut nothing, in every schedule: plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
from schedule_cases import (
    assert_same,
    make_batch,
    make_config,
    make_gradients,
    make_model,
    plain_gradients,
    refusals,
    tower,
    train,
    train_plainly,
)

from erase_rec.config.schema import Config
from erase_rec.schedule.audit import audit
from erase_rec.schedule.plan import MAIN_LOSS, Plan
from models.ctr_model import build_local_losses

EXACT = 1e-12
"""Sums in another order differ in float64 by a few units in the last place, about 1e-16 each."""
STEPS = [make_batch(seed, size) for seed, size in enumerate((10, 10, 10, 10, 3))]
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "cross-entropy": [
        tower("deep"),
        tower("dot", loss=0.5, target="joint"),
        tower("cross", "deep", cut_at=1),
    ],
    "ranking": [
        tower("deep", objective={"kind": "bce_pairwise"}),
        tower("dot", loss=0.5, target="joint", objective={"kind": "bce_pairwise"}),
        tower("cross", "dot", detach=False, loss=2.0),
        tower("mask", cut_at=1),
    ],
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "blocking": {"optimizer": "per_tower"},
    "non-blocking": {"dispatch": "non_blocking", "workers": 2, "optimizer": "end"},
    "aggregate": {"early_backward": False},
    "blocking, tables from the local losses": {"embedding_gradient": "local"},
}


def config_of(towers: list[dict[str, Any]], exact_every: int | None = None, **sections: Any) -> Config:
    schedule = sections.pop("schedule", {}) | ({} if exact_every is None else {"exact_every": exact_every})
    return make_config(towers, schedule=schedule, over_arch={"logits": "gated"}, **sections)


@pytest.mark.parametrize("exact_every", [None, 2])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("towers", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_five_steps_equal_plain_training(
    towers: list[dict[str, Any]], schedule: dict[str, Any], exact_every: int | None
) -> None:
    config = config_of(towers, exact_every, schedule=schedule)
    assert refusals(config) == []
    assert_same(train(config, STEPS), train_plainly(config, STEPS), EXACT)


def test_micro_batches_are_one_batch() -> None:
    config = config_of(OBJECTIVES["cross-entropy"], 3, train={"steps": 1, "micro_batches": 2})
    assert refusals(config) == []
    assert_same(train(config, STEPS), train_plainly(config, STEPS), EXACT)


def test_the_ranking_loss_changes_the_training() -> None:
    """Negative control: the comparisons above can fail."""
    changed = config_of([tower("deep", objective={"kind": "bce_pairwise"}), tower("dot")])
    plain = config_of([tower("deep"), tower("dot")])
    with pytest.raises(AssertionError, match=r"towers\.deep|tables\."):
        assert_same(train(changed, STEPS), train(plain, STEPS), 1e-4)


@pytest.mark.parametrize("mode", ["both", "local", "none"])
def test_a_step_that_cuts_nothing_has_the_gradient_of_all_losses_through_everything(mode: str) -> None:
    config = config_of(OBJECTIVES["ranking"], 2, schedule={"embedding_gradient": mode})
    model, batch = make_model(config), make_batch()
    gradients = make_gradients(model, config)
    for exact in (False, True, False):
        found, (expected, pooled) = (
            gradients.gradients(batch, exact=exact),
            plain_gradients(model, config, batch, exact=exact),
        )
        assert_same(found.parameters, expected, EXACT)
        assert_same({"pooled": found.pooled}, {"pooled": pooled}, EXACT)


def test_the_main_loss_reaches_towers_in_steps_that_cut_nothing_only() -> None:
    config = config_of([tower("deep"), tower("dot")], 3)
    report = audit(make_model(config), Plan.from_config(config), build_local_losses(config), make_batch())
    assert report.findings == ()
    assert set(report.norms["deep"]) == {"deep"}
    # Gated logits start as sums, and the towers' logits are not cut either.
    assert set(report.exact_norms["deep"]) == {"deep", MAIN_LOSS}
    assert report.exact_every == 3
    (_, exact, *_) = report.tables()
    assert "one step in 3" in exact.title
    assert report.as_json()["exact_norms"]["dot"].keys() == {"dot", MAIN_LOSS}
