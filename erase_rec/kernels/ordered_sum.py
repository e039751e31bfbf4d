"""The sum of several tensors of one shape, in a given order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from erase_rec.kernels import triton_applies

FUSED = 8
"""Tensors that one pass of the kernel reads."""


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Adds ``parts``, one or more of one shape and dtype, in their order; the result of one part is that part.

    On CUDA half precisions are added in float32 and rounded once, in one pass on the current stream; elsewhere each
    addition rounds. Can be captured; the host is not synchronised.
    """
    if len(parts) == 1:
        return parts[0]
    if triton_applies(parts[0]) and parts[0].element_size() <= 4:
        from erase_rec.kernels.ordered_sum_triton import sum_fused

        total, *rest = parts
        while rest:
            taken, rest = rest[: FUSED - 1], rest[FUSED - 1 :]
            total = sum_fused([total, *taken], parts[0].dtype if not rest else None)
        return total
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total = total + part
    return total
