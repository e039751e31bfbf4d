"""Optimizers of the dense parameters (towers, heads, over-arch), with their state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.errors import UserError


class DenseOptimizer:
    """A torch optimizer over named parameters.

    The state is complete from the start (torch makes it at the first step), so that a checkpoint can be loaded
    in place into a new optimizer.
    """

    def __init__(self, config: DenseOptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        """Builds the optimizer of ``config`` over ``parameters``, all on one device."""
        self._parameters = dict(parameters)
        self._optimizer = _make(config, list(self._parameters.values()))
        self._create_state(config)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global norm is at most ``max_norm``; no host synchronisation.

        Returns:
            The norm before clipping, a scalar on the device.
        """
        return torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm, error_if_nonfinite=False)

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """State by ``<parameter>/<entry>``; shares storage with the optimizer."""
        return {
            f"{name}/{entry}": value
            for name, parameter in self._parameters.items()
            for entry, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what :meth:`state` gave, in place.

        Raises:
            UserError: entries are missing or unexpected.
        """
        own = self.state()
        if own.keys() != state.keys():
            raise UserError(f"optimizer state does not fit: {sorted(own.keys() ^ state.keys())} on one side only")
        for name, value in own.items():
            value.copy_(state[name])

    def _create_state(self, config: DenseOptimizerConfig) -> None:
        """One step with zero gradients and no effect, then every entry back to its start value."""
        if config.kind == "adagrad" or (config.kind == "sgd" and config.momentum == 0):
            return  # Adagrad makes its state when constructed; plain SGD has none.
        before = [parameter.detach().clone() for parameter in self._parameters.values()]
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(self._parameters.values(), before, strict=True):
                parameter.copy_(value)
                parameter.grad = None
            for entries in self._optimizer.state.values():
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
