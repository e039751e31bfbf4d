"""Linear layers with their activation and their bias gradient fused, and the logit head.

PyTorch's linear layer and ReLU are two launches forward and, beside the two matrix products, four backward: the
activation's, a reduction for the bias and a cast or a clearing here and there. Here the forward is one (the product's
own epilogue adds the bias and applies the ReLU), and the backward has one launch beside the products.

Shapes: B rows, N input columns, O output columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDEST_HEAD = 1024
"""Input columns of a logit head that one program holds."""
COLUMNS = 64
"""Columns of a program of the bias gradient."""


def linear(x_BN: Tensor, layer: nn.Linear, *, relu: bool = False) -> Tensor:
    """``layer(x)``, then a ReLU if asked for: [B, N] -> [B, O], bf16 on CUDA."""
    tickets = _tickets(layer, -(-layer.out_features // COLUMNS))
    result: Tensor = _Linear.apply(x_BN, layer.weight, layer.bias, relu, tickets)
    return result


def logit(x_BN: Tensor, layer: nn.Linear) -> Tensor:
    """``layer(x)`` for a layer of one output: bf16 [B, N] -> float32 [B]; N at most :data:`WIDEST_HEAD`."""
    result: Tensor = _Logit.apply(x_BN, layer.weight, layer.bias, _tickets(layer, 1))
    return result


def _tickets(layer: nn.Linear, count: int) -> Tensor:
    """Counters of the layer's own, which each launch finds at zero and leaves at zero.

    Not one for all layers: those of different towers run side by side. Not one a launch: to clear it is a launch more.
    """
    found = getattr(layer, "tickets", None)
    if found is None or found.device != layer.weight.device:
        found = layer.tickets = torch.zeros(count, dtype=torch.int32, device=layer.weight.device)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BN: Tensor, weight_ON: Tensor, bias_O: Tensor | None, relu: bool, tickets: Tensor) -> Tensor:
        if bias_O is None:
            y_BO = torch.mm(x_BN, weight_ON.t())
            if relu:
                y_BO.relu_()
        elif relu:
            y_BO = torch._addmm_activation(bias_O, x_BN, weight_ON.t())
        else:
            y_BO = torch.addmm(bias_O, x_BN, weight_ON.t())
        ctx.relu, ctx.has_bias, ctx.tickets = relu, bias_O is not None, tickets
        ctx.save_for_backward(x_BN, weight_ON, y_BO if relu else None)
        return y_BO

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        from models.kernels.linear_triton import activation_backward

        x_BN, weight_ON, y_BO = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dz_BO, dbias_O = dy_BO, None
        if ctx.relu or (ctx.has_bias and wants_bias):
            tickets = ctx.tickets if ctx.has_bias and wants_bias else None
            dz_BO, dbias_O = activation_backward(dy_BO.contiguous(), y_BO, tickets)
        dx_BN = torch.mm(dz_BO, weight_ON) if wants_x else None
        dweight_ON = torch.mm(dz_BO.t(), x_BN) if wants_weight else None
        return dx_BN, dweight_ON, dbias_O, None, None


class _Logit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BN: Tensor, weight_1N: Tensor, bias_1: Tensor, tickets: Tensor) -> Tensor:
        from models.kernels.linear_triton import logit_forward

        ctx.save_for_backward(x_BN, weight_1N)
        ctx.tickets = tickets
        return logit_forward(x_BN, weight_1N, bias_1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogit_B: Tensor) -> tuple[Tensor | None, ...]:
        from models.kernels.linear_triton import logit_backward

        x_BN, weight_1N = ctx.saved_tensors
        return *logit_backward(dlogit_B.contiguous(), x_BN, weight_1N, ctx.tickets), None
