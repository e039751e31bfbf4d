"""What holds of the fused linear layer without a device: its shapes under tracing, and where it is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.heads import LogitHead
from models.kernels.linear import COLUMNS, linear, logit
from models.layers import MLP


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_shapes_are_known_without_running(relu: bool, bias: bool) -> None:
    """As a compiler sees it: outputs and gradients have the shapes of the plain layer."""
    with FakeTensorMode():
        layer = nn.Linear(24, COLUMNS + 1, bias=bias)
        x = torch.empty(7, 24, requires_grad=True)
        y = linear(x, layer, relu=relu)
        gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    assert y.shape == (7, COLUMNS + 1)
    assert [tuple(each.shape) for each in gradients] == [(7, 24), *(tuple(each.shape) for each in layer.parameters())]


def test_logit_shapes_are_known_without_running() -> None:
    with FakeTensorMode():
        layer = nn.Linear(24, 1)
        x = torch.empty(7, 24, requires_grad=True)
        z = logit(x, layer)
        gradients = torch.autograd.grad(z.sum(), [x, *layer.parameters()])
    assert z.shape == (7,)
    assert z.dtype == torch.float32
    assert [tuple(each.shape) for each in gradients] == [(7, 24), (1, 24), (1,)]


def test_on_the_cpu_the_plain_form_runs() -> None:
    torch.manual_seed(0)
    mlp, head = MLP(6, (8, 4)), LogitHead(4)
    x = torch.randn(5, 6)
    expected = head(mlp(x))
    mlp.own_kernels = head.own_kernels = True
    assert torch.equal(head(mlp(x)), expected)
    assert not hasattr(mlp.layers[0], "tickets")
