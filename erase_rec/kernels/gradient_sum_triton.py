"""Adds tensors in one pass: each is read once, the sum is written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from erase_rec.kernels.gradient_sum import FUSED

TILE = 2048
"""Elements of a program: eight a thread and load."""


@triton.jit
def _sum_kernel(
    out_ptr, ptr0, ptr1, ptr2, ptr3, ptr4, ptr5, ptr6, ptr7, size, COUNT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = element < size
    total = tl.load(ptr0 + element, mask=mask).to(tl.float32)
    total += tl.load(ptr1 + element, mask=mask).to(tl.float32)
    if COUNT > 2:
        total += tl.load(ptr2 + element, mask=mask).to(tl.float32)
    if COUNT > 3:
        total += tl.load(ptr3 + element, mask=mask).to(tl.float32)
    if COUNT > 4:
        total += tl.load(ptr4 + element, mask=mask).to(tl.float32)
    if COUNT > 5:
        total += tl.load(ptr5 + element, mask=mask).to(tl.float32)
    if COUNT > 6:
        total += tl.load(ptr6 + element, mask=mask).to(tl.float32)
    if COUNT > 7:
        total += tl.load(ptr7 + element, mask=mask).to(tl.float32)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_fused(parts: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Sum in float32 of 2 to ``FUSED`` CUDA tensors of one shape, rounded to ``dtype``; None: float32."""
    assert 2 <= len(parts) <= FUSED
    dense = [part.contiguous() for part in parts]
    out = torch.empty_like(dense[0], dtype=dtype or torch.float32)
    size = out.numel()
    with torch.cuda.device_of(out):
        _sum_kernel[(triton.cdiv(size, TILE),)](
            out, *dense, *[dense[0]] * (FUSED - len(dense)), size, COUNT=len(dense), TILE=TILE, num_warps=8
        )
    return out
