"""Dense optimizers: torch's arithmetic in any blocks, state by name, bitwise resume, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer

Kind = Literal["adam", "adamw", "adagrad", "sgd"]
KINDS: tuple[Kind, ...] = ("adam", "adamw", "adagrad", "sgd")
Named = dict[str, nn.Parameter]


def parameters(seed: int = 0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"towers.a.weight": (4, 3), "towers.a.bias": (4,), "over_arch.scale": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def one_block(named: Named) -> dict[str, Named]:
    return {"dense": named}


def per_tower(named: Named) -> dict[str, Named]:
    over_arch = {name: parameter for name, parameter in named.items() if name.startswith("over_arch")}
    return {"over_arch": over_arch, "a": {name: named[name] for name in named if name not in over_arch}}


def set_gradients(named: Named, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def run(optimizer: DenseOptimizer, named: Named, start: int, end: int) -> None:
    for step in range(start, end):
        set_gradients(named, step)
        optimizer.set_lr(0.1 / (step + 1))
        for block in optimizer.blocks:
            optimizer.step(block)


def config(kind: Kind, weight_decay: float = 0.01) -> DenseOptimizerConfig:
    momentum = 0.9 if kind == "sgd" else 0.0
    return DenseOptimizerConfig(kind=kind, lr=0.1, weight_decay=weight_decay, eps=1e-6, momentum=momentum)


REFERENCES: dict[Kind, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("blocks", [one_block, per_tower])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_bitwise_although_the_state_exists_from_the_start(
    kind: Kind, blocks: Callable[[Named], dict[str, Named]]
) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = DenseOptimizer(config(kind), blocks(ours))
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
    DenseOptimizer(config("adamw", weight_decay=0.5), per_tower(named))
    for name, before in parameters().items():
        assert torch.equal(named[name], before), name
        assert named[name].grad is None


def test_a_step_updates_its_block_alone() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adam"), per_tower(named))
    set_gradients(named, 0)
    optimizer.step("a")
    before = parameters()
    assert torch.equal(named["over_arch.scale"], before["over_arch.scale"])
    assert not torch.equal(named["towers.a.weight"], before["towers.a.weight"])
    assert not optimizer.state()["over_arch.scale/exp_avg"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bitwise_also_into_other_blocks(kind: Kind) -> None:
    whole = parameters()
    run(DenseOptimizer(config(kind), one_block(whole)), whole, 0, 8)

    first = parameters()
    stopped = DenseOptimizer(config(kind), one_block(first))
    run(stopped, first, 0, 3)

    second = parameters(seed=7)
    resumed = DenseOptimizer(config(kind), per_tower(second))
    state = resumed.state()
    assert state.keys() == stopped.state().keys()
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
        for name, value in stopped.state().items():
            state[name].copy_(value)  # in place, as a checkpoint is loaded
    run(resumed, second, 3, 8)
    for name in whole:
        assert torch.equal(second[name], whole[name]), name


def test_state_is_named_by_parameter_and_entry() -> None:
    optimizer = DenseOptimizer(config("adam"), per_tower(parameters()))
    entries = ("exp_avg", "exp_avg_sq", "step")
    assert set(optimizer.state()) == {f"{name}/{entry}" for name in parameters() for entry in entries}


def test_a_parameter_in_two_blocks_is_refused() -> None:
    named = parameters()
    with pytest.raises(AssertionError, match="in two blocks"):
        DenseOptimizer(config("adam"), {"a": named, "b": {"again": named["towers.a.bias"]}})


def test_sgd_without_momentum_has_no_state() -> None:
    assert DenseOptimizer(DenseOptimizerConfig(kind="sgd"), one_block(parameters())).state() == {}


def test_weight_decay_is_decoupled_in_adamw_only() -> None:
    """With a zero gradient AdamW shrinks by lr * decay; Adam's L2 term becomes a gradient and is normalised."""
    for kind, expected in (("adamw", 2.0 * (1 - 0.1 * 0.5)), ("adam", 2.0 - 0.1)):
        weight = nn.Parameter(torch.tensor(2.0))
        optimizer = DenseOptimizer(DenseOptimizerConfig(kind=kind, lr=0.1, weight_decay=0.5), {"w": {"w": weight}})
        weight.grad = torch.zeros(())
        optimizer.step("w")
        assert weight.item() == pytest.approx(expected, rel=1e-6)  # float32 rounding


@pytest.mark.parametrize("blocks", [one_block, per_tower])
def test_clip_scales_to_the_block_s_norm_and_returns_the_norm_before(
    blocks: Callable[[Named], dict[str, Named]],
) -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("sgd"), blocks(named))
    for block, members in optimizer.blocks.items():
        set_gradients(named, 0)
        before = {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}
        norm = torch.cat([before[name].flatten() for name in members]).norm()
        assert torch.allclose(optimizer.clip(block, 0.5), norm)
        for name, parameter in named.items():
            # clip_grad_norm_ divides by norm + 1e-6
            expected = before[name] * 0.5 / norm if name in members and norm > 0.5 else before[name]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=0.0)


def test_clip_leaves_small_gradients_alone() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("sgd"), one_block(named))
    set_gradients(named, 0)
    before = [parameter.grad.clone() for parameter in named.values() if parameter.grad is not None]
    optimizer.clip("dense", 1e6)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, named.values(), strict=True) if p.grad is not None)


def test_a_parameter_without_gradient_is_not_updated() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adamw"), one_block(named))
    set_gradients(named, 0)
    named["towers.a.bias"].grad = None
    optimizer.step("dense")
    assert torch.equal(named["towers.a.bias"], parameters()["towers.a.bias"])
    assert not torch.equal(named["towers.a.weight"], parameters()["towers.a.weight"])
