"""What towers and over-arch are built from: multilayer perceptron, aligned widths, precision of logits, seeding.

Shapes: B rows, N input columns, X any width.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.kernels import own_kernel_applies
from models.kernels.linear import linear


class MLP(nn.Module):
    """Linear layers ``in_dim -> sizes[0] -> ... -> sizes[-1]``, a ReLU after each; the identity without sizes.

    Attributes:
        own_kernels: a linear layer and its ReLU may be one operation.
    """

    own_kernels: bool = False

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

    def lift(self, layers: int) -> MLP:
        """Takes the last ``layers`` linear layers off, with what follows each, and returns them."""
        starts = [at for at, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        start = starts[-layers]
        first = self.layers[start]
        assert isinstance(first, nn.Linear)
        top = MLP(first.in_features, ())
        kept = [*self.layers]
        top.layers, top.out_dim = nn.Sequential(*kept[start:]), self.out_dim
        self.layers, self.out_dim = nn.Sequential(*kept[:start]), first.in_features
        return top

    def forward(self, x_BN: Tensor) -> Tensor:
        """[B, in_dim] -> [B, out_dim]."""
        if not (self.own_kernels and own_kernel_applies(x_BN)):
            result: Tensor = self.layers(x_BN)
            return result
        followed = itertools.chain(self.layers, [None])
        fused = False
        for layer, following in itertools.pairwise(followed):
            if isinstance(layer, nn.Linear):
                fused = isinstance(following, nn.ReLU)
                x_BN = linear(x_BN, layer, relu=fused)
            elif fused:
                fused = False  # that ReLU
            elif layer is not None:
                x_BN = layer(x_BN)
        return x_BN


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


def project(layer: nn.Linear | None, x_BN: Tensor, *, own_kernels: bool) -> Tensor:
    """``layer(x)``, with its bias gradient fused where own kernels are wanted and apply; without a layer ``x``."""
    if layer is None:
        return x_BN
    if own_kernels and own_kernel_applies(x_BN):
        return linear(x_BN, layer)
    projected: Tensor = layer(x_BN)
    return projected


ALIGNMENT = 8
"""Columns: a matrix product in bf16 one of whose dimensions is no multiple of it falls to a slow kernel."""


def missing_columns(columns: int) -> int:
    """How many ``columns`` lack to the next multiple of :data:`ALIGNMENT`."""
    return -columns % ALIGNMENT


def side_by_side(parts: Sequence[Tensor], zero_columns: int = 0) -> Tensor:
    """[B, X] parts of one dtype -> their columns, then ``zero_columns`` of zeros; a part alone is itself."""
    if zero_columns:
        parts = (*parts, parts[0].new_zeros((parts[0].shape[0], zero_columns)))
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


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
