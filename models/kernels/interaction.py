"""DLRM's pairwise interaction as one kernel forward and one backward.

The plain form multiplies all vectors with all, gathers the lower triangle by an index and joins it to the first vector:
a batched product of unaligned size and two copies. Here a program holds the vectors of a sample, writes what lies below
the diagonal in the same order, and in the backward pass reads the gradient as the symmetric matrix that it is.

Shapes: B rows, F fields, D embedding dim, V vectors (F, and one more with a bottom), W columns of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VECTORS = 32


def interaction_applies(bottom_BD: Tensor | None, field_BFD: Tensor) -> bool:
    """Whether the shapes suit the kernels; see :func:`models.kernels.own_kernel_applies` for device and dtype."""
    _, fields, dim = field_BFD.shape
    vectors = fields + (bottom_BD is not None)
    same_dtype = bottom_BD is None or bottom_BD.dtype == field_BFD.dtype
    return vectors <= MAX_VECTORS and dim % 16 == 0 and dim <= 128 and same_dtype


@triton.jit
def _vectors(
    bottom, field, sample, stride_b, V: tl.constexpr, D: tl.constexpr, HAS_BOTTOM: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """[ROWS, DIM]: the bottom where there is one, then the fields; zeros after them."""
    v = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, DIM)[None, :]
    place = v - HAS_BOTTOM
    tile = tl.load(field + sample * stride_b + place * D + d, mask=(place >= 0) & (v < V) & (d < D), other=0.0)
    if HAS_BOTTOM:
        tile += tl.load(bottom + sample * D + d + v * 0, mask=(v == 0) & (d < D), other=0.0)
    return tile


@triton.jit
def _forward_kernel(
    bottom,  # [B, D], or anything without one
    field,  # [B, F, D], samples stride_b apart
    out,  # [B, W]
    stride_b,
    V: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BOTTOM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    tile = _vectors(bottom, field, sample, stride_b, V, D, HAS_BOTTOM, ROWS, DIM)
    dots = tl.dot(tile, tl.trans(tile))
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    start = out + sample * W
    if HAS_BOTTOM:
        d = tl.arange(0, DIM)
        tl.store(start + d, tl.load(bottom + sample * D + d, mask=d < D, other=0.0), mask=d < D)
        start += D
    tl.store(start + i * (i - 1) // 2 + j, dots.to(tile.dtype), mask=(j < i) & (i < V))
    pairs: tl.constexpr = V * (V - 1) // 2
    rest = pairs + tl.arange(0, 8)
    tl.store(start + rest, tl.zeros((8,), tile.dtype), mask=rest < W - HAS_BOTTOM * D)


@triton.jit
def _backward_kernel(
    bottom,  # [B, D], or anything without one
    field,  # [B, F, D], samples stride_b apart
    grad,  # [B, W]
    grad_bottom,  # as bottom
    grad_field,  # [B, F, D]
    stride_b,
    V: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HAS_BOTTOM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    tile = _vectors(bottom, field, sample, stride_b, V, D, HAS_BOTTOM, ROWS, DIM)
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    start = grad + sample * W
    pairs = tl.load(start + HAS_BOTTOM * D + high * (high - 1) // 2 + low, mask=(low < high) & (high < V), other=0.0)
    result = tl.dot(pairs, tile)
    v = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, DIM)[None, :]
    place = v - HAS_BOTTOM
    if HAS_BOTTOM:
        first = (v == 0) & (d < D)
        result += tl.load(start + d + v * 0, mask=first, other=0.0)
        tl.store(grad_bottom + sample * D + d + v * 0, result.to(tile.dtype), mask=first)
    fields: tl.constexpr = V - HAS_BOTTOM
    target = grad_field + (sample * fields + place) * D + d
    tl.store(target, result.to(tile.dtype), mask=(place >= 0) & (v < V) & (d < D))


def dot_interaction(bottom_BD: Tensor | None, field_BFD: Tensor, width: int) -> Tensor:
    """[bottom; <v_i, v_j> for i > j; 0 ..], differentiable, on the current stream.

    Args:
        bottom_BD: [B, D], the first vector; None: the fields are all vectors.
        field_BFD: [B, F, D]; the samples may lie apart, each one is contiguous.
        width: W, at most 8 columns more than bottom and pairs have.

    Returns:
        [B, W]
    """
    if bottom_BD is None:
        fields_only: Tensor = _interaction(field_BFD.new_empty((field_BFD.shape[0], 0)), field_BFD, width)
        return fields_only
    result: Tensor = _interaction(bottom_BD, field_BFD, width)
    return result


@torch.library.custom_op("erase_rec::dot_interaction", mutates_args=())
def _interaction(bottom_BD: Tensor, field_BFD: Tensor, width: int) -> Tensor:
    """A bottom without columns is none."""
    field_BFD = _dense_samples(field_BFD)
    batch = field_BFD.shape[0]
    out_BW = field_BFD.new_empty((batch, width))
    _forward_kernel[(batch,)](
        bottom_BD.contiguous(),
        field_BFD,
        out_BW,
        field_BFD.stride(0),
        **_sizes(bottom_BD, field_BFD, width),
        num_warps=1,
    )
    return out_BW


@torch.library.custom_op("erase_rec::dot_interaction_backward", mutates_args=())
def _interaction_backward(bottom_BD: Tensor, field_BFD: Tensor, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
    field_BFD = _dense_samples(field_BFD)
    batch, width = grad_BW.shape
    grad_bottom_BD, grad_field_BFD = _empty_gradients(bottom_BD, field_BFD)
    _backward_kernel[(batch,)](
        bottom_BD.contiguous(),
        field_BFD,
        grad_BW.contiguous(),
        grad_bottom_BD,
        grad_field_BFD,
        field_BFD.stride(0),
        **_sizes(bottom_BD, field_BFD, width),
        num_warps=1,
    )
    return grad_bottom_BD, grad_field_BFD


@_interaction.register_fake
def _(bottom_BD: Tensor, field_BFD: Tensor, width: int) -> Tensor:
    return field_BFD.new_empty((field_BFD.shape[0], width))


@_interaction_backward.register_fake
def _(bottom_BD: Tensor, field_BFD: Tensor, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_gradients(bottom_BD, field_BFD)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    bottom_BD, field_BFD, _ = inputs
    ctx.save_for_backward(bottom_BD, field_BFD)


def _differentiate(ctx: Any, grad_BW: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_bottom_BD, grad_field_BFD = _interaction_backward(*ctx.saved_tensors, grad_BW)
    return grad_bottom_BD, grad_field_BFD, None


_interaction.register_autograd(_differentiate, setup_context=_save)


def _empty_gradients(bottom_BD: Tensor, field_BFD: Tensor) -> tuple[Tensor, Tensor]:
    return bottom_BD.new_empty(bottom_BD.shape), field_BFD.new_empty(field_BFD.shape)


def _dense_samples(field_BFD: Tensor) -> Tensor:
    """``field_BFD`` with each sample contiguous, as the kernels read it."""
    _, _, dim = field_BFD.shape
    return field_BFD if field_BFD.stride()[1:] == (dim, 1) else field_BFD.contiguous()


def _sizes(bottom_BD: Tensor, field_BFD: Tensor, width: int) -> dict[str, int]:
    _, fields, dim = field_BFD.shape
    has_bottom = int(bottom_BD.shape[1] > 0)
    vectors = fields + has_bottom
    rows = 16 if vectors <= 16 else 32
    powers = {"ROWS": rows, "DIM": triton.next_power_of_2(dim)}
    return {"V": vectors, "D": dim, "W": width, "HAS_BOTTOM": has_bottom, **powers}
