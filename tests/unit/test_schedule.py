"""Exactness of every schedule in one process: float64 on the CPU, with the real towers, against plain autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from schedule_cases import (
    KINDS,
    NAMES,
    TABLES,
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
from erase_rec.finite import NonFiniteLossError

MODES = ("main", "local", "both", "none")
EXACT = 1e-12
"""Sums in another order differ in float64 by a few units in the last place, about 1e-16 each."""
STEPS = [make_batch(seed, size) for seed, size in enumerate((10, 10, 10, 10, 2))]
"""The last batch has fewer rows than a batch may have micro-batches."""


def six_towers(detach: str, targets: str, **sections: Any) -> Config:
    """``detach``: all, some or none of the towers; ``targets``: own, joint or both kinds mixed."""
    towers = [
        tower(
            name,
            loss=0.5 + 0.25 * at,
            target=("own", "joint")[at % 2] if targets == "mixed" else targets,
            detach=detach == "all" or (detach == "some" and at % 2 == 0),
        )
        for at, name in enumerate(KINDS)
    ]
    return make_config(towers, **sections)


TOPOLOGIES: dict[str, list[dict[str, Any]]] = {
    "side by side": [tower(name, loss=1 + at, target=("own", "joint")[at % 2]) for at, name in enumerate(NAMES)],
    "detached chain": [tower("deep"), tower("dot", "deep"), tower("cross", "dot", "deep", target="joint")],
    "kept chain": [
        tower("deep", detach=False, loss=None),
        tower("dot", "deep", detach=False, loss=0.5),
        tower("cross", "dot", detach=False, loss=None),
        tower("mask"),
    ],
    "kept after detached": [
        tower("deep"),
        tower("cross", "deep", detach=False, loss=None),
        tower("attention", "cross", "deep", detach=False, loss=2.0, target="joint"),
    ],
    "heads and cuts inside": [
        tower("deep", cut_at=1),
        tower("dot", target="joint"),
        tower("cross", "dot", cut_at=1),
        tower("mask", head={"kind": "goodness", "params": {"threshold": 0.5}}, loss=0.5),
        tower("attention", "mask", detach=False, loss=0.5, head={"kind": "goodness"}),
    ],
    "frozen": [
        tower("deep", detach=False, loss=None, frozen=True),
        tower("dot", loss=None, frozen=True),
        tower("cross", "dot"),
        tower("mask", "deep", "dot", detach=False, loss=None),
    ],
    "shared streams": [
        tower("deep", stream="main"),
        tower("dot", stream="both"),
        tower("cross", "dot", stream="both", detach=False),
        tower("pairs", stream="main", detach=False, loss=None),
    ],
}


@pytest.mark.parametrize(
    ("detach", "targets", "mode", "early"),
    list(itertools.product(["all", "some", "none"], ["own", "joint", "mixed"], MODES, [True, False])),
)
def test_gradients_equal_plain_autograd(detach: str, targets: str, mode: str, early: bool) -> None:
    config = six_towers(detach, targets, schedule={"early_backward": early, "embedding_gradient": mode})
    model, batch = make_model(config), make_batch()
    found, (expected, pooled) = make_gradients(model, config).gradients(batch), plain_gradients(model, config, batch)
    assert_same(found.parameters, expected, EXACT)
    assert_same({"pooled": found.pooled}, {"pooled": pooled}, EXACT)


@pytest.mark.parametrize("towers", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early", [True, False])
def test_five_steps_equal_plain_training(towers: list[dict[str, Any]], mode: str, early: bool) -> None:
    """Chains, frozen towers, shared streams; uneven micro-batches; one update a tower, and one for all."""
    schedule = {"early_backward": early, "embedding_gradient": mode}
    expected = train_plainly(make_config(towers, schedule=schedule), STEPS)
    for micro_batches, optimizer in ((1, "per_tower"), (2, "end"), (3, "per_tower")):
        config = make_config(
            towers, schedule=schedule | {"optimizer": optimizer}, train={"steps": 1, "micro_batches": micro_batches}
        )
        assert mode in {"main", "local"} or refusals(config) == []
        assert_same(train(config, STEPS), expected, EXACT)


@pytest.mark.parametrize("targets", ["own", "joint", "mixed"])
@pytest.mark.parametrize("logits", ["none", "inputs", "additive", "gated"])
def test_early_equals_aggregate_bitwise(targets: str, logits: str) -> None:
    """Launching a backward earlier changes no bit: each leaf's gradient is taken alone, summed in tower order."""
    kinds = ({"early_backward": False}, {"dispatch": "blocking"}, {"dispatch": "non_blocking", "workers": 3})
    late, *early = (
        train(six_towers("all", targets, schedule=schedule, over_arch={"logits": logits}), STEPS) for schedule in kinds
    )
    for other in early:
        assert_same(other, late, 0)


def test_detaching_changes_the_gradients() -> None:
    """Negative control: the comparisons above can fail."""
    cut, whole = six_towers("all", "own"), six_towers("none", "own")
    with pytest.raises(AssertionError, match=r"towers\.deep|tables\."):
        assert_same(train(cut, STEPS), train_plainly(whole, STEPS), EXACT)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("clip", "optimizer"), [("global", "end"), ("per_tower", "end"), ("per_tower", "per_tower")])
def test_clipping_equals_torch(early: bool, clip: str, optimizer: str) -> None:
    """The norm over everything, or over each tower and the over-arch; plain SGD, on which a factor shows."""
    sections = {"schedule": {"early_backward": early, "optimizer": optimizer}}
    dense = {"kind": "sgd", "lr": 0.1}
    clipped = six_towers(
        "some", "mixed", optimizer={"dense": dense | {"clip": clip, "max_grad_norm": 0.05}}, **sections
    )
    free = six_towers("some", "mixed", optimizer={"dense": dense}, **sections)
    found = train(clipped, STEPS)
    assert_same(found, train_plainly(clipped, STEPS), EXACT)
    with pytest.raises(AssertionError):
        assert_same(found, train_plainly(free, STEPS), 1e-3)


@pytest.mark.parametrize("early", [True, False])
def test_each_table_is_updated_once_with_the_summed_gradient(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, batch = six_towers("all", "own", schedule={"early_backward": early}), make_batch()
    model = make_model(config)
    gradients = make_gradients(model, config)
    _, pooled = plain_gradients(model, config, batch)
    assert pooled is not None
    expected = {name: weight.clone() for name, weight in model.embeddings.tables().items()}
    for position, table in enumerate(TABLES):
        ids = batch.sparse.values.reshape(3, -1)[position]
        expected[table.name].index_add_(0, ids, pooled[:, 4 * position : 4 * position + 4], alpha=-0.1)
    calls = []
    update = model.embeddings.backward_and_update
    monkeypatch.setattr(
        model.embeddings, "backward_and_update", lambda *arguments: (calls.append(1), update(*arguments))
    )
    make_step(config, gradients)(batch)
    assert len(calls) == 1
    assert_same(model.embeddings.tables(), expected, EXACT)


@pytest.mark.parametrize("optimizer", ["end", "per_tower"])
@pytest.mark.parametrize("dispatch", ["blocking", "non_blocking"])
def test_a_loss_that_is_not_finite_stops_every_update(optimizer: str, dispatch: str) -> None:
    config = six_towers("some", "mixed", schedule={"optimizer": optimizer, "dispatch": dispatch})
    model = make_model(config)
    with torch.no_grad():
        next(iter(model.tower("attention").parameters())).fill_(torch.nan)
    step, before = make_step(config, make_gradients(model, config)), state_of(model)
    with pytest.raises(NonFiniteLossError, match="attention"):
        step(make_batch())
    after = state_of(model)
    assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)


def test_a_frozen_tower_stays_as_it_is() -> None:
    config = make_config(TOPOLOGIES["frozen"])
    start, end = train(config, []), train(config, STEPS)
    unchanged = {name for name in start if torch.equal(start[name], end[name])}
    assert unchanged == {name for name in start if name.startswith(("towers.deep.", "towers.dot."))}


def test_blocks_that_share_a_parameter_are_refused() -> None:
    config = six_towers("all", "own")
    model = make_model(config)
    model.tower("pairs").head = model.tower("mask").head
    with pytest.raises(ValueError, match=r"pairs and mask share the parameter towers\.pairs\.head"):
        make_gradients(model, config)
