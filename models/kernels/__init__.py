"""Kernels of towers written in Triton, for CUDA and bf16; what they compute is defined by the towers' plain forms.

Triton comes with PyTorch's CUDA builds and not with its CPU builds: the modules of this folder that import it are
imported where they are used only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from erase_rec.kernels import triton_applies


def own_kernel_applies(x: Tensor) -> bool:
    """Whether a kernel of this folder can work on ``x``: on CUDA, in bf16, not empty, with Triton installed."""
    return x.dtype == torch.bfloat16 and triton_applies(x)
