"""The gradient 1 that a backward starts with, made once instead of by a launch in each."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def unit_gradient(scalar: Tensor) -> Tensor:
    """1 of the device and dtype of ``scalar``; nobody may write to it."""
    return _unit(scalar.device, scalar.dtype)


def is_unit(gradient: Tensor) -> bool:
    """Whether ``gradient`` is the 1 of :func:`unit_gradient`, so that what it multiplies need not be."""
    return gradient.data_ptr() == unit_gradient(gradient).data_ptr()


@cache
def _unit(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones((), device=device, dtype=dtype)
