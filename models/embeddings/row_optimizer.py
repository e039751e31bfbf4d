"""FBGEMM's exact row optimizers in plain PyTorch: only rows that a batch touched move.

Source: FBGEMM, ``fbgemm_gpu/codegen/genscript/optimizers.py`` (``rowwise_adagrad``, ``adagrad``, ``adam``,
``sgd``; weight decay 0). Unlike ``torch.optim``, Adam's moments of untouched rows do not decay, while its bias
correction counts every update of the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from erase_rec.config.schema import SparseOptimizerConfig


def sum_by_row(rows: Tensor, bags: Tensor | None, weights: Tensor | None, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of each distinct row: the sum over its ids of the id's bag's gradient times the id's weight.

    The order of summation is fixed on every device. Synchronises the host on CUDA.

    Args:
        rows: int64 [V], the row of each id, with duplicates.
        bags: int64 [V], the bag of each id; None: id v is bag v.
        weights: [V]; None: all 1.
        gradient: [bags, D].

    Returns:
        Distinct rows, int64 [R], and their gradients, [R, D].
    """
    sorted_rows, order = _in_order(rows)
    distinct, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    summed = embedding_bag(
        order if bags is None else bags[order],
        gradient,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=None if weights is None else weights[order],
    )
    return distinct, summed


def _in_order(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rising, and the place of each; equal rows keep their order."""
    if rows.is_cuda:
        return rows.sort(stable=True)
    # NumPy sorts integers with vector instructions, in a fifth of torch's time at 26,000 ids. A row and its place are
    # one integer: rows and ids of a batch together have far less than 63 bits.
    bits = rows.numel().bit_length()
    keys = (rows << bits) | torch.arange(rows.numel())
    keys.numpy().sort()
    return keys >> bits, keys & ((1 << bits) - 1)


def update_rows(
    weight: Tensor,
    state: Mapping[str, Tensor],
    rows: Tensor,
    gradient: Tensor,
    config: SparseOptimizerConfig,
    lr: float,
    iteration: int,
) -> None:
    """One optimizer step of ``rows``, in place.

    Args:
        weight: [all rows, D].
        state: as in ``STATE_NAMES``, over all rows.
        rows: int64 [R], distinct.
        gradient: [R, D].
        config: kind, betas and eps; its learning rate is not read.
        lr: learning rate.
        iteration: updates of the table including this one; Adam's bias correction.
    """
    if config.kind == "rowwise_adagrad":
        total = _accumulate(state["sum"], rows, gradient.square().mean(dim=1)).unsqueeze(1)
        step = gradient / (total.sqrt() + config.eps)
    elif config.kind == "adagrad":
        step = gradient / (_accumulate(state["sum"], rows, gradient.square()).sqrt() + config.eps)
    elif config.kind == "adam":
        first = _average(state["exp_avg"], rows, gradient, config.beta1) / (1 - config.beta1**iteration)
        second = _average(state["exp_avg_sq"], rows, gradient.square(), config.beta2) / (1 - config.beta2**iteration)
        step = first / (second.sqrt() + config.eps)
    else:
        step = gradient
    # Not index_add_: on the CPU it is ten times slower than a gather and a scatter of distinct rows.
    weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(step, alpha=lr))


def _accumulate(total: Tensor, rows: Tensor, value: Tensor) -> Tensor:
    """Adds to the rows' entries and returns the new ones."""
    new = total.index_select(0, rows).add_(value)
    total.index_copy_(0, rows, new)
    return new


def _average(average: Tensor, rows: Tensor, value: Tensor, beta: float) -> Tensor:
    """Moves the rows' exponential averages and returns the new ones."""
    new = average.index_select(0, rows).mul_(beta).add_(value, alpha=1 - beta)
    average.index_copy_(0, rows, new)
    return new
