"""Linear layers with their activation and their bias gradient fused, and the logit head.

PyTorch's linear layer and ReLU are two launches forward and, beside the two matrix products, four backward: the
activation's, a reduction for the bias and a cast or a clearing here and there. Here the forward is one (the product's
own epilogue adds the bias and applies the ReLU), and the backward has one launch beside the products. Where the
schedule asks for it (:mod:`erase_rec.parameter_stream`), the backward does only what the layer below waits for, and the
rest runs beside it.

Shapes: B rows, N input columns, O output columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from erase_rec.parameter_stream import current, launched

WIDEST_HEAD = 1024
"""Input columns of a logit head that one program holds."""
COLUMNS = 64
"""Columns of a program of the bias gradient."""


def linear(x_BN: Tensor, layer: nn.Linear, *, relu: bool = False) -> Tensor:
    """``layer(x)``, then a ReLU if asked for: [B, N] -> [B, O], bf16 on CUDA."""
    tickets = _tickets(layer, -(-layer.out_features // COLUMNS))
    result: Tensor = _linear(x_BN, layer.weight, layer.bias, tickets, relu)
    return result


def product(x_BN: Tensor, weight_ON: Tensor) -> Tensor:
    """``x @ weight.T``, for a linear layer whose bias goes elsewhere: [B, N], [O, N] -> [B, O], bf16 on CUDA."""
    result: Tensor = _linear(x_BN, weight_ON, None, None, False)
    return result


def logit(x_BN: Tensor, layer: nn.Linear) -> Tensor:
    """``layer(x)`` for a layer of one output: bf16 [B, N] -> float32 [B]; N at most :data:`WIDEST_HEAD`."""
    result: Tensor = _logit(x_BN, layer.weight, layer.bias, _tickets(layer, 1))
    return result


def _tickets(layer: nn.Linear, count: int) -> Tensor:
    """Counters of the layer's own, which each launch finds at zero and leaves at zero.

    Not one for all layers: those of different towers run side by side. Not one a launch: to clear it is a launch more.
    """
    found = getattr(layer, "tickets", None)
    if found is None or found.device != layer.weight.device:
        found = layer.tickets = torch.zeros(count, dtype=torch.int32, device=layer.weight.device)
    return found


@torch.library.custom_op("erase_rec::linear", mutates_args=())
def _linear(x_BN: Tensor, weight_ON: Tensor, bias_O: Tensor | None, tickets: Tensor | None, relu: bool) -> Tensor:
    if bias_O is None:
        y_BO = torch.mm(x_BN, weight_ON.t())
        return y_BO.relu_() if relu else y_BO
    if relu:
        return torch._addmm_activation(bias_O, x_BN, weight_ON.t())
    return torch.addmm(bias_O, x_BN, weight_ON.t())


@_linear.register_fake
def _(x_BN: Tensor, weight_ON: Tensor, bias_O: Tensor | None, tickets: Tensor | None, relu: bool) -> Tensor:
    return x_BN.new_empty((x_BN.shape[0], weight_ON.shape[0]))


# The counters are at zero before and after each launch: to the caller nothing is changed.
@torch.library.custom_op("erase_rec::relu_backward", mutates_args=())
def _relu_backward(dy_BO: Tensor, y_BO: Tensor, tickets: Tensor) -> tuple[Tensor, Tensor]:
    from models.kernels.linear_triton import activation_backward

    return activation_backward(dy_BO.contiguous(), y_BO, tickets)


@_relu_backward.register_fake
def _(dy_BO: Tensor, y_BO: Tensor, tickets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y_BO), dy_BO.new_empty(dy_BO.shape[1])


@torch.library.custom_op("erase_rec::bias_gradient", mutates_args=())
def _bias_gradient(dy_BO: Tensor, tickets: Tensor) -> Tensor:
    from models.kernels.linear_triton import activation_backward

    return activation_backward(dy_BO.contiguous(), None, tickets)[1]


@_bias_gradient.register_fake
def _(dy_BO: Tensor, tickets: Tensor) -> Tensor:
    return dy_BO.new_empty(dy_BO.shape[1])


def _save_linear(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool], output: Tensor) -> None:
    x_BN, weight_ON, bias_O, tickets, ctx.relu = inputs
    ctx.has_bias = bias_O is not None
    ctx.beside = current(weight_ON, bias_O)
    ctx.save_for_backward(x_BN, weight_ON, tickets, *((output,) if ctx.relu else ()))


def _differentiate_linear(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
    x_BN, weight_ON, tickets, *outputs = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dz_BO, dbias_O = dy_BO, None
    if ctx.relu and ctx.has_bias and ctx.beside is None:
        dz_BO, dbias_O = _relu_backward(dy_BO, outputs[0], tickets)
    elif ctx.relu:
        dz_BO = torch.ops.aten.threshold_backward(dy_BO, outputs[0], 0)
    dx_BN = torch.mm(dz_BO, weight_ON) if wants_x else None
    if wants_bias and dbias_O is None:
        dbias_O = launched(ctx.beside, lambda: _bias_gradient(dz_BO, tickets), dz_BO)
    dweight_ON = launched(ctx.beside, lambda: torch.mm(dz_BO.t(), x_BN), dz_BO, x_BN) if wants_weight else None
    return dx_BN, dweight_ON, dbias_O, None, None


_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)


@torch.library.custom_op("erase_rec::logit", mutates_args=())
def _logit(x_BN: Tensor, weight_1N: Tensor, bias_1: Tensor, tickets: Tensor) -> Tensor:
    from models.kernels.linear_triton import logit_forward

    return logit_forward(x_BN, weight_1N, bias_1)


@_logit.register_fake
def _(x_BN: Tensor, weight_1N: Tensor, bias_1: Tensor, tickets: Tensor) -> Tensor:
    return x_BN.new_empty(x_BN.shape[0], dtype=torch.float32)


@torch.library.custom_op("erase_rec::logit_backward", mutates_args=())
def _logit_backward(
    dlogit_B: Tensor, x_BN: Tensor, weight_1N: Tensor, tickets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from models.kernels.linear_triton import logit_backward

    return logit_backward(dlogit_B.contiguous(), x_BN, weight_1N, tickets)


@_logit_backward.register_fake
def _(dlogit_B: Tensor, x_BN: Tensor, weight_1N: Tensor, tickets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x_BN), torch.empty_like(weight_1N), weight_1N.new_empty(1)


def _save_logit(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    x_BN, weight_1N, bias_1, tickets = inputs
    ctx.beside = current(weight_1N, bias_1)
    ctx.save_for_backward(x_BN, weight_1N, tickets)


def _differentiate_logit(ctx: Any, dlogit_B: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.beside is None:
        return *_logit_backward(dlogit_B, *ctx.saved_tensors), None
    x_BN, weight_1N, tickets = ctx.saved_tensors
    dx_BN = torch.mul(dlogit_B[:, None], weight_1N, out=torch.empty_like(x_BN))
    _, dweight_1N, dbias_1 = launched(
        ctx.beside, lambda: _logit_backward(dlogit_B, x_BN, weight_1N, tickets), dlogit_B, x_BN
    )
    return dx_BN, dweight_1N, dbias_1, None


_logit.register_autograd(_differentiate_logit, setup_context=_save_logit)
