"""What towers and over-arch are built from: multilayer perceptron, precision of logits, seeded initialisation.

Shapes: B rows, N input columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers ``in_dim -> sizes[0] -> ... -> sizes[-1]``, a ReLU after each; the identity without sizes."""

    def __init__(self, in_dim: int, sizes: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.out_dim = sizes[-1] if sizes else in_dim
        layers: list[nn.Module] = []
        for size in sizes:
            layers.append(nn.Linear(in_dim, size))
            if batch_norm:
                layers.append(RowTolerantBatchNorm(size))
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            in_dim = size
        self.layers = nn.Sequential(*layers)

    def forward(self, x_BN: Tensor) -> Tensor:
        """[B, in_dim] -> [B, out_dim]."""
        result: Tensor = self.layers(x_BN)
        return result


class RowTolerantBatchNorm(nn.BatchNorm1d):
    """Batch normalisation that uses the running statistics for a training batch of one row.

    One row has no variance, and torch raises. The running statistics are not updated by such a batch.
    """

    def forward(self, x_BN: Tensor) -> Tensor:
        """[B, N] -> [B, N]."""
        if self.training and x_BN.shape[0] == 1:
            return nn.functional.batch_norm(
                x_BN, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        return super().forward(x_BN)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precisions become float32; float64 stays."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """CPU random numbers inside depend on (seed, name) alone, and those outside are left as they were.

    So adding a tower does not change another's initial weights.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the generators of the accelerators too.
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield
