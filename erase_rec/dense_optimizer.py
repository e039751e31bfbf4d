"""Optimizers of the dense parameters (towers, heads, over-arch), with their state by parameter name.

The arithmetic is torch.optim's: ``adam`` (Kingma and Ba, arXiv 1412.6980), ``adamw`` (Loshchilov and Hutter, arXiv
1711.05101), ``adagrad`` (Duchi et al., JMLR 12, 2011) and ``sgd`` with optional momentum. Weight decay is decoupled
from the gradient in ``adamw`` and an L2 term of the gradient in the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from erase_rec.config.schema import DenseOptimizerConfig


class DenseOptimizer:
    """One torch optimizer a block of named parameters; a block is what is clipped and updated together.

    The state is complete from the start (torch makes it at the first step), so that a checkpoint can be loaded
    in place into a new optimizer. It goes by parameter, so checkpoints do not depend on the blocks.

    Attributes:
        blocks: parameters by name, by block.
    """

    def __init__(self, config: DenseOptimizerConfig, blocks: Mapping[str, Mapping[str, nn.Parameter]]) -> None:
        """Builds the optimizers of ``config``.

        Args:
            config: kind and hyperparameters.
            blocks: each of at least one parameter, each parameter in one block, all on one device; gradients that
                they hold are dropped.
        """
        self.blocks = {block: dict(parameters) for block, parameters in blocks.items()}
        parameters = [parameter for named in self.blocks.values() for parameter in named.values()]
        assert len(parameters) == len(set(parameters)), "a parameter is in two blocks"
        self._optimizers = {block: _make(config, list(named.values())) for block, named in self.blocks.items()}
        # Adagrad makes its state when constructed; plain SGD has none.
        if config.kind != "adagrad" and not (config.kind == "sgd" and config.momentum == 0):
            for optimizer in self._optimizers.values():
                _create_state(optimizer)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step, of every block."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def clip(self, block: str, max_norm: float) -> Tensor:
        """Scales the gradients of ``block`` in place so that their L2 norm is at most ``max_norm``.

        Returns:
            The norm before clipping, a scalar on the device; the host is not synchronised.
        """
        return torch.nn.utils.clip_grad_norm_(self.blocks[block].values(), max_norm, error_if_nonfinite=False)

    def step(self, block: str) -> None:
        """Updates every parameter of ``block`` that has a gradient, on the current stream."""
        self._optimizers[block].step()

    def state(self) -> dict[str, Tensor]:
        """State by ``<parameter>/<entry>``; shares storage with the optimizers."""
        return {
            f"{name}/{entry}": value
            for block, named in self.blocks.items()
            for name, parameter in named.items()
            for entry, value in self._optimizers[block].state[parameter].items()
            if isinstance(value, Tensor)
        }


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """One step with zero gradients and no effect, then every entry back to its start value."""
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
            parameter.grad = None
        for entries in optimizer.state.values():
            for value in entries.values():
                if isinstance(value, Tensor):
                    value.zero_()


def _make(config: DenseOptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    fused = parameters[0].device.type == "cuda"
    if config.kind in {"adam", "adamw"}:
        make = torch.optim.Adam if config.kind == "adam" else torch.optim.AdamW
        return make(
            parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=fused,
        )
    if config.kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=config.lr, eps=config.eps, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused
    )
