"""Kernels of the engine against their plain forms on CUDA: flat Adam, sums of gradients, sums of metrics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from erase_rec import dense_arithmetic
from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.kernels import triton_applies
from erase_rec.kernels.ordered_sum import ordered_sum
from eval.metrics import add_click_sums, click_sums

pytestmark = pytest.mark.gpu
SHAPES = {"w": (300, 77), "b": (77,), "last": (5,)}
Kind = Literal["adam", "adamw", "adagrad", "sgd"]


def parameters(device: str, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for name, shape in SHAPES.items()
    }


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


def test_the_kernel_is_used() -> None:
    assert triton_applies(torch.zeros(1, device="cuda"))


@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad", "sgd"])
def test_steps_equal_the_plain_form_in_float64(
    kind: Kind, weight_decay: float, dtype: torch.dtype, max_norm: float | None
) -> None:
    """Forty steps with changing rates, one parameter left out now and then: the counts fall apart."""
    config = DenseOptimizerConfig(kind=kind, weight_decay=weight_decay, momentum=0.9 if kind == "sgd" else 0.0)
    named, reference = parameters("cuda"), parameters("cpu", torch.float64)
    optimizer = DenseOptimizer(config, {"dense": named}, dtype=dtype)
    plain = DenseOptimizer(config, {"dense": reference})
    for step in range(40):
        for each in (optimizer, plain):
            each.set_lr(0.01 / (1 + step // 3))
        found = gradients(step)
        left_out: dict[str, Tensor | None] = {"b": None} if step % 7 == 2 else {}
        optimizer.step("dense", {name: value.to("cuda", dtype) for name, value in found.items()} | left_out, max_norm)
        plain.step("dense", {name: value.double() for name, value in found.items()} | left_out, max_norm)
    for name, expected in (plain.masters() | plain.state()).items():
        held = (optimizer.masters() | optimizer.state())[name]
        assert held.dtype == torch.float32
        # Forty float32 roundings; in float32 a norm of thousands of elements is off by 1e-6.
        assert distance(held, expected) < 1e-5, name
    for name, parameter in named.items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, optimizer.masters()[name].to(dtype)), name


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_the_kernel_equals_the_plain_form_on_the_same_device(kind: Kind) -> None:
    """One step from a state in the middle of training, of more elements than one program has."""
    config = DenseOptimizerConfig(kind=kind, weight_decay=0.01)
    generator = torch.Generator(device="cuda").manual_seed(1)
    weights = nn.Parameter(torch.randn(1_000_003, generator=generator, device="cuda"))
    optimizer = DenseOptimizer(config, {"a": {"w": weights}}, dtype=torch.bfloat16)
    state = {entry: optimizer.state()[f"w/{entry}"] for entry in ("exp_avg", "exp_avg_sq")}
    for value in state.values():
        value.copy_(torch.rand(value.shape, generator=generator, device="cuda") * 1e-3)
    optimizer.state()["w/step"].fill_(41)
    optimizer.refresh()
    master = optimizer.masters()["w"].clone()
    copies = {entry: value.clone() for entry, value in state.items()}
    gradient = torch.randn(weights.shape, generator=generator, device="cuda").bfloat16()
    optimizer.step("a", {"w": gradient})
    lr, step = (torch.tensor(value, dtype=torch.float64, device="cuda") for value in (config.lr, 42.0))
    dense_arithmetic.update(config, master, copies, gradient.float(), lr=lr, step=step)
    torch.testing.assert_close(optimizer.masters()["w"], master, rtol=1e-6, atol=1e-7)
    for entry, value in copies.items():
        torch.testing.assert_close(state[entry], value, rtol=1e-6, atol=1e-10)
    assert float(optimizer.state()["w/step"]) == 42
    assert torch.equal(weights, optimizer.masters()["w"].bfloat16())


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_a_captured_step_follows_rate_count_and_clipping(kind: Kind) -> None:
    """Replays with other rates and gradients are the eager steps, bit for bit."""
    config = DenseOptimizerConfig(kind=kind)
    captured, eager = parameters("cuda"), parameters("cuda")
    replayed = DenseOptimizer(config, {"a": captured}, dtype=torch.bfloat16)
    stepped = DenseOptimizer(config, {"a": eager}, dtype=torch.bfloat16)
    held = {name: value.cuda() for name, value in gradients(0).items()}
    for each in (replayed, stepped):
        each.step("a", held, max_norm=1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step("a", held, max_norm=1.0)
    for step in range(1, 9):
        for name, value in gradients(step).items():
            held[name].copy_(value)
        for each in (replayed, stepped):
            each.set_lr(0.1 / step)
        graph.replay()
        stepped.step("a", held, max_norm=1.0)
    for name, value in (stepped.masters() | stepped.state()).items():
        assert torch.equal((replayed.masters() | replayed.state())[name], value), name
    for name, value in eager.items():
        assert torch.equal(captured[name], value), name


def test_a_step_does_not_wait_for_the_device(host_never_waits: Callable[[], AbstractContextManager[None]]) -> None:
    named = parameters("cuda")
    optimizer = DenseOptimizer(DenseOptimizerConfig(kind="adam"), {"a": named}, dtype=torch.bfloat16)
    found = {name: value.cuda() for name, value in gradients(0).items()}
    optimizer.step("a", found, 1.0)  # compiles
    with host_never_waits():
        optimizer.set_lr(0.5)
        optimizer.step("a", found, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 6, 8, 9, 17])
def test_gradients_are_summed_in_float32_and_rounded_once(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(count)
    parts = [torch.randn(37, 1001, generator=generator, device="cuda").to(dtype) for _ in range(count)]
    parts[0] = parts[0].t().contiguous().t()  # not every backward leaves rows in order
    found = ordered_sum(parts)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 1024, 5000])
def test_click_sums_add_up_as_in_the_plain_form(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    total = torch.zeros(3, 5, dtype=torch.float64, device="cuda")
    expected = torch.zeros_like(total)
    for scale in (1.0, 40.0):  # saturated predictions too
        logit = (torch.randn(3, rows, generator=generator, device="cuda") * scale).to(dtype)
        label = (torch.rand(rows, generator=generator, device="cuda") < 0.3).float()
        add_click_sums(total, logit, label)
        expected += click_sums(logit, label)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    bad = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]], device="cuda")
    add_click_sums(total.zero_(), bad, torch.ones(1, device="cuda"))
    assert total[:, 2].isnan().tolist() == [True, False, False]
    assert total[1:, 2].tolist() == [0.0, torch.inf]
