"""Adam and AdamW over flat buffers in one launch: every byte of gradient, weights and state is moved once.

Reads the gradient (bf16 or float32), the float32 master weights and both moments; writes the latter three and the bf16
weights that the model computes with. Learning rate, step count and clipping factor are read from the device, so that a
captured launch follows them. Arithmetic: float32, the bias corrections float64, as in
:mod:`erase_rec.dense_arithmetic`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from erase_rec.config.schema import DenseOptimizerConfig

TILE = 1024
"""Elements of a program: eight a thread, which are vector loads of 16 bytes of bf16."""


@triton.jit
def _adam_kernel(
    master_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, gradient_ptr, lr_ptr, factor_ptr, steps_ptr, ticket_ptr,
    size, counters,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr, DECOUPLED: tl.constexpr, CLIPS: tl.constexpr, CASTS: tl.constexpr,
    TILE: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = element < size
    gradient = tl.load(gradient_ptr + element, mask=mask, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + element, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + element, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + element, mask=mask, other=0.0)
    before = tl.load(steps_ptr)
    lr = tl.load(lr_ptr)
    if CLIPS:
        gradient *= tl.load(factor_ptr).to(tl.float32)
    if WEIGHT_DECAY > 0:
        if DECOUPLED:
            master *= (1.0 - lr * WEIGHT_DECAY).to(tl.float32)
        else:
            gradient += WEIGHT_DECAY * master

    # In float64: 1 - beta2 ** step cancels three of float32's seven digits in the first steps.
    step = before.to(tl.float64) + 1.0
    step_size = (lr / (1.0 - tl.exp(step * LOG_BETA1))).to(tl.float32)
    correction = tl.sqrt(1.0 - tl.exp(step * LOG_BETA2)).to(tl.float32)
    exp_avg += (1.0 - BETA1) * (gradient - exp_avg)
    exp_avg_sq = BETA2 * exp_avg_sq + (1.0 - BETA2) * gradient * gradient
    master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / correction + EPS)

    tl.store(master_ptr + element, master, mask=mask)
    tl.store(exp_avg_ptr + element, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + element, exp_avg_sq, mask=mask)
    if CASTS:
        tl.store(compute_ptr + element, master.to(compute_ptr.dtype.element_ty), mask=mask)

    # The last program counts the step, when every thread of every program has read the count: a launch of its own
    # for that would take longer than a small tower's update.
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1)
    if ticket == tl.num_programs(0) - 1:
        counter = tl.arange(0, COUNTERS)
        tl.store(steps_ptr + counter, tl.zeros((COUNTERS,), tl.float32) + (before + 1.0), mask=counter < counters)
        tl.store(ticket_ptr, 0)


def adam_step(
    config: DenseOptimizerConfig,
    *,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compute: Tensor,
    gradient: Tensor,
    lr: Tensor,
    factor: Tensor | None,
    steps: Tensor,
    ticket: Tensor,
) -> None:
    """One step of ``config``'s ``adam`` or ``adamw``, in place, on the current stream; can be captured.

    Args:
        config: hyperparameters other than the learning rate.
        master: float32 [n], weights.
        exp_avg: float32 [n], first moment.
        exp_avg_sq: float32 [n], second moment.
        compute: [n], the weights in the dtype of computation; ``master`` itself where that is float32.
        gradient: [n], bf16 or float32.
        lr: float64 scalar on the device.
        factor: scalar on the device that the gradient is multiplied by; None: 1.
        steps: float32 [p], equal counts of the steps so far, of every parameter in the buffers; raised by 1.
        ticket: int32 scalar on the device, 0 before and after; launches that may overlap need one each.
    """
    size = master.numel()
    with torch.cuda.device_of(master):
        _adam_kernel[(triton.cdiv(size, TILE),)](
            master, exp_avg, exp_avg_sq, compute, gradient, lr, lr if factor is None else factor, steps, ticket,
            size, steps.numel(),
            BETA1=config.beta1, BETA2=config.beta2, LOG_BETA1=_log(config.beta1), LOG_BETA2=_log(config.beta2),
            EPS=config.eps, WEIGHT_DECAY=config.weight_decay, DECOUPLED=config.kind == "adamw",
            CLIPS=factor is not None, CASTS=compute is not master,
            TILE=TILE, COUNTERS=triton.next_power_of_2(steps.numel()), num_warps=4,
        )  # fmt: skip


def _log(beta: float) -> float:
    """Its exponential is 0 for a beta of 0, as beta ** step is; an infinity is no literal of the language."""
    return math.log(beta) if beta > 0 else -1e4
