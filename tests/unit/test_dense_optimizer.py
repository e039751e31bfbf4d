"""Dense optimizers: torch's arithmetic, state by name, bitwise resume, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.errors import UserError

Kind = Literal["adam", "adamw", "adagrad", "sgd"]
KINDS: tuple[Kind, ...] = ("adam", "adamw", "adagrad", "sgd")


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"towers.a.weight": (4, 3), "towers.a.bias": (4,), "over_arch.scale": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def run(optimizer: DenseOptimizer, named: dict[str, nn.Parameter], start: int, end: int) -> None:
    for step in range(start, end):
        set_gradients(named, step)
        optimizer.set_lr(0.1 / (step + 1))
        optimizer.step()


def config(kind: Kind, weight_decay: float = 0.01) -> DenseOptimizerConfig:
    momentum = 0.9 if kind == "sgd" else 0.0
    return DenseOptimizerConfig(kind=kind, lr=0.1, weight_decay=weight_decay, eps=1e-6, momentum=momentum)


REFERENCES: dict[Kind, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_bitwise_although_the_state_exists_from_the_start(kind: Kind) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = DenseOptimizer(config(kind), ours)
    reference = REFERENCES[kind](list(theirs.values()))
    run(optimizer, ours, 0, 5)
    for step in range(5):
        set_gradients(theirs, step)
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_building_changes_no_parameter_and_leaves_no_gradient() -> None:
    named = parameters()
    DenseOptimizer(config("adamw", weight_decay=0.5), named)
    for name, before in parameters().items():
        assert torch.equal(named[name], before), name
        assert named[name].grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bitwise(kind: Kind) -> None:
    whole = parameters()
    run(DenseOptimizer(config(kind), whole), whole, 0, 8)

    first = parameters()
    stopped = DenseOptimizer(config(kind), first)
    run(stopped, first, 0, 3)
    saved = {name: value.clone() for name, value in stopped.state().items()}
    weights = {name: parameter.detach().clone() for name, parameter in first.items()}

    second = parameters(seed=7)
    resumed = DenseOptimizer(config(kind), second)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(weights[name])
    resumed.load_state(saved)
    run(resumed, second, 3, 8)
    for name in whole:
        assert torch.equal(second[name], whole[name]), name


def test_state_is_keyed_by_name_not_by_position() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adam"), named)
    run(optimizer, named, 0, 2)
    other = dict(reversed(parameters().items()))
    reordered = DenseOptimizer(config("adam"), other)
    reordered.load_state(optimizer.state())
    assert {"towers.a.weight/exp_avg", "towers.a.weight/exp_avg_sq", "towers.a.weight/step"} <= optimizer.state().keys()
    for name, value in optimizer.state().items():
        assert torch.equal(reordered.state()[name], value), name


def test_load_copies_and_does_not_share() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adagrad"), named)
    saved = {name: torch.full_like(value, 2.0) for name, value in optimizer.state().items()}
    optimizer.load_state(saved)
    run(optimizer, named, 0, 1)
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in saved.values())


def test_state_of_another_optimizer_is_refused_with_names() -> None:
    adagrad = DenseOptimizer(config("adagrad"), parameters())
    adam = DenseOptimizer(config("adam"), parameters())
    with pytest.raises(UserError, match=r"missing .*towers\.a\.bias/exp_avg.* unexpected .*towers\.a\.bias/sum"):
        adam.load_state(adagrad.state())


def test_state_of_another_shape_is_refused_and_not_broadcast() -> None:
    optimizer = DenseOptimizer(config("adam"), parameters())
    state: dict[str, Tensor] = optimizer.state() | {"towers.a.weight/exp_avg": torch.ones(())}
    with pytest.raises(UserError, match=r"other shapes in \['towers\.a\.weight/exp_avg'\]"):
        optimizer.load_state(state)
    assert not optimizer.state()["towers.a.weight/exp_avg"].any()


def test_sgd_without_momentum_has_no_state() -> None:
    assert DenseOptimizer(DenseOptimizerConfig(kind="sgd"), parameters()).state() == {}


def test_weight_decay_is_decoupled_in_adamw_only() -> None:
    """With a zero gradient AdamW shrinks by lr * decay; Adam's L2 term becomes a gradient and is normalised."""
    for kind, expected in (("adamw", 2.0 * (1 - 0.1 * 0.5)), ("adam", 2.0 - 0.1)):
        weight = nn.Parameter(torch.tensor(2.0))
        optimizer = DenseOptimizer(DenseOptimizerConfig(kind=kind, lr=0.1, weight_decay=0.5), {"w": weight})
        weight.grad = torch.zeros(())
        optimizer.step()
        assert weight.item() == pytest.approx(expected, rel=1e-6)  # float32 rounding


def test_clip_scales_to_the_global_norm_and_returns_the_norm_before() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("sgd"), named)
    set_gradients(named, 0)
    before = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
    norm = torch.cat([gradient.flatten() for gradient in before.values()]).norm()
    returned = optimizer.clip(0.5)
    assert torch.allclose(returned, norm)
    for name, parameter in named.items():
        # clip_grad_norm_ divides by norm + 1e-6
        torch.testing.assert_close(parameter.grad, before[name] * 0.5 / norm, rtol=1e-5, atol=0.0)


def test_clip_leaves_small_gradients_alone() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("sgd"), named)
    set_gradients(named, 0)
    before = [parameter.grad.clone() for parameter in named.values() if parameter.grad is not None]
    optimizer.clip(1e6)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, named.values(), strict=True) if p.grad is not None)


def test_a_parameter_without_gradient_is_not_updated() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adamw"), named)
    set_gradients(named, 0)
    named["towers.a.bias"].grad = None
    optimizer.step()
    assert torch.equal(named["towers.a.bias"], parameters()["towers.a.bias"])
    assert not torch.equal(named["towers.a.weight"], parameters()["towers.a.weight"])
