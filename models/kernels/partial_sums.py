"""Sums of partial results in a fixed order, so that a repeated run gives the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_kernel(
    parts_ptr,  # [P, M] float32
    bias_ptr,  # [BIAS_COLUMNS], read where HAS_BIAS
    out_ptr,  # [M]
    parts,
    columns,
    bias_columns,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = column < columns
    total = tl.zeros((BLOCK_P, BLOCK_M), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part < parts)[:, None] & inside[None, :]
        total += tl.load(parts_ptr + part[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    if HAS_BIAS:
        result += tl.load(bias_ptr + column % bias_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Writes the sum of ``parts`` [P, ...] float32 into ``out`` [...], plus ``bias`` along its last dimension.

    One kernel on the current stream; the order of summation depends on the shape alone.
    """
    count, columns = parts.shape[0], out.numel()
    # Some two thousand numbers a block: all parts at once where they fit, because a loop waits for memory.
    block_parts = triton.next_power_of_2(count) if count <= 16 else 64 if count <= 64 else 128
    block_columns = 512 if count <= 16 else 2048 // block_parts
    _sum_kernel[(triton.cdiv(columns, block_columns),)](
        parts,
        parts if bias is None else bias,
        out,
        count,
        columns,
        1 if bias is None else bias.numel(),
        HAS_BIAS=bias is not None,
        BLOCK_P=block_parts,
        BLOCK_M=block_columns,
        num_warps=4,
    )


@torch.library.custom_op("erase_rec::parts_sum", mutates_args=())
def parts_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``parts`` [P, ...] float32, [...] in ``dtype``, as :func:`sum_parts` gives it."""
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    sum_parts(parts, out)
    return out


@parts_sum.register_fake
def _(parts: Tensor, dtype: torch.dtype) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


def empty_parts(count: int, *shape: int, like: Tensor) -> Tensor:
    """Room for ``count`` partial results of ``shape``, float32, on the device of ``like``."""
    return torch.empty((count, *shape), dtype=torch.float32, device=like.device)
