"""Dense optimizers: torch's arithmetic in any blocks, float32 masters of bf16 weights, bitwise resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer

Kind = Literal["adam", "adamw", "adagrad", "sgd"]
KINDS: tuple[Kind, ...] = ("adam", "adamw", "adagrad", "sgd")
Named = dict[str, nn.Parameter]
Gradients = dict[str, Tensor | None]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> Named:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"towers.a.weight": (4, 3), "towers.a.bias": (4,), "over_arch.scale": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def one_block(named: Named) -> dict[str, Named]:
    return {"dense": named}


def per_tower(named: Named) -> dict[str, Named]:
    over_arch = {name: parameter for name, parameter in named.items() if name.startswith("over_arch")}
    return {"over_arch": over_arch, "a": {name: named[name] for name in named if name not in over_arch}}


def gradients_of(named: Named, step: int) -> Gradients:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in named.items()}


def run(optimizer: DenseOptimizer, named: Named, start: int, end: int, max_norm: float | None = None) -> None:
    for step in range(start, end):
        optimizer.set_lr(0.1 / (step + 1))
        for block in optimizer.blocks:
            optimizer.step(block, gradients_of(named, step), max_norm)


def config(kind: Kind, weight_decay: float = 0.01) -> DenseOptimizerConfig:
    momentum = 0.9 if kind == "sgd" else 0.0
    return DenseOptimizerConfig(kind=kind, lr=0.1, weight_decay=weight_decay, eps=1e-6, momentum=momentum)


REFERENCES: dict[Kind, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def run_torch(
    kind: Kind, named: Named, steps: int, skipped: Callable[[int, str], bool] = lambda step, name: False
) -> None:
    reference = REFERENCES[kind](list(named.values()))
    for step in range(steps):
        for name, gradient in gradients_of(named, step).items():
            named[name].grad = None if skipped(step, name) else gradient
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()


@pytest.mark.parametrize("blocks", [one_block, per_tower])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_although_the_state_exists_from_the_start(
    kind: Kind, blocks: Callable[[Named], dict[str, Named]]
) -> None:
    """Float64 up to rounding; float32 bit for bit but for SGD, where torch fuses a product and a sum."""
    for dtype in (torch.float64, torch.float32):
        ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
        optimizer = DenseOptimizer(config(kind), blocks(ours))
        run(optimizer, ours, 0, 7)
        run_torch(kind, theirs, 7)
        for name in ours:
            if dtype == torch.float64 or kind == "sgd":
                rtol = 1e-12 if dtype == torch.float64 else 1e-6
                torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=0.0)
            else:
                assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_without_gradient_are_left_alone_as_torch_does(kind: Kind) -> None:
    """Their step counts stay behind, so neighbours are not updated as one from then on."""

    def skipped(step: int, name: str) -> bool:
        return (step in {1, 3} and name == "towers.a.bias") or (step == 2 and name != "towers.a.bias")

    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    optimizer = DenseOptimizer(config(kind), one_block(ours))
    for step in range(6):
        optimizer.set_lr(0.1 / (step + 1))
        found = gradients_of(ours, step)
        before = {name: value.clone() for name, value in (optimizer.masters() | optimizer.state()).items()}
        optimizer.step("dense", {name: None if skipped(step, name) else value for name, value in found.items()})
        for name, value in (optimizer.masters() | optimizer.state()).items():
            if skipped(step, name.partition("/")[0]):
                assert torch.equal(value, before[name]), name
    run_torch(kind, theirs, 6, skipped)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=0.0)


def test_building_changes_no_parameter() -> None:
    named = parameters()
    DenseOptimizer(config("adamw", weight_decay=0.5), per_tower(named))
    for name, before in parameters().items():
        assert torch.equal(named[name], before), name


def test_parameters_are_aligned_views_whose_addresses_stay() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adam"), one_block(named), dtype=torch.bfloat16)
    addresses = [value.data_ptr() for value in named.values()]
    assert all(address % 16 == 0 for address in addresses)
    assert len({value.untyped_storage().data_ptr() for value in named.values()}) == 1
    run(optimizer, named, 0, 2)
    optimizer.refresh()
    assert [value.data_ptr() for value in named.values()] == addresses


def test_a_step_updates_its_block_alone() -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adam"), per_tower(named))
    optimizer.step("a", gradients_of(named, 0))
    before = parameters()
    assert torch.equal(named["over_arch.scale"], before["over_arch.scale"])
    assert not torch.equal(named["towers.a.weight"], before["towers.a.weight"])
    assert not optimizer.state()["over_arch.scale/exp_avg"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bitwise_also_into_other_blocks(kind: Kind, dtype: torch.dtype) -> None:
    whole = parameters()
    reference = DenseOptimizer(config(kind), one_block(whole), dtype=dtype)
    run(reference, whole, 0, 8)

    first = parameters()
    stopped = DenseOptimizer(config(kind), one_block(first), dtype=dtype)
    run(stopped, first, 0, 3)

    second = parameters(seed=7)
    resumed = DenseOptimizer(config(kind), per_tower(second), dtype=dtype)
    held, saved = resumed.state() | resumed.masters(), stopped.state() | stopped.masters()
    assert held.keys() == saved.keys()
    for name, value in saved.items():
        assert (held[name].shape, held[name].dtype) == (value.shape, torch.float32)
        held[name].copy_(value)  # in place, as a checkpoint is loaded
    resumed.refresh()
    for name in first:
        assert torch.equal(second[name], first[name]), name
    run(resumed, second, 3, 8)
    for name in whole:
        assert torch.equal(second[name], whole[name]), name
        assert torch.equal(resumed.masters()[name], reference.masters()[name]), name


def test_a_resumed_optimizer_knows_which_step_counts_differ() -> None:
    """Counts of 1 and 2 side by side, read from a checkpoint."""

    def skipped(step: int, name: str) -> bool:
        return step == 0 and name == "towers.a.bias"

    theirs, ours = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    run_torch("adam", theirs, 4, skipped)
    stopped = DenseOptimizer(config("adam"), one_block(ours))
    stopped.step("dense", gradients_of(ours, 0) | {"towers.a.bias": None})
    resumed = DenseOptimizer(config("adam"), one_block(ours))
    for name, value in stopped.state().items():
        resumed.state()[name].copy_(value)
    resumed.refresh()
    run(resumed, ours, 1, 4)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_follow_float32_masters(kind: Kind) -> None:
    """A bf16 gradient is the same number in float32: the masters take the float32 optimizer's very steps."""
    computed, exact = parameters(), parameters()
    optimizer = DenseOptimizer(config(kind), one_block(computed), dtype=torch.bfloat16)
    reference = DenseOptimizer(config(kind), one_block(exact))
    assert all(torch.equal(optimizer.masters()[name], value) for name, value in parameters().items())
    for step in range(5):
        found = {name: value.bfloat16() for name, value in gradients_of(exact, step).items() if value is not None}
        optimizer.step("dense", found)
        reference.step("dense", {name: value.float() for name, value in found.items()})
    for name, value in exact.items():
        assert torch.equal(optimizer.masters()[name], value), name
        assert computed[name].dtype == torch.bfloat16
        assert torch.equal(computed[name], value.bfloat16()), name


def test_some_parameters_stay_float32_and_untrained_ones_keep_masters() -> None:
    named, frozen = parameters(), nn.Parameter(torch.tensor([1.0, 1.0 + 2**-20]), requires_grad=False)
    optimizer = DenseOptimizer(
        config("adam"),
        one_block(named),
        dtype=torch.bfloat16,
        untrained={"towers.f.weight": frozen},
        in_float32={named["towers.a.bias"]},
    )
    gradients = gradients_of(named, 0)
    assert {name: value.dtype for name, value in gradients.items() if value is not None} == {
        "towers.a.weight": torch.bfloat16,
        "towers.a.bias": torch.float32,
        "over_arch.scale": torch.bfloat16,
    }
    optimizer.step("dense", gradients)
    expected = parameters()
    widened = {name: value.float() for name, value in gradients.items() if value is not None}
    DenseOptimizer(config("adam"), one_block(expected)).step("dense", widened)
    for name, value in expected.items():
        assert torch.equal(optimizer.masters()[name], value), name
        assert torch.equal(named[name], value.to(named[name].dtype)), name
    assert torch.equal(frozen, torch.ones(2, dtype=torch.bfloat16))
    assert optimizer.masters()["towers.f.weight"].tolist() == [1.0, 1.0 + 2**-20]
    assert not any(name.startswith("towers.f.") for name in optimizer.state())


def test_gradients_in_one_buffer_of_the_layout_are_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    named = parameters()
    optimizer = DenseOptimizer(config("adam"), one_block(named))
    layout = optimizer._updates["dense"].weights.layout
    flat = torch.zeros(16 + layout.size)[16:]
    views = layout.views(flat)
    for name, value in gradients_of(named, 0).items():
        assert value is not None
        views[name].copy_(value)
    expected = parameters()
    DenseOptimizer(config("adam"), one_block(expected)).step("dense", dict(views))
    before = flat.clone()

    def refuse(*parts: object, **options: object) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(torch, "cat", refuse)
    optimizer.step("dense", dict(views), max_norm=1e9)
    for name in named:
        assert torch.equal(named[name], expected[name]), name
    assert torch.equal(flat, before)
    with pytest.raises(AssertionError, match="gathered"):
        optimizer.step("dense", gradients_of(named, 0))


def test_state_is_named_by_parameter_and_entry() -> None:
    entries = {"adam": ("exp_avg", "exp_avg_sq", "step"), "adagrad": ("sum", "step"), "sgd": ("momentum_buffer",)}
    for kind in KINDS:
        optimizer = DenseOptimizer(config(kind), per_tower(parameters()))
        wanted = entries.get(kind, entries["adam"])
        assert set(optimizer.state()) == {f"{name}/{entry}" for name in parameters() for entry in wanted}


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
        optimizer.step("w", {"w": torch.zeros(())})
        assert weight.item() == pytest.approx(expected, rel=1e-6)  # float32 rounding


@pytest.mark.parametrize("blocks", [one_block, per_tower])
@pytest.mark.parametrize("missing", [None, "towers.a.bias"])
def test_clipping_is_torch_s_over_each_block(blocks: Callable[[Named], dict[str, Named]], missing: str | None) -> None:
    """Plain SGD at learning rate 1 subtracts the clipped gradient; the caller's gradients stay as they are."""
    named = parameters(dtype=torch.float64)
    optimizer = DenseOptimizer(DenseOptimizerConfig(kind="sgd", lr=1.0), blocks(named))
    gradients = gradients_of(named, 0) | ({missing: None} if missing else {})
    kept = {name: None if value is None else value.clone() for name, value in gradients.items()}
    for block in optimizer.blocks:
        optimizer.step(block, gradients, max_norm=0.5)
    theirs = parameters(dtype=torch.float64)
    for block in blocks(theirs).values():
        for name, parameter in block.items():
            parameter.grad = kept[name] if kept[name] is None else kept[name].clone()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(block.values(), 0.5)
    for name, start in parameters(dtype=torch.float64).items():
        gradient = theirs[name].grad
        expected = start if gradient is None else start - gradient
        torch.testing.assert_close(named[name], expected, rtol=1e-12, atol=1e-12, msg=name)
        value, before = gradients[name], kept[name]
        assert value is before is None or (value is not None and before is not None and torch.equal(value, before))


def test_clipping_leaves_small_gradients_alone() -> None:
    clipped, free = parameters(), parameters()
    DenseOptimizer(config("sgd"), one_block(clipped)).step("dense", gradients_of(clipped, 0), max_norm=1e6)
    DenseOptimizer(config("sgd"), one_block(free)).step("dense", gradients_of(free, 0))
    assert all(torch.equal(clipped[name], free[name]) for name in free)
