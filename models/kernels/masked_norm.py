"""MaskNet's masked layer norm, and layer norm with ReLU, each one kernel forward and one backward, for CUDA and bf16.

Wang et al., "MaskNet", arXiv 2102.07619; :mod:`models.towers.masknet` has the plain form. Both operations take the bias
of the linear layer before them, so that its gradient is summed where the layer's gradient is made instead of in a pass
of its own. Means and deviations are computed anew in the backward, which reads the same numbers anyway. Gradients of
parameters are summed over rows in a fixed order: partial sums a block of rows, then :func:`parts_sum`, which runs
beside the rest where the schedule asks for it (:mod:`erase_rec.parameter_stream`).

Shapes: B rows, F fields, D embedding dim, E = F * D, H width of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from erase_rec.parameter_stream import current, launched
from models.kernels.partial_sums import empty_parts, parts_sum

EPS = 1e-5  # as torch.nn.functional.layer_norm
MAX_WIDTH = 4096
"""Of a normalised row: it lies in registers."""


def masked_norm_applies(dim: int, width: int) -> bool:
    """Whether the kernels take fields of ``dim`` and a layer of ``width``."""
    return max(dim, width) <= MAX_WIDTH


@triton.jit
def _normalised(x, inside, width, eps):
    """Rows of x, zero outside, minus their mean over their deviation; and the reciprocal of the deviation."""
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + eps)
    return centred * scale[:, None], scale


@triton.jit
def _norm_gradient(grad, normalised, scale, width):
    """Gradient of what was normalised, from that of the result; zero outside where grad is."""
    mean = tl.sum(grad, axis=1) / width
    along = tl.sum(grad * normalised, axis=1) / width
    return (grad - mean[:, None] - normalised * along[:, None]) * scale[:, None]


@triton.jit
def _masked_norm_forward(
    mask_ptr,  # [B, E], without its bias
    mask_bias_ptr,  # [E]
    emb_ptr,  # [B, E] of row stride emb_stride
    scale_ptr,  # [E]
    shift_ptr,  # [E]
    out_ptr,  # [B, E]
    rows,
    columns,
    emb_stride,
    eps,
    dim: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    within = tl.arange(0, DIM)
    col = tl.program_id(1) * dim + within
    col_inside = within < dim
    inside = (row < rows)[:, None] & col_inside[None, :]
    emb = tl.load(emb_ptr + row[:, None] * emb_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    mask = tl.load(mask_ptr + row[:, None] * columns + col[None, :], mask=inside, other=0.0).to(tl.float32)
    mask += tl.load(mask_bias_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(shift_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    normalised, _ = _normalised(emb, inside, dim, eps)
    out = mask * (normalised * scale + shift)
    tl.store(out_ptr + row[:, None] * columns + col[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _masked_norm_backward(
    out_grad_ptr,  # [B, E]
    mask_ptr,  # [B, E], without its bias
    mask_bias_ptr,  # [E]
    emb_ptr,  # [B, E] of row stride emb_stride
    scale_ptr,  # [E]
    shift_ptr,  # [E]
    mask_grad_ptr,  # out: [B, E]
    emb_grad_ptr,  # out: [B, E]
    parts_ptr,  # out: [P, 3, E] float32: of mask_bias, scale, shift
    rows,
    columns,
    emb_stride,
    eps,
    blocks,  # of rows, one after another in a program
    dim: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DIM: tl.constexpr,
):
    part = tl.program_id(0)
    within = tl.arange(0, DIM)
    col = tl.program_id(1) * dim + within
    col_inside = within < dim
    mask_bias = tl.load(mask_bias_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(shift_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    bias_sum = tl.zeros((BLOCK_B, DIM), tl.float32)
    scale_sum = tl.zeros((BLOCK_B, DIM), tl.float32)
    shift_sum = tl.zeros((BLOCK_B, DIM), tl.float32)
    for block in range(part * blocks, (part + 1) * blocks):
        row = (block * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
        inside = (row < rows)[:, None] & col_inside[None, :]
        emb = tl.load(emb_ptr + row[:, None] * emb_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        offset = row[:, None] * columns + col[None, :]
        mask = tl.load(mask_ptr + offset, mask=inside, other=0.0).to(tl.float32) + mask_bias
        out_grad = tl.load(out_grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        normalised, reciprocal = _normalised(emb, inside, dim, eps)
        mask_grad = out_grad * (normalised * scale + shift)
        affine_grad = out_grad * mask
        emb_grad = _norm_gradient(affine_grad * scale, normalised, reciprocal, dim)
        tl.store(mask_grad_ptr + offset, mask_grad.to(mask_grad_ptr.dtype.element_ty), mask=inside)
        tl.store(emb_grad_ptr + offset, emb_grad.to(emb_grad_ptr.dtype.element_ty), mask=inside)
        bias_sum += mask_grad
        scale_sum += affine_grad * normalised
        shift_sum += affine_grad
    parts = parts_ptr + part * 3 * columns + col
    tl.store(parts, tl.sum(bias_sum, axis=0), mask=col_inside)
    tl.store(parts + columns, tl.sum(scale_sum, axis=0), mask=col_inside)
    tl.store(parts + 2 * columns, tl.sum(shift_sum, axis=0), mask=col_inside)


@triton.jit
def _norm_relu_forward(
    x_ptr,  # [B, H], without its bias
    bias_ptr,  # [H]
    scale_ptr,  # [H]
    shift_ptr,  # [H]
    out_ptr,  # [B, H]
    rows,
    eps,
    width: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    col = tl.arange(0, WIDTH)
    col_inside = col < width
    inside = (row < rows)[:, None] & col_inside[None, :]
    offset = row[:, None] * width + col[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(shift_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    normalised, _ = _normalised(x, inside, width, eps)
    out = normalised * scale + shift
    out = tl.where(out < 0.0, 0.0, out)  # keeps NaN, as ReLU does
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_relu_backward(
    out_grad_ptr,  # [B, H]
    x_ptr,  # [B, H], without its bias
    bias_ptr,  # [H]
    scale_ptr,  # [H]
    shift_ptr,  # [H]
    x_grad_ptr,  # out: [B, H]
    parts_ptr,  # out: [P, 3, H] float32: of bias, scale, shift
    rows,
    eps,
    blocks,
    width: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    part = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    col_inside = col < width
    bias = tl.load(bias_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scale_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(shift_ptr + col, mask=col_inside, other=0.0).to(tl.float32)[None, :]
    bias_sum = tl.zeros((BLOCK_B, WIDTH), tl.float32)
    scale_sum = tl.zeros((BLOCK_B, WIDTH), tl.float32)
    shift_sum = tl.zeros((BLOCK_B, WIDTH), tl.float32)
    for block in range(part * blocks, (part + 1) * blocks):
        row = (block * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
        inside = (row < rows)[:, None] & col_inside[None, :]
        offset = row[:, None] * width + col[None, :]
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) + bias
        out_grad = tl.load(out_grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        normalised, reciprocal = _normalised(x, inside, width, eps)
        affine_grad = tl.where(normalised * scale + shift > 0.0, out_grad, 0.0)
        x_grad = _norm_gradient(affine_grad * scale, normalised, reciprocal, width)
        x_grad = tl.where(inside, x_grad, 0.0)
        tl.store(x_grad_ptr + offset, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside)
        bias_sum += x_grad
        scale_sum += affine_grad * normalised
        shift_sum += affine_grad
    parts = parts_ptr + part * 3 * width + col
    tl.store(parts, tl.sum(bias_sum, axis=0), mask=col_inside)
    tl.store(parts + width, tl.sum(scale_sum, axis=0), mask=col_inside)
    tl.store(parts + 2 * width, tl.sum(shift_sum, axis=0), mask=col_inside)


def _row_blocks(rows: int, block: int, most: int) -> tuple[int, int]:
    """How many programs share the rows, at most ``most``, and the blocks of rows of each."""
    blocks = triton.cdiv(rows, block)
    each = triton.cdiv(blocks, most)
    return triton.cdiv(blocks, each), each


def _masked_norm_programs(rows: int, dim: int) -> tuple[int, int, int]:
    """Rows of a block, programs over the rows of each field, and the blocks of each; of the backward."""
    block = max(1, 2048 // triton.next_power_of_2(dim))
    return block, *_row_blocks(rows, block, most=64)


def _norm_relu_programs(rows: int, width: int) -> tuple[int, int, int]:
    """Rows of a block, programs, and the blocks of each; of the backward."""
    block = max(1, 4096 // triton.next_power_of_2(width))
    # One program on each multiprocessor: the sum over programs costs more than rows one after another.
    return block, *_row_blocks(rows, block, most=128)


@torch.library.custom_op("erase_rec::masked_norm", mutates_args=())
def masked_norm(mask_BE: Tensor, mask_bias_E: Tensor, emb_BE: Tensor, scale_FD: Tensor, shift_FD: Tensor) -> Tensor:
    """(mask + mask_bias) * (layer norm of each field of emb * scale + shift), [B, E]; one kernel."""
    mask_BE, scale_FD, shift_FD = mask_BE.contiguous(), scale_FD.contiguous(), shift_FD.contiguous()
    emb_BE = emb_BE if emb_BE.stride(1) == 1 else emb_BE.contiguous()
    (rows, columns), (fields, dim) = mask_BE.shape, scale_FD.shape
    out = torch.empty_like(mask_BE)
    padded = triton.next_power_of_2(dim)
    block = max(1, 4096 // padded)
    _masked_norm_forward[(triton.cdiv(rows, block), fields)](
        mask_BE, mask_bias_E, emb_BE, scale_FD, shift_FD, out, rows, columns, emb_BE.stride(0), EPS,
        dim=dim, BLOCK_B=block, DIM=padded, num_warps=4,
    )  # fmt: skip
    return out


@masked_norm.register_fake
def _(mask_BE: Tensor, mask_bias_E: Tensor, emb_BE: Tensor, scale_FD: Tensor, shift_FD: Tensor) -> Tensor:
    return mask_BE.new_empty(mask_BE.shape)


@torch.library.custom_op("erase_rec::masked_norm_backward", mutates_args=())
def masked_norm_backward(
    out_grad: Tensor, mask_BE: Tensor, mask_bias_E: Tensor, emb_BE: Tensor, scale_FD: Tensor, shift_FD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the mask and of emb, and parts of those of mask_bias, scale and shift, [P, 3, E] float32."""
    out_grad, mask_BE = out_grad.contiguous(), mask_BE.contiguous()
    scale_FD, shift_FD = scale_FD.contiguous(), shift_FD.contiguous()
    emb_BE = emb_BE if emb_BE.stride(1) == 1 else emb_BE.contiguous()
    (rows, columns), (fields, dim) = mask_BE.shape, scale_FD.shape
    mask_grad, emb_grad = torch.empty_like(mask_BE), torch.empty_like(mask_BE)
    block, programs, blocks = _masked_norm_programs(rows, dim)
    parts = empty_parts(programs, 3, columns, like=mask_BE)
    _masked_norm_backward[(programs, fields)](
        out_grad, mask_BE, mask_bias_E, emb_BE, scale_FD, shift_FD, mask_grad, emb_grad, parts,
        rows, columns, emb_BE.stride(0), EPS, blocks,
        dim=dim, BLOCK_B=block, DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return mask_grad, emb_grad, parts


@masked_norm_backward.register_fake
def _(
    out_grad: Tensor, mask_BE: Tensor, mask_bias_E: Tensor, emb_BE: Tensor, scale_FD: Tensor, shift_FD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    programs = _masked_norm_programs(mask_BE.shape[0], scale_FD.shape[1])[1]
    parts = empty_parts(programs, 3, scale_FD.numel(), like=mask_BE)
    return mask_BE.new_empty(mask_BE.shape), mask_BE.new_empty(mask_BE.shape), parts


@torch.library.custom_op("erase_rec::norm_relu", mutates_args=())
def norm_relu(x_BH: Tensor, bias_H: Tensor, scale_H: Tensor, shift_H: Tensor) -> Tensor:
    """ReLU(layer norm of (x + bias) * scale + shift), [B, H]; one kernel on the current stream."""
    x_BH = x_BH.contiguous()
    rows, width = x_BH.shape
    out = torch.empty_like(x_BH)
    padded = triton.next_power_of_2(width)
    block = max(1, 2048 // padded)
    _norm_relu_forward[(triton.cdiv(rows, block),)](
        x_BH, bias_H, scale_H, shift_H, out, rows, EPS, width=width, BLOCK_B=block, WIDTH=padded, num_warps=4
    )
    return out


@norm_relu.register_fake
def _(x_BH: Tensor, bias_H: Tensor, scale_H: Tensor, shift_H: Tensor) -> Tensor:
    return x_BH.new_empty(x_BH.shape)


@torch.library.custom_op("erase_rec::norm_relu_backward", mutates_args=())
def norm_relu_backward(
    out_grad: Tensor, x_BH: Tensor, bias_H: Tensor, scale_H: Tensor, shift_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of x, and parts of those of bias, scale and shift, [P, 3, H] float32; one kernel."""
    out_grad, x_BH = out_grad.contiguous(), x_BH.contiguous()
    rows, width = x_BH.shape
    x_grad = torch.empty_like(x_BH)
    block, programs, blocks = _norm_relu_programs(rows, width)
    parts = empty_parts(programs, 3, width, like=x_BH)
    _norm_relu_backward[(programs,)](
        out_grad, x_BH, bias_H, scale_H, shift_H, x_grad, parts, rows, EPS, blocks,
        width=width, BLOCK_B=block, WIDTH=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return x_grad, parts


@norm_relu_backward.register_fake
def _(out_grad: Tensor, x_BH: Tensor, bias_H: Tensor, scale_H: Tensor, shift_H: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x_BH.shape
    return x_BH.new_empty(x_BH.shape), empty_parts(_norm_relu_programs(rows, width)[1], 3, width, like=x_BH)


def _save_masked_norm(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, mask_bias_E, _, scale_FD, shift_FD = inputs
    ctx.beside = current(mask_bias_E, scale_FD, shift_FD)
    ctx.save_for_backward(*inputs)


def _save_norm_relu(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.beside = current(*inputs[1:])
    ctx.save_for_backward(*inputs)


def _masked_norm_gradients(ctx: Any, out_grad: Tensor) -> tuple[Tensor, ...]:
    mask_BE, mask_bias_E, emb_BE, scale_FD, shift_FD = ctx.saved_tensors
    mask_grad, emb_grad, parts = masked_norm_backward(out_grad, mask_BE, mask_bias_E, emb_BE, scale_FD, shift_FD)
    grads = launched(ctx.beside, lambda: parts_sum(parts, scale_FD.dtype), parts)
    return mask_grad, grads[0], emb_grad, grads[1].view_as(scale_FD), grads[2].view_as(shift_FD)


def _norm_relu_gradients(ctx: Any, out_grad: Tensor) -> tuple[Tensor, ...]:
    x_BH, bias_H, scale_H, shift_H = ctx.saved_tensors
    x_grad, parts = norm_relu_backward(out_grad, x_BH, bias_H, scale_H, shift_H)
    grads = launched(ctx.beside, lambda: parts_sum(parts, scale_H.dtype), parts)
    return x_grad, grads[0], grads[1], grads[2]


masked_norm.register_autograd(_masked_norm_gradients, setup_context=_save_masked_norm)
norm_relu.register_autograd(_norm_relu_gradients, setup_context=_save_norm_relu)
