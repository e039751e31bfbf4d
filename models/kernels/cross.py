"""The low-rank cross network with its projection as one operation, forward and backward, for CUDA and bf16.

Wang et al., "DCN V2", arXiv 2008.13535, low-rank layers; :mod:`models.towers.dcn_v2` has the plain form. With
t_l = V_l x_l and the gates u_l = U_l t_l + b_l:

    x_{l+1} = x_0 * u_l + x_l                   out = P x_L + p
    d_L = P^T dout,   d_l = d_{l+1} + V_l^T dt_l,   q_l = x_0 * d_{l+1},   dt_l = U_l^T q_l
    hence q_{L-1} = x_0 * (P^T dout),   q_{l-1} = x_0 * (V_l^T dt_l) + q_l
    dU_l = q_l t_l^T,   db_l = q_l,   dV_l = dt_l x_l^T,   dP = dout x_L^T,   dp = dout      (summed over rows)
    dx_0 = d_0 + sum_l d_{l+1} * u_l

A layer depends on the one before through the R numbers t_l of a row. So one kernel does a layer: it sums the parts of
t_l, expands them to a tile of u_l, makes x_{l+1}, and contracts that tile to its part of t_{l+1}; with q and dt in the
place of x and t it does a layer of the backward. Columns are cut into parts because a thousand rows alone do not fill
the device. The gradient of the input computes d and u anew from t and dt, which costs less than to store and load them.
Everything is summed in a fixed order.

Shapes: B rows, N dense features, X = N + E columns, L layers, R rank, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from models.kernels import cross_kernels
from models.kernels.partial_sums import empty_parts, sum_parts

MAX_WIDTH = 128
"""Of rank and outputs: larger tiles of them do not fit into registers and shared memory."""


def cross_applies(rank: int, outputs: int) -> bool:
    """Whether the kernels take these widths; see :func:`models.kernels.own_kernel_applies` for device and dtype."""
    return max(rank, outputs) <= MAX_WIDTH


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of a block, and how Triton runs it."""

    rows: int
    columns: int
    warps: int
    stages: int

    def launch(self) -> dict[str, Any]:
        """The launch's keyword arguments."""
        return {"BLOCK_B": self.rows, "BLOCK_X": self.columns, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Plan:
    """Blocks of the layers' kernels, which cut the columns into ``parts``, and of the gradients' kernels."""

    layer: Blocks
    parts: int
    input: Blocks
    weights: Blocks


def plan_for(rows: int) -> Plan:
    """The plan for so many rows, chosen by measurements on one H200 at rank 128 and 1680 columns."""
    if rows <= 2048:
        layer, parts = Blocks(32, 64, 4, 3), 4
    elif rows <= 8192:
        layer, parts = Blocks(64, 64, 4, 4), 2
    else:
        layer, parts = Blocks(128, 64, 8, 3), 1
    return Plan(layer, parts, Blocks(128, 128, 8, 2), Blocks(128, 128, 8, 3))


def _padded(size: int) -> int:
    """The block size for ``size``: a power of two that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


@torch.library.custom_op("erase_rec::cross", mutates_args=())
def cross(
    dense_BN: Tensor,
    emb_BE: Tensor,
    down: list[Tensor],
    up: list[Tensor],
    bias: list[Tensor],
    projection: Tensor,
    projection_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected output of the cross network on [dense, emb], and what its backward reads.

    Args:
        dense_BN: [B, N], columns beside each other; N may be 0.
        emb_BE: [B, E], columns beside each other.
        down: V_l, each [R, X].
        up: U_l, each [X, R].
        bias: b_l, each [X].
        projection: [O, X].
        projection_bias: [O].

    Returns:
        The output [B, O]; x_0 .. x_L [L + 1, B, X]; t_0 .. t_{L-1} [L, B, R]. L + 2 kernels on the current stream, no
        synchronisation.
    """
    rows, columns = dense_BN.shape[0], projection.shape[1]
    layers, rank, outputs = len(down), down[0].shape[0], projection.shape[0]
    dense_BN, emb_BE = (x if x.stride(1) == 1 else x.contiguous() for x in (dense_BN, emb_BE))
    down, up, bias = ([w.contiguous() for w in weights] for weights in (down, up, bias))
    plan = plan_for(rows)
    tiles = triton.cdiv(columns, plan.layer.columns * plan.parts)
    grid = (triton.cdiv(rows, plan.layer.rows), plan.parts)
    launch = {"RANK": _padded(rank), **plan.layer.launch()}
    x = emb_BE.new_empty((layers + 1, rows, columns))
    t = emb_BE.new_empty((layers, rows, rank))
    parts = empty_parts(plan.parts, rows, rank, like=emb_BE)
    cross_kernels.first_contraction[grid](
        dense_BN, emb_BE, down[0], x[0], parts, rows, columns, dense_BN.shape[1], dense_BN.stride(0), emb_BE.stride(0),
        rank, tiles, **launch,
    )  # fmt: skip
    for layer in range(layers):
        following = down[layer + 1] if layer + 1 < layers else projection.contiguous()
        next_parts = empty_parts(plan.parts, rows, following.shape[0], like=emb_BE)
        cross_kernels.cross_layer[grid](
            x[0], x[layer], parts, t[layer], up[layer], bias[layer], following, x[layer + 1], next_parts,
            rows, columns, rank, following.shape[0], tiles,
            BACKWARD=False, HAS_BASE=True, S=plan.parts, NEXT=_padded(following.shape[0]), **launch,
        )  # fmt: skip
        parts = next_parts
    out = emb_BE.new_empty((rows, outputs))
    sum_parts(parts, out, projection_bias)
    return out, x, t


@cross.register_fake
def _(
    dense_BN: Tensor,
    emb_BE: Tensor,
    down: list[Tensor],
    up: list[Tensor],
    bias: list[Tensor],
    projection: Tensor,
    projection_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, layers = emb_BE.shape[0], len(down)
    return (
        emb_BE.new_empty((rows, projection.shape[0])),
        emb_BE.new_empty((layers + 1, rows, projection.shape[1])),
        emb_BE.new_empty((layers, rows, down[0].shape[0])),
    )


@torch.library.custom_op("erase_rec::cross_backward", mutates_args=())
def cross_backward(
    out_grad: Tensor,
    x: Tensor,
    t: Tensor,
    down: list[Tensor],
    up: list[Tensor],
    bias: list[Tensor],
    projection: Tensor,
    dense_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`cross` with respect to its inputs, the layers' stacked along a first dimension.

    L + 3 kernels on the current stream, no synchronisation.
    """
    layers, rows, rank = t.shape
    outputs, columns = projection.shape
    out_grad, projection = out_grad.contiguous(), projection.contiguous()
    down, up, bias = ([w.contiguous() for w in weights] for weights in (down, up, bias))
    plan = plan_for(rows)
    tiles = triton.cdiv(columns, plan.layer.columns * plan.parts)
    sizes = {"RANK": _padded(rank), "OUT": _padded(outputs), "LAYERS": layers}
    q, dt = torch.empty_like(x[1:]), torch.empty_like(t)
    parts, coefficients, expand = q, out_grad, projection
    # A layer's blocks read all parts of the layer above while others already write this one's: never the same buffer.
    for layer in reversed(range(layers)):
        next_parts, top = empty_parts(plan.parts, rows, rank, like=x), layer == layers - 1
        cross_kernels.cross_layer[(triton.cdiv(rows, plan.layer.rows), plan.parts)](
            x[0], q[layer] if top else q[layer + 1], parts, coefficients, expand, x, up[layer], q[layer], next_parts,
            rows, columns, coefficients.shape[1], rank, tiles, BACKWARD=True, HAS_BASE=not top,
            S=0 if top else plan.parts, RANK=_padded(coefficients.shape[1]), NEXT=_padded(rank), **plan.layer.launch(),
        )  # fmt: skip
        parts, coefficients, expand = next_parts, dt[layer], down[layer]
    sum_parts(parts, dt[0])
    dense_grad = x.new_empty((rows, dense_columns))
    emb_grad = x.new_empty((rows, columns - dense_columns))
    cross_kernels.input_gradient[(triton.cdiv(columns, plan.input.columns), triton.cdiv(rows, plan.input.rows))](
        out_grad, projection, tuple(down), tuple(up), tuple(bias), t, dt, dense_grad, emb_grad,
        rows, columns, dense_columns, rank, outputs, **sizes, **plan.input.launch(),
    )  # fmt: skip
    up_grad, bias_grad = x.new_empty((layers, columns, rank)), x.new_empty((layers, columns))
    down_grad, projection_grad = x.new_empty((layers, rank, columns)), torch.empty_like(projection)
    projection_bias_grad = x.new_empty((outputs,))
    cross_kernels.weight_gradients[(triton.cdiv(columns, plan.weights.columns), 2 * layers + 1)](
        x, q, t, dt, out_grad, up_grad, bias_grad, down_grad, projection_grad, projection_bias_grad,
        rows, columns, rank, outputs, **sizes, **plan.weights.launch(),
    )  # fmt: skip
    return dense_grad, emb_grad, down_grad, up_grad, bias_grad, projection_grad, projection_bias_grad


@cross_backward.register_fake
def _(
    out_grad: Tensor,
    x: Tensor,
    t: Tensor,
    down: list[Tensor],
    up: list[Tensor],
    bias: list[Tensor],
    projection: Tensor,
    dense_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layers, rows, rank = t.shape
    outputs, columns = projection.shape
    return (
        x.new_empty((rows, dense_columns)),
        x.new_empty((rows, columns - dense_columns)),
        x.new_empty((layers, rank, columns)),
        x.new_empty((layers, columns, rank)),
        x.new_empty((layers, columns)),
        x.new_empty((outputs, columns)),
        x.new_empty((outputs,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    dense_BN, _, down, up, bias, projection, _ = inputs
    _, x, t = output
    ctx.mark_non_differentiable(x, t)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, t, projection, *down, *up, *bias)
    ctx.layers, ctx.dense_columns = len(down), dense_BN.shape[1]


def _backward(ctx: Any, out_grad: Tensor, *unused: None) -> tuple[Any, ...]:
    x, t, projection, *weights = ctx.saved_tensors
    n = ctx.layers
    down, up, bias = weights[:n], weights[n : 2 * n], weights[2 * n :]
    dense, emb, down_grad, up_grad, bias_grad, projection_grad, projection_bias_grad = cross_backward(
        out_grad, x, t, down, up, bias, projection, ctx.dense_columns
    )
    layered = ([*grad.unbind()] for grad in (down_grad, up_grad, bias_grad))
    return (dense, emb, *layered, projection_grad, projection_bias_grad)


cross.register_autograd(_backward, setup_context=_save)


def cross_network(dense_BN: Tensor, emb_BE: Tensor, crosses: Iterable[nn.Module], projection: nn.Linear) -> Tensor:
    """The projected cross network of :class:`models.towers.dcn_v2.DCNv2Tower`, [B, O]; ``crosses`` with a rank."""
    down, up, bias = [], [], []
    for layer in crosses:
        assert isinstance(layer, nn.Sequential)
        contracting, expanding = layer
        down.append(contracting.weight)
        up.append(expanding.weight)
        bias.append(expanding.bias)
    out: Tensor = cross(dense_BN, emb_BE, down, up, bias, projection.weight, projection.bias)[0]
    return out
