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
from erase_rec.errors import UserError


class DenseOptimizer:
    """A torch optimizer over named parameters.

    The state is complete from the start (torch makes it at the first step), so that a checkpoint can be loaded
    in place into a new optimizer.
    """

    def __init__(self, config: DenseOptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        """Builds the optimizer of ``config`` over ``parameters``.

        Args:
            config: kind and hyperparameters.
            parameters: at least one, all on one device; gradients that they hold are dropped.
        """
        self._parameters = dict(parameters)
        self._optimizer = _make(config, list(self._parameters.values()))
        self._create_state(config)

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients in place so that their global L2 norm is at most ``max_norm``.

        Returns:
            The norm before clipping, a scalar on the device; the host is not synchronised.
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
            UserError: entries are missing or unexpected, or shapes differ; nothing was changed.
        """
        own = self.state()
        if own.keys() != state.keys():
            raise UserError(
                f"optimizer state does not fit: missing {sorted(own.keys() - state.keys())}, "
                f"unexpected {sorted(state.keys() - own.keys())}; use the optimizer.dense.kind that it was made with"
            )
        if differing := [name for name, value in own.items() if value.shape != state[name].shape]:
            raise UserError(f"optimizer state does not fit: other shapes in {differing}; the model is another one")
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
