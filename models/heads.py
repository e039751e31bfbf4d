"""The local head of a tower, also the last layer of the over-arch: from a vector to a logit.

Shapes: B rows, N input columns.
"""

from __future__ import annotations

from torch import Tensor, nn

from models.kernels import own_kernel_applies
from models.kernels.linear import WIDEST_HEAD, logit
from models.layers import at_least_float32


class LogitHead(nn.Module):
    """A linear layer to one logit a row.

    Attributes:
        own_kernels: it may be one operation.
    """

    own_kernels: bool = False

    def __init__(self, in_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, 1)

    def forward(self, x_BN: Tensor) -> Tensor:
        """[B, in_dim] -> logit [B], float32 at least in bf16 too."""
        if self.own_kernels and own_kernel_applies(x_BN) and x_BN.shape[1] <= WIDEST_HEAD:
            return logit(x_BN.contiguous(), self.linear)
        return at_least_float32(self.linear(x_BN).squeeze(1))
