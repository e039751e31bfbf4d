"""The arithmetic of the dense optimizers on flat tensors; learning rate and step count are tensors on the device.

It is torch.optim's: ``adam`` (Kingma and Ba, arXiv 1412.6980), ``adamw`` (Loshchilov and Hutter, arXiv 1711.05101),
``adagrad`` (Duchi et al., JMLR 12, 2011) and ``sgd`` with optional momentum. Weight decay is decoupled from the
gradient in ``adamw`` and an L2 term of the gradient in the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from erase_rec.config.schema import DenseOptimizerConfig


def state_entries(config: DenseOptimizerConfig) -> tuple[str, ...]:
    """Names of the state that has an element a weight, zero at the start; torch.optim's."""
    match config.kind:
        case "adam" | "adamw":
            return ("exp_avg", "exp_avg_sq")
        case "adagrad":
            return ("sum",)
        case "sgd":
            return ("momentum_buffer",) if config.momentum else ()


def counts_steps(config: DenseOptimizerConfig) -> bool:
    """Whether the state has a step count."""
    return config.kind != "sgd"


def update(
    config: DenseOptimizerConfig,
    weights: Tensor,
    state: Mapping[str, Tensor],
    gradient: Tensor,
    *,
    lr: Tensor,
    step: Tensor | None,
) -> None:
    """One step, in place.

    Args:
        config: kind and hyperparameters other than the learning rate.
        weights: [n], float32 or float64.
        state: [n] each, by the names of :func:`state_entries`.
        gradient: [n], in the dtype of ``weights``; left as it is.
        lr: float64 scalar.
        step: float64 scalar, counting this step, where steps are counted.
    """
    if config.weight_decay:
        if config.kind == "adamw":
            weights.mul_(1 - lr * config.weight_decay)
        else:
            gradient = gradient.add(weights, alpha=config.weight_decay)
    match config.kind:
        case "adam" | "adamw":
            assert step is not None
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - config.beta1)
            square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            step_size = lr / (1 - config.beta1**step)
            denominator = (square.sqrt() / (1 - config.beta2**step).sqrt()).add_(config.eps)
            weights.add_((mean * -step_size).div_(denominator))
        case "adagrad":
            total = state["sum"].addcmul_(gradient, gradient)
            weights.add_((gradient * -lr).div_(total.sqrt().add_(config.eps)))
        case "sgd":
            if config.momentum:
                gradient = state["momentum_buffer"].mul_(config.momentum).add_(gradient)
            weights.sub_(gradient * lr)
