"""Autograd's own thread of a CUDA device, on which every backward runs, whichever thread asks for it."""

from __future__ import annotations

import torch


def wake_autograd(device: torch.device) -> None:
    """Gives autograd's thread of ``device`` the device's context; nothing to do on the CPU. Synchronises no host.

    A thread has none before the CUDA runtime launches its first kernel there. Ours can begin with a product, since the
    gradient of a loss comes with its forward: cuBLAS would find no context, and PyTorch warns that it had to set one.
    """
    if device.type == "cuda":
        one = torch.ones((), device=device, requires_grad=True)
        torch.autograd.grad(one * one, one)
