"""Adam and AdamW over flat buffers: every byte of gradients, weights and state is moved once, in one launch a block.

Reads the gradients (bf16 or float32) where the backward left them, the float32 master weights and both moments; writes
the latter three and the bf16 weights that the model computes with. Learning rate, bias corrections and clipping factor
are read from the device, so that a captured launch follows them. The arithmetic is float32, that of the corrections
float64, as in :mod:`erase_rec.dense_arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.flat_layout import Place

TILE = 512
"""Elements that a program updates at a time: four a thread, which are vector loads of 16 bytes of float32."""
WARPS = 4
PROGRAMS = 8
"""A multiprocessor's at most; each then takes several tiles."""
SLOTS = 16
"""Gradients that a launch takes."""
_ADDRESSES = [f"gradient{slot}" for slot in range(SLOTS)]


@triton.jit
def _update_tile(
    master_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, gradient_ptr, count, step_size, correction, decay, factor,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr, DECOUPLED: tl.constexpr,
    CLIPS: tl.constexpr, CASTS: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    element = tl.arange(0, TILE)
    # The mask of a tile that a parameter ends in would make all loads narrow.
    mask = (element < TILE) if FULL else (element < count)
    gradient = tl.load(gradient_ptr + element, mask=mask, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + element, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + element, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + element, mask=mask, other=0.0)
    if CLIPS:
        gradient *= factor
    if WEIGHT_DECAY > 0:
        if DECOUPLED:
            master *= decay
        else:
            gradient += WEIGHT_DECAY * master
    exp_avg += (1.0 - BETA1) * (gradient - exp_avg)
    exp_avg_sq = BETA2 * exp_avg_sq + (1.0 - BETA2) * gradient * gradient
    master -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / correction + EPS)
    tl.store(master_ptr + element, master, mask=mask)
    tl.store(exp_avg_ptr + element, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + element, exp_avg_sq, mask=mask)
    if CASTS:
        tl.store(compute_ptr + element, master.to(compute_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles", "parameters", *_ADDRESSES])
def _adam_kernel(
    master_ptr, exp_avg_ptr, exp_avg_sq_ptr, compute_ptr, lr_ptr, factor_ptr, steps_ptr, corrections_ptr, ticket_ptr,
    tiles_ptr, places_ptr, tiles, parameters,
    gradient0, gradient1, gradient2, gradient3, gradient4, gradient5, gradient6, gradient7,
    gradient8, gradient9, gradient10, gradient11, gradient12, gradient13, gradient14, gradient15,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, EPS: tl.constexpr,
    WEIGHT_DECAY: tl.constexpr, DECOUPLED: tl.constexpr, CLIPS: tl.constexpr, CASTS: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    first = tl.load(places_ptr)
    before = tl.load(steps_ptr + first)
    lr = tl.load(lr_ptr)
    step_size = (lr * tl.load(corrections_ptr + 2 * first)).to(tl.float32)
    correction = tl.load(corrections_ptr + 2 * first + 1).to(tl.float32)
    decay = (1.0 - lr * WEIGHT_DECAY).to(tl.float32)
    factor = tl.load(factor_ptr).to(tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        slot = tl.load(tiles_ptr + 4 * tile)
        flat = tl.multiple_of(tl.load(tiles_ptr + 4 * tile + 1), 8)
        local = tl.multiple_of(tl.load(tiles_ptr + 4 * tile + 2), 16)
        count = tl.load(tiles_ptr + 4 * tile + 3)
        address = tl.where(slot == 1, gradient1, gradient0)
        address = tl.where(slot == 2, gradient2, address)
        address = tl.where(slot == 3, gradient3, address)
        address = tl.where(slot == 4, gradient4, address)
        address = tl.where(slot == 5, gradient5, address)
        address = tl.where(slot == 6, gradient6, address)
        address = tl.where(slot == 7, gradient7, address)
        address = tl.where(slot == 8, gradient8, address)
        address = tl.where(slot == 9, gradient9, address)
        address = tl.where(slot == 10, gradient10, address)
        address = tl.where(slot == 11, gradient11, address)
        address = tl.where(slot == 12, gradient12, address)
        address = tl.where(slot == 13, gradient13, address)
        address = tl.where(slot == 14, gradient14, address)
        address = tl.where(slot == 15, gradient15, address)
        gradient_ptr = address.to(tl.pointer_type(GRADIENT))
        if ALIGNED:
            gradient_ptr = tl.multiple_of(gradient_ptr, 16)
        if count == TILE:
            _update_tile(
                master_ptr + flat, exp_avg_ptr + flat, exp_avg_sq_ptr + flat, compute_ptr + flat, gradient_ptr + local,
                count, step_size, correction, decay, factor,
                BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, CLIPS, CASTS, TILE, True,
            )  # fmt: skip
        else:
            _update_tile(
                master_ptr + flat, exp_avg_ptr + flat, exp_avg_sq_ptr + flat, compute_ptr + flat, gradient_ptr + local,
                count, step_size, correction, decay, factor,
                BETA1, BETA2, EPS, WEIGHT_DECAY, DECOUPLED, CLIPS, CASTS, TILE, False,
            )  # fmt: skip

    # The last program counts the step, when every thread of every program has read the count: a launch of its own
    # for that would take longer than a small tower's update. In float64, and once: 1 - beta2 ** step cancels three of
    # float32's seven digits in the first steps.
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1)
    if ticket == tl.num_programs(0) - 1:
        slots = tl.arange(0, SLOTS)
        mask = slots < parameters
        places = tl.load(places_ptr + slots, mask=mask, other=0)
        later = tl.zeros((SLOTS,), tl.float64) + before.to(tl.float64) + 2.0
        tl.store(steps_ptr + places, tl.zeros((SLOTS,), tl.float32) + (before + 1.0), mask=mask)
        tl.store(corrections_ptr + 2 * places, 1.0 / (1.0 - tl.exp(later * LOG_BETA1)), mask=mask)
        tl.store(corrections_ptr + 2 * places + 1, tl.sqrt(1.0 - tl.exp(later * LOG_BETA2)), mask=mask)
        tl.store(ticket_ptr, 0)


class AdamLaunch:
    """One launch over up to :data:`SLOTS` parameters of a block with equal step counts and gradients of one dtype."""

    def __init__(
        self, config: DenseOptimizerConfig, places: Sequence[Place], numbers: Sequence[int], device: torch.device
    ) -> None:
        """Cuts the parameters into tiles.

        Args:
            config: of kind ``adam`` or ``adamw``; its learning rate is not used.
            places: where the parameters lie in the buffers.
            numbers: their positions in ``steps`` and ``corrections``.
            device: of the buffers.
        """
        assert 1 <= len(places) == len(numbers) <= SLOTS
        tiles = [
            (slot, place.start + local, local, min(TILE, place.end - place.start - local))
            for slot, place in enumerate(places)
            for local in range(0, place.end - place.start, TILE)
        ]
        self._config = config
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._places = torch.tensor(numbers, dtype=torch.int32, device=device)
        # Launches of one block follow each other on its stream; those of different blocks may overlap.
        self._ticket = torch.zeros((), dtype=torch.int32, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._grid = (min(len(tiles), processors * PROGRAMS),)

    def __call__(
        self,
        gradients: Sequence[Tensor],
        *,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        compute: Tensor,
        lr: Tensor,
        factor: Tensor | None,
        steps: Tensor,
        corrections: Tensor,
    ) -> None:
        """One step in place on the current stream; can be captured.

        Args:
            gradients: of the parameters, contiguous, bf16 or float32.
            master: float32 [n], weights of the block.
            exp_avg: float32 [n], first moments.
            exp_avg_sq: float32 [n], second moments.
            compute: [n], the weights in the dtype of computation; ``master`` itself where that is float32.
            lr: float64 scalar.
            factor: scalar that the gradients are multiplied by; None: 1.
            steps: float32 [p], steps so far of each parameter of the block; raised by 1.
            corrections: float64 [p, 2], what :func:`corrections` gives for the next step; renewed.
        """
        config, addresses = self._config, [gradient.data_ptr() for gradient in gradients]
        with torch.cuda.device_of(master):
            _adam_kernel[self._grid](
                master, exp_avg, exp_avg_sq, compute, lr, lr if factor is None else factor, steps, corrections,
                self._ticket, self._tiles, self._places, self._tiles.shape[0], len(addresses),
                *addresses, *[addresses[0]] * (SLOTS - len(addresses)),
                BETA1=config.beta1, BETA2=config.beta2, LOG_BETA1=_log(config.beta1), LOG_BETA2=_log(config.beta2),
                EPS=config.eps, WEIGHT_DECAY=config.weight_decay, DECOUPLED=config.kind == "adamw",
                CLIPS=factor is not None, CASTS=compute is not master,
                GRADIENT=tl.bfloat16 if gradients[0].dtype == torch.bfloat16 else tl.float32,
                ALIGNED=all(address % 16 == 0 for address in addresses),
                TILE=TILE, SLOTS=SLOTS, num_warps=WARPS,
            )  # fmt: skip


def corrections(config: DenseOptimizerConfig, step: float) -> tuple[float, float]:
    """Of the ``step``-th step: what multiplies the learning rate, and what divides the root of the second moment."""
    return 1 / (1 - config.beta1**step), math.sqrt(1 - config.beta2**step)


def _log(beta: float) -> float:
    """Its exponential is 0 for a beta of 0, as beta ** step is; an infinity is no literal of the language."""
    return math.log(beta) if beta > 0 else -1e4
