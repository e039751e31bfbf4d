"""Gradients of parameters beside a backward: joined before anybody reads them, for leaves used once alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from schedule_cases import CPU, NAMES, make_batch, make_config, make_model, make_step, state_of, tower
from torch import Tensor, nn

from erase_rec.config.parameters_beside import hindrance
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.finite import NonFiniteLossError
from erase_rec.parameter_stream import beside, current
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.reduction.bucket import BucketReduction
from erase_rec.schedule.streams import NullStreams
from models.ctr_model import build_local_losses
from models.kernels.linear import product


class Late:
    """A stream that does nothing before it is joined: what reads its results earlier reads nan."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.ran = 0

    def run(self, compute: Callable[[], Any], reads: Sequence[Tensor]) -> Any:
        result = compute()
        self.waiting.append((result, result.clone()))
        self.ran += 1
        return result.fill_(float("nan"))

    def join(self) -> None:
        for result, value in self.waiting:
            result.copy_(value)
        self.waiting.clear()


def test_the_products_gradient_goes_beside_and_is_the_same() -> None:
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(product(x, weight).square().sum(), [x, weight])
    late = Late()
    with beside(late):
        total = product(x, weight).square().sum()
    found = torch.autograd.grad(total, [x, weight])  # outside: what counts is where the forward ran
    assert torch.equal(found[0], expected[0])
    assert found[1].isnan().all()
    late.join()
    assert torch.equal(found[1], expected[1])


def test_what_autograd_goes_on_with_stays_in_the_backward() -> None:
    weight, late = torch.randn(4, 3, requires_grad=True), Late()
    with beside(late):
        assert current(weight, None) is late
        assert current(weight * 2) is None
        total = product(torch.randn(5, 3), weight * 2).sum()
    assert current(weight) is None
    assert torch.autograd.grad(total, [weight])[0].isfinite().all()
    assert late.ran == 0


def linear_as_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer whose weight's gradient may go beside, as those of the kernels do."""
    y = product(x.reshape(-1, layer.in_features), layer.weight).reshape(*x.shape[:-1], -1)
    return y if layer.bias is None else y + layer.bias


def trained(config: Config, late: Callable[[], Late] | None) -> tuple[dict[str, Tensor], list[Late]]:
    plan, model = Plan.from_config(config), make_model(config)
    blocks = trained_blocks(model, plan)
    streams = {} if late is None else {block: late() for block in blocks}
    gradients = GradientProgram(
        model,
        plan,
        build_local_losses(config),
        NullStreams(),
        device=CPU,
        reduction=BucketReduction(blocks, World(), chunk_mib=1.0) if plan.reduction == "bucket" else None,
        parameter_streams=streams,
    )
    step = make_step(config, gradients)
    for seed in range(3):
        step(make_batch(seed))
    return state_of(model), [*streams.values()]


@pytest.mark.parametrize("reduction", [None, "bucket"])
@pytest.mark.parametrize("optimizer", ["end", "per_tower"])
@pytest.mark.parametrize("preset", ["exact", "erase"])
def test_steps_join_before_they_reduce_or_update(
    preset: str, optimizer: str, reduction: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", linear_as_product)
    loss = None if preset == "exact" else 1.0
    config = make_config(
        [tower(name, loss=loss, target="joint") for name in NAMES],
        schedule={"preset": preset, "optimizer": optimizer},
        distributed={"reduction": reduction},
    )
    expected, _ = trained(config, None)
    found, streams = trained(config, Late)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [stream.waiting for stream in streams] == [[]] * len(streams)
    assert sum(stream.ran > 0 for stream in streams) == len(streams)


def test_a_missing_join_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(nn.Linear, "forward", linear_as_product)
    monkeypatch.setattr(Late, "join", lambda self: None)
    with pytest.raises(NonFiniteLossError, match="step 1: the loss of over_arch, deep is nan"):
        trained(make_config([tower("deep")]), Late)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, None),
        ({"schedule": {"cuda_graph": "tower"}}, "schedule.cuda_graph is tower"),
        ({"schedule": {"preset": "exact", "cuda_graph": "step"}}, "all towers are on the main stream"),
        ({"train": {"micro_batches": 2}}, "train.micro_batches is 2"),
        ({"distributed": {"reduction": "ddp"}}, "distributed.reduction is ddp"),
        ({"distributed": {"reduction": "bucket"}}, None),
        ({"model": {"compile": True}}, "model.compile is true"),
    ],
)
def test_what_keeps_them_inside(sections: dict[str, Any], expected: str | None) -> None:
    schedule = {"preset": "erase", "cuda_graph": "step", **sections.pop("schedule", {})}
    config = make_config(
        [tower("deep")], schedule=schedule, **{key: sections[key] for key in sections if key != "model"}
    )
    if "model" in sections:
        config = config.model_copy(update={"model": config.model.model_copy(update=sections["model"])})
    assert hindrance(config) == expected
    plan = Plan.from_config(config)
    assert (plan.parameters_beside, plan.may_run_beside) == (False, expected is None)
