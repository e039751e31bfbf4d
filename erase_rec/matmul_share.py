"""Matrix products that leave room beside them (``schedule.matmul_share``).

cuBLAS picks the kernel of a matrix product as if the product had the device for itself: many small tiles, or sums split
over multiprocessors. Where towers run side by side such kernels stand in each other's way. Told of fewer
multiprocessors, it picks kernels with fewer, larger tiles. Which other kernels are picked can change rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matmul_share(share: float, device: torch.device) -> Iterator[None]:
    """Matrix products that any thread launches meanwhile choose kernels for this share of the multiprocessors.

    Args:
        share: above 0, up to 1, which leaves everything as it is.
        device: without effect on the CPU.
    """
    if share == 1 or device.type != "cuda":
        yield
        return
    count = torch.cuda.get_device_properties(device).multi_processor_count
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(count - max(1, round(share * count)))
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
