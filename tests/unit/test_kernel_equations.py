"""The equations that the fused kernels of DCN v2 and MaskNet compute, written out, against the towers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.towers.dcn_v2 import DCNv2Tower
from models.towers.masknet import MaskNetTower

EPS = 1e-5


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return module


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_cross_gradients_by_the_recurrences_of_t_and_dt(layers: int) -> None:
    """As in the docstring of models.kernels.cross: one vector of R numbers a row passes from layer to layer."""
    rows, dense_dim, fields = 5, 3, [4, 2]
    tower = randomised(DCNv2Tower(DCNv2Tower.Config(num_layers=layers, rank=2, out_dim=3), dense_dim, fields), 1)
    assert isinstance(tower, DCNv2Tower)
    dense, emb = draw(2, rows, dense_dim).requires_grad_(), draw(3, rows, sum(fields)).requires_grad_()
    out = tower(dense, emb)
    out_grad = draw(4, *out.shape)
    named = dict(tower.named_parameters())
    expected = torch.autograd.grad(out, [dense, emb, *named.values()], out_grad)
    expected_grads = dict(zip(["dense", "emb", *named], expected, strict=True))

    weights = {name: parameter.detach() for name, parameter in named.items()}
    down = [weights[f"crosses.{i}.0.weight"] for i in range(layers)]
    up = [weights[f"crosses.{i}.1.weight"] for i in range(layers)]
    bias = [weights[f"crosses.{i}.1.bias"] for i in range(layers)]
    projection = weights["projection.weight"]
    x0 = torch.cat((dense, emb), 1).detach()
    x, t = [x0], []
    for i in range(layers):
        t.append(x[i] @ down[i].T)
        x.append(x0 * (t[i] @ up[i].T + bias[i]) + x[i])
    torch.testing.assert_close(x[layers] @ projection.T + weights["projection.bias"], out.detach())

    found = {"projection.weight": out_grad.T @ x[layers], "projection.bias": out_grad.sum(0)}
    q = x0 * (out_grad @ projection)
    d = out_grad @ projection
    input_grad = torch.zeros_like(x0)
    for i in reversed(range(layers)):
        dt = q @ up[i]
        found[f"crosses.{i}.1.weight"], found[f"crosses.{i}.1.bias"] = q.T @ t[i], q.sum(0)
        found[f"crosses.{i}.0.weight"] = dt.T @ x[i]
        input_grad += d * (t[i] @ up[i].T + bias[i])
        d = d + dt @ down[i]
        q = x0 * (dt @ down[i]) + q
    found["dense"], found["emb"] = (input_grad + d).split([dense_dim, sum(fields)], 1)
    assert found.keys() == expected_grads.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_grads[name], msg=name)


def norm_gradient(grad: Tensor, normalised: Tensor, reciprocal: Tensor) -> Tensor:
    along = (grad * normalised).mean(-1, keepdim=True)
    return (grad - grad.mean(-1, keepdim=True) - normalised * along) * reciprocal


def normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    reciprocal = ((centred**2).mean(-1, keepdim=True) + EPS).rsqrt()
    return centred * reciprocal, reciprocal


def test_masked_norm_gradients() -> None:
    rows, fields, dim = 6, 3, 4
    mask, emb = draw(1, rows, fields * dim).requires_grad_(), draw(2, rows, fields * dim).requires_grad_()
    scale, shift = draw(3, fields, dim).requires_grad_(), draw(4, fields, dim).requires_grad_()
    bias, out_grad = draw(5, fields * dim).requires_grad_(), draw(6, rows, fields * dim)
    field_BFD = emb.view(rows, fields, dim)
    norm_BFD = nn.functional.layer_norm(field_BFD, (dim,)) * scale + shift
    expected = torch.autograd.grad((mask + bias) * norm_BFD.flatten(1), [mask, bias, emb, scale, shift], out_grad)

    normalised, reciprocal = normalise(field_BFD)
    mask_grad = out_grad * (normalised * scale + shift).flatten(1)
    affine_grad = (out_grad * (mask + bias)).view_as(field_BFD)
    emb_grad = norm_gradient(affine_grad * scale, normalised, reciprocal).flatten(1)
    found = [mask_grad, mask_grad.sum(0), emb_grad, (affine_grad * normalised).sum(0), affine_grad.sum(0)]
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.detach(), right)


def test_norm_relu_gradients() -> None:
    rows, width = 6, 5
    x, bias = draw(1, rows, width).requires_grad_(), draw(2, width).requires_grad_()
    scale, shift = draw(3, width).requires_grad_(), draw(4, width).requires_grad_()
    out_grad = draw(5, rows, width)
    out = torch.relu(nn.functional.layer_norm(x + bias, (width,), scale, shift))
    expected = torch.autograd.grad(out, [x, bias, scale, shift], out_grad)

    normalised, reciprocal = normalise(x + bias)
    affine_grad = torch.where(normalised * scale + shift > 0, out_grad, 0.0)
    x_grad = norm_gradient(affine_grad * scale, normalised, reciprocal)
    found = [x_grad, x_grad.sum(0), (affine_grad * normalised).sum(0), affine_grad.sum(0)]
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.detach(), right)


@pytest.mark.parametrize("kind", [DCNv2Tower, MaskNetTower])
def test_own_kernels_change_nothing_on_the_cpu(kind: type[DCNv2Tower] | type[MaskNetTower]) -> None:
    config = DCNv2Tower.Config(rank=2) if kind is DCNv2Tower else MaskNetTower.Config()
    tower = kind(config, 2, [4, 4]).bfloat16()  # type: ignore[arg-type]
    dense, emb = draw(1, 3, 2).bfloat16(), draw(2, 3, 8).bfloat16()
    plain = tower(dense, emb)
    tower.own_kernels = True
    assert torch.equal(tower(dense, emb), plain)
