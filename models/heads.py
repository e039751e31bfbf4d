"""From a vector to a logit: the last layer of the over-arch, and the towers' local heads.

A local head is a class with its ``Config``, built with the width of the tower's output and called with the output. What
it passes on is what the over-arch and other towers read of the tower.

Shapes: B rows, N input columns, O the tower's output columns.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from erase_rec.config.types import Number, Params
from models.kernels import own_kernel_applies
from models.kernels.linear import WIDEST_HEAD, logit
from models.layers import at_least_float32

GOODNESS_EPS = 1e-6
"""Keeps the length of an output that is all zeros above zero."""


class TowerHead(Protocol):
    """A local head; an ``nn.Module``."""

    def __call__(self, output_BO: Tensor) -> Tensor:
        """[B, O] -> logit [B], float32 at least."""
        ...

    def passed_on(self, output_BO: Tensor) -> Tensor:
        """[B, O] -> [B, O], what others read in place of the tower's output."""
        ...


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


class LinearHead(LogitHead):
    """w z + b."""

    class Config(Params):
        """Nothing to set."""

    def __init__(self, config: Config, in_dim: int) -> None:
        super().__init__(in_dim)

    def passed_on(self, output_BO: Tensor) -> Tensor:
        """The output itself."""
        return output_BO


class GoodnessHead(nn.Module):
    """Forward-Forward's goodness in place of a trained head: mean of the output's squares, minus a threshold.

    Hinton, "The Forward-Forward Algorithm", arXiv 2212.13345, section 2: the probability that an input is positive
    data is the sigmoid of goodness minus a threshold, and a layer hands its output on with its length taken out, so
    that the next cannot read the goodness off it. Here a click is positive data; with ``loss.kind: bce`` and
    ``target: own`` this is the objective that ERASE (arXiv 2608.18469) departs from. It has no parameters.
    """

    class Config(Params):
        """The goodness of a row whose click is as likely as not."""

        threshold: Number = 2.0

    def __init__(self, config: Config, in_dim: int) -> None:
        super().__init__()
        self.threshold = config.threshold

    def forward(self, output_BO: Tensor) -> Tensor:
        """See :class:`TowerHead`."""
        return at_least_float32(output_BO).square().mean(dim=1) - self.threshold

    def passed_on(self, output_BO: Tensor) -> Tensor:
        """The output, divided by the root of its mean square."""
        length_B1 = at_least_float32(output_BO).square().mean(dim=1, keepdim=True).add(GOODNESS_EPS).sqrt()
        return (output_BO / length_B1).to(output_BO.dtype)
