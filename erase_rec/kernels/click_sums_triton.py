"""The sums of progressive metrics in one launch; :func:`eval.metrics.click_sums` is what it computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
WARPS = 16


@triton.jit
def _click_sums_kernel(total_ptr, logit_ptr, label_ptr, rows, TILE: tl.constexpr):
    # One program a model, so that the order of summation is fixed.
    model = tl.program_id(0)
    positives = tl.zeros((TILE,), tl.float64)
    cross_entropy = tl.zeros((TILE,), tl.float64)
    prediction = tl.zeros((TILE,), tl.float64)
    squared = tl.zeros((TILE,), tl.float64)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        mask = row < rows
        logit = tl.load(logit_ptr + model * rows + row, mask=mask, other=0.0).to(tl.float64)
        label = tl.load(label_ptr + row, mask=mask, other=0.0).to(tl.float64)
        signed = (2.0 * label - 1.0) * logit
        small = tl.exp(-tl.abs(logit))
        predicted = tl.where(logit >= 0, 1.0, small) / (1.0 + small)
        loss = tl.where(signed < 0, -signed, 0.0) + tl.log(1.0 + small)
        positives += tl.where(mask, label, 0.0)
        cross_entropy += tl.where(mask, loss, 0.0)
        prediction += tl.where(mask, predicted, 0.0)
        squared += tl.where(mask, predicted * predicted, 0.0)
    sums_ptr = total_ptr + 5 * model
    tl.store(sums_ptr, tl.load(sums_ptr) + rows)
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.sum(positives))
    tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + tl.sum(cross_entropy))
    tl.store(sums_ptr + 3, tl.load(sums_ptr + 3) + tl.sum(prediction))
    tl.store(sums_ptr + 4, tl.load(sums_ptr + 4) + tl.sum(squared))


def add_click_sums_fused(total: Tensor, logit: Tensor, label: Tensor) -> None:
    """Adds the sums of a batch to ``total`` on the current stream; can be captured. The order of summation is fixed.

    Args:
        total: float64 [models, 5], contiguous.
        logit: [models, B], contiguous.
        label: [B].
    """
    with torch.cuda.device_of(total):
        _click_sums_kernel[(logit.shape[0],)](
            total, logit.contiguous(), label.contiguous(), logit.shape[1], TILE=TILE, num_warps=WARPS
        )
