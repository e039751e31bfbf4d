"""The multilayer perceptron that towers and over-arch are built from, and seeded initialisation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU after each; the last layer has none when ``last_activation`` is false."""

    def __init__(
        self,
        in_dim: int,
        sizes: Sequence[int],
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
        last_activation: bool = True,
    ) -> None:
        """Builds ``in_dim -> sizes[0] -> ... -> sizes[-1]``; without sizes it is the identity."""
        super().__init__()
        self.out_dim = sizes[-1] if sizes else in_dim
        layers: list[nn.Module] = []
        for index, size in enumerate(sizes):
            layers.append(nn.Linear(in_dim, size))
            if index + 1 < len(sizes) or last_activation:
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

    One row has no variance; torch raises. The running statistics are not updated by such a batch.
    """

    def forward(self, x_BN: Tensor) -> Tensor:
        """[B, N] -> [B, N]."""
        if self.training and x_BN.shape[0] == 1:
            return nn.functional.batch_norm(
                x_BN, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        return super().forward(x_BN)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random numbers inside depend on (seed, name) alone, and those outside are left as they were.

    So adding a tower does not change another's initial weights.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield
