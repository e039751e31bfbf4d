"""Fused linear layers, logit head and cross-entropy on CUDA, against float64 on the same rounded inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.kernels.cross_entropy import cross_entropy
from models.kernels.linear import linear, logit
from models.layers import MLP

pytestmark = pytest.mark.gpu
NEAR_ONE = 3 * 2**-24
"""Error of 1 / (1 + exp(-z)) - 1 in float32: the sum is rounded by 2^-24, and the quotient is off by 2 of its last
digits, 2^-24 each, which the difference brings forward."""
SHAPES = [(1, 8, 8), (7, 40, 72), (300, 16, 128), (1024, 1680, 512), (5000, 512, 256)]


def error(found: Tensor, reference: Tensor) -> float:
    found, reference = found.detach().double(), reference.detach()
    return float((found - reference).norm() / (reference.norm() + 1e-30))


def results(compute: Callable[..., Tensor], inputs: list[Tensor], outer: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = compute(*leaves)
    return [out, *torch.autograd.grad(out, leaves, outer.to(out.dtype))]


def layer_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_linear_equals_float64(rows: int, columns: int, outputs: int, relu: bool) -> None:
    torch.manual_seed(rows)
    made = [(rows, columns), (outputs, columns), (outputs,)]
    x, weight, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in made)
    outer = torch.randn(rows, outputs, device="cuda").bfloat16()

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, weight, bias)
        return y.relu() if relu else y

    layer = layer_of(weight, bias)
    y = linear(x.requires_grad_(), layer, relu=relu)
    found = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], outer)]
    reference = results(plain, [each.detach().double() for each in (x, weight, bias)], outer)
    usual = results(plain, [x, weight, bias], outer)
    for one, other, exact in zip(found, usual, reference, strict=True):
        assert error(one, exact) <= max(1e-2, 1.5 * error(other, exact))
    again = linear(x, layer, relu=relu)
    for one, other in zip(
        found, [again, *torch.autograd.grad(again, [x, layer.weight, layer.bias], outer)], strict=True
    ):
        assert torch.equal(one, other), "sums are taken in one order"


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (33, 100), (1024, 128), (16384, 256)])
def test_logit_equals_float64(rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in [(rows, columns), (1, columns)])
    layer = layer_of(weight, torch.randn(1, device="cuda").bfloat16())
    outer = torch.randn(rows, device="cuda")
    z = logit(x.requires_grad_(), layer)
    found = [z, *torch.autograd.grad(z, [x, layer.weight, layer.bias], outer)]
    inputs = [each.detach().double() for each in (x, layer.weight, layer.bias)]
    reference = results(lambda x, w, b: torch.nn.functional.linear(x, w, b).squeeze(1), inputs, outer)
    assert z.dtype == torch.float32
    for one, exact in zip(found, reference, strict=True):
        assert error(one, exact) <= 1e-2


def test_a_nan_stays_visible() -> None:
    layer = layer_of(torch.randn(8, 8, device="cuda").bfloat16(), torch.zeros(8, device="cuda").bfloat16())
    x = torch.randn(4, 8, device="cuda").bfloat16()
    x[1, 2] = math.nan
    y = linear(x.requires_grad_(), layer, relu=True)
    (dweight,) = torch.autograd.grad(y.float().sum(), [layer.weight])
    assert y.isnan().any()
    assert dweight.isnan().any()


@pytest.mark.parametrize("rows", [1, 100, 4096, 20000, 70000])
def test_cross_entropy_equals_float64(rows: int) -> None:
    torch.manual_seed(rows)
    z = (8 * torch.randn(rows, device="cuda")).requires_grad_()
    label = torch.randint(0, 2, (rows,), device="cuda").float()
    loss = cross_entropy(z, label)
    (found,) = torch.autograd.grad(3 * loss, [z])
    exact = z.detach().double().requires_grad_()
    reference = binary_cross_entropy_with_logits(exact, label.double())
    (expected,) = torch.autograd.grad(3 * reference, [exact])
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3 * NEAR_ONE / rows)
    bad = z.detach().clone()
    bad[0] = math.nan
    assert cross_entropy(bad, label).isnan()


def test_mlp_is_its_plain_form() -> None:
    torch.manual_seed(1)
    mlp = MLP(40, (64, 32, 8)).cuda().bfloat16()
    x = torch.randn(100, 40, device="cuda").bfloat16()
    plain = mlp(x)
    mlp.own_kernels = True
    torch.testing.assert_close(mlp(x), plain, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(mlp(x).float().sum(), list(mlp.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in grads)
