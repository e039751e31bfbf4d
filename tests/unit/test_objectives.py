"""Objectives that keep something from step to step, and steps that cut nothing, in every schedule: plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_cases import (
    CPU,
    assert_same,
    make_batch,
    make_config,
    make_gradients,
    make_model,
    make_step,
    plain_gradients,
    refusals,
    state_of,
    tower,
    train,
    train_plainly,
)

from erase_rec.config.schema import Config
from erase_rec.schedule.audit import audit
from erase_rec.schedule.objective_state import FACTORS, ObjectiveState
from erase_rec.schedule.plan import MAIN_LOSS, Plan
from models.ctr_model import build_local_losses

EXACT = 1e-12
"""Sums in another order differ in float64 by a few units in the last place, about 1e-16 each."""
STEPS = [make_batch(seed, size) for seed, size in enumerate((10, 10, 10, 10, 3))]
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "weights that follow": [
        tower("deep", objective={"weight_floor": 0.01}),
        tower("dot", loss=0.5, target="joint", objective={"weight_floor": 0.3}),
        tower("cross"),
    ],
    "teacher": [
        tower("deep", objective={"teacher": 0.3}),
        tower("dot", loss=0.5, target="joint", objective={"teacher": 0.9}),
        tower("cross", "deep", cut_at=1),
    ],
    "ranking": [
        tower("deep", objective={"kind": "bce_pairwise"}),
        tower("dot", loss=0.5, target="joint", objective={"kind": "bce_pairwise"}),
    ],
    "all at once": [
        tower("deep", objective={"kind": "bce_pairwise", "weight_floor": 0.05}),
        tower("dot", loss=0.5, target="joint", objective={"weight_floor": 0.01, "teacher": 0.5}),
        tower("cross", "dot", detach=False, loss=2.0, objective={"teacher": 0.2}),
        tower("mask", cut_at=1, head={"kind": "mlp", "params": {"hidden": (4,), "context": True}}),
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
    taught = any((section["loss"] or {}).get("teacher") for section in towers)
    over_arch = {"logits": "gated"} | ({"teacher_decay": 0.6} if taught else {})
    return make_config(towers, schedule=schedule, over_arch=over_arch, **sections)


@pytest.mark.parametrize("exact_every", [None, 2])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("towers", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_five_steps_equal_plain_training(
    towers: list[dict[str, Any]], schedule: dict[str, Any], exact_every: int | None
) -> None:
    config = config_of(towers, exact_every, schedule=schedule)
    assert refusals(config) == []
    assert_same(train(config, STEPS), train_plainly(config, STEPS), EXACT)


@pytest.mark.parametrize("name", ["weights that follow", "teacher"])
def test_micro_batches_are_one_batch(name: str) -> None:
    config = config_of(OBJECTIVES[name], 3, train={"steps": 1, "micro_batches": 2})
    assert refusals(config) == []
    assert_same(train(config, STEPS), train_plainly(config, STEPS), EXACT)


@pytest.mark.parametrize("key", ["weight_floor", "teacher", "kind"])
def test_each_objective_changes_the_training(key: str) -> None:
    """Negative control: the comparisons above can fail."""
    value = {"weight_floor": 0.5, "teacher": 0.5, "kind": "bce_pairwise"}[key]
    changed = config_of([tower("deep", objective={key: value}), tower("dot")])
    plain = config_of([tower("deep"), tower("dot")])
    with pytest.raises(AssertionError, match=r"towers\.deep|tables\."):
        assert_same(train(changed, STEPS), train(plain, STEPS), 1e-4)


@pytest.mark.parametrize("mode", ["both", "local", "none"])
def test_a_step_that_cuts_nothing_has_the_gradient_of_all_losses_through_everything(mode: str) -> None:
    config = config_of(OBJECTIVES["all at once"], 2, schedule={"embedding_gradient": mode})
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


def test_the_audit_holds_the_schedule_against_what_was_kept() -> None:
    """After some steps: the teacher is not the over-arch any more, and factors are not 1."""
    config = config_of(OBJECTIVES["all at once"], 2)
    model = make_model(config)
    step = make_step(config, make_gradients(model, config))
    for batch in STEPS:
        step(batch)
    kept, plan, losses = step.kept(), Plan.from_config(config), build_local_losses(config)
    report = audit(model, plan, losses, STEPS[0], kept=kept)
    assert report.findings == ()
    anew = audit(model, plan, losses, STEPS[0])
    assert report.norms["deep"]["deep"] != pytest.approx(anew.norms["deep"]["deep"])
    # And a kept weight that the schedule does not use is seen.
    doubled = {name: 2 * value if name == FACTORS else value for name, value in kept.items()}
    assert audit(model, plan, losses, STEPS[0], kept=doubled).norms["deep"]["deep"] == pytest.approx(
        2 * report.norms["deep"]["deep"]
    )


def test_a_step_that_goes_on_from_what_was_kept_is_the_same_step() -> None:
    config = config_of(OBJECTIVES["all at once"])
    whole = make_model(config)
    step = make_step(config, make_gradients(whole, config))
    for batch in STEPS[:2]:
        step(batch)
    kept = {name: value.clone() for name, value in step.kept().items()}
    half = ObjectiveState(whole, Plan.from_config(config), CPU, kept)
    assert half.tensors().keys() == kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in half.tensors().items())
    assert {FACTORS, "teacher.head.linear.weight", "teacher.gate.bias"} <= kept.keys()


def test_nothing_is_kept_where_no_objective_asks() -> None:
    config = config_of([tower("deep"), tower("dot", target="joint")], 2)
    assert make_step(config, make_gradients(make_model(config), config)).kept() == {}


def test_weights_are_what_a_loss_is_above_the_main_loss_and_the_floor_at_least() -> None:
    config = config_of(OBJECTIVES["weights that follow"])
    state = ObjectiveState(make_model(config), Plan.from_config(config), CPU)
    assert state.tensors()[FACTORS].tolist() == [1, 1]
    losses = {"deep": torch.tensor(0.9), "dot": torch.tensor(0.1), "cross": torch.tensor(5.0)}
    state.follow(torch.tensor(0.4), losses)
    state.settle()
    assert state.tensors()[FACTORS].tolist() == pytest.approx([0.5, 0.3])


def test_the_teacher_is_an_average_of_the_over_arch_that_no_gradient_reaches() -> None:
    config = config_of(OBJECTIVES["teacher"])
    model = make_model(config)
    state, first = ObjectiveState(model, Plan.from_config(config), CPU), state_of(model)
    name = "head.linear.weight"
    with torch.no_grad():
        for parameter in model.over_arch.parameters():
            parameter.add_(1)
    state.average(model.over_arch)
    torch.testing.assert_close(state.tensors()[f"teacher.{name}"], first[f"over_arch.{name}"] + 0.4)
    outputs = [torch.randn(3, 6).double().requires_grad_(), *(torch.randn(3, 6).double() for _ in range(2))]
    outputs[2] = torch.randn(3, model.tower("cross").out_dim).double()
    taught = state.teach(outputs, [torch.zeros(3).double()] * 3)
    assert not taught.requires_grad
    assert ((taught >= 0) & (taught <= 1)).all()
