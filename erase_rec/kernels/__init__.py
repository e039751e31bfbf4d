"""Kernels of the engine written in Triton, for CUDA, each beside its plain form, which defines what it computes.

Triton comes with PyTorch's CUDA builds and not with its CPU builds: the modules of this folder whose names end in
``_triton`` import it, and are imported where they are used only.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

TRITON_INSTALLED = find_spec("triton") is not None


def triton_applies(x: Tensor) -> bool:
    """Whether a kernel of this folder can work on ``x``: on CUDA, not empty, with Triton installed."""
    return TRITON_INSTALLED and x.is_cuda and x.numel() > 0
