"""Adds tensors in one pass: each is read once, the sum is written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from erase_rec.kernels.ordered_sum import FUSED

TILE = 2048
"""Elements of a program: eight a thread and load."""


@triton.jit
def _part(ptr, row, column, stride, mask):
    return tl.load(ptr + row * stride + column, mask=mask).to(tl.float32)


@triton.jit
def _sum_kernel(
    out_ptr, ptr0, ptr1, ptr2, ptr3, ptr4, ptr5, ptr6, ptr7,
    stride0, stride1, stride2, stride3, stride4, stride5, stride6, stride7, size, columns,
    COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = element < size
    row, column = element // columns, element % columns
    total = _part(ptr0, row, column, stride0, mask) + _part(ptr1, row, column, stride1, mask)
    if COUNT > 2:
        total += _part(ptr2, row, column, stride2, mask)
    if COUNT > 3:
        total += _part(ptr3, row, column, stride3, mask)
    if COUNT > 4:
        total += _part(ptr4, row, column, stride4, mask)
    if COUNT > 5:
        total += _part(ptr5, row, column, stride5, mask)
    if COUNT > 6:
        total += _part(ptr6, row, column, stride6, mask)
    if COUNT > 7:
        total += _part(ptr7, row, column, stride7, mask)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_fused(parts: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Sum in float32 of 2 to ``FUSED`` CUDA tensors of one shape, rounded to ``dtype``; None: float32.

    Rows of a matrix may lie apart, as those of a slice of a wider one do: it is read where it is.
    """
    assert 2 <= len(parts) <= FUSED
    shape = parts[0].shape
    matrices = [part if part.dim() == 2 and part.stride(1) == 1 else part.reshape(1, -1) for part in parts]
    if len({matrix.shape for matrix in matrices}) > 1:
        matrices = [part.reshape(1, -1) for part in parts]
    out = torch.empty(shape, dtype=dtype or torch.float32, device=parts[0].device)
    given = [*matrices, *[matrices[0]] * (FUSED - len(matrices))]
    size, columns = out.numel(), matrices[0].shape[1]
    with torch.cuda.device_of(out):
        _sum_kernel[(triton.cdiv(size, TILE),)](
            out, *given, *[matrix.stride(0) for matrix in given], size, columns,
            COUNT=len(matrices), TILE=TILE, num_warps=8,
        )  # fmt: skip
    return out
