"""Launches of :mod:`models.kernels.linear`. Sums over the batch are taken in an order that the shape alone decides.

A program sums its rows; the last program of its columns to finish adds the programs' sums in their order. So there is
no second launch, and no order that timing decides.

Shapes: B rows, N input columns, O output columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.linear import COLUMNS

PROGRAMS = 264
"""Programs that fill the device, about two a multiprocessor of an H100 or H200."""


@triton.jit
def _sum_of_parts(part_ptr, ticket_ptr, columns, column, inside, parts, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """Whether this program is the last of its columns, and the sum of all programs' parts [column] if so."""
    tl.debug_barrier()  # every thread's part is written
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == parts - 1
    total = tl.zeros_like(column).to(tl.float32)
    if last:
        for start in range(0, PARTS, CHUNK):
            part = start + tl.arange(0, CHUNK)
            mask = (part < parts)[:, None] & inside[None, :]
            # Past the first cache, which other multiprocessors' writes do not reach.
            at = part_ptr + part[:, None] * columns + column[None, :]
            total += tl.sum(tl.load(at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
        tl.store(ticket_ptr, 0)
    return last, total


@triton.jit
def _activation_backward_kernel(
    dy_ptr, y_ptr, dz_ptr, part_ptr, dbias_ptr, ticket_ptr, rows, columns, parts,
    RELU: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(1) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
        if RELU:
            # Not y > 0, which would turn the gradient of a nan into zero and hide it.
            dy = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0) <= 0, 0.0, dy)
            tl.store(dz_ptr + at, dy, mask=mask)
        total += dy.to(tl.float32)
    tl.store(part_ptr + tl.program_id(1) * columns + column, tl.sum(total, axis=0), mask=inside)
    last, dbias = _sum_of_parts(
        part_ptr, ticket_ptr + tl.program_id(0), columns, column, inside, parts, PARTS, CHUNK
    )  # fmt: skip
    if last:
        tl.store(dbias_ptr + column, dbias.to(dbias_ptr.dtype.element_ty), mask=inside)


def activation_backward(dy_BO: Tensor, y_BO: Tensor | None, tickets: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient before the activation and of the bias, both in the dtype of ``dy``.

    Args:
        dy_BO: gradient after the activation, contiguous.
        y_BO: output of a ReLU; None: there was no activation, and the first result is ``dy`` itself.
        tickets: int32 [columns / COLUMNS, rounded up], at zero before and after.
    """
    rows, columns = dy_BO.shape
    dz_BO = dy_BO if y_BO is None else torch.empty_like(dy_BO)
    dbias_O = torch.empty(columns, dtype=dy_BO.dtype, device=dy_BO.device)
    blocks = triton.cdiv(columns, COLUMNS)
    rows_a_tile = 32
    tiles = triton.cdiv(triton.cdiv(rows, rows_a_tile), max(1, min(128, PROGRAMS // blocks)))
    tiles = triton.next_power_of_2(tiles)
    parts = triton.cdiv(rows, tiles * rows_a_tile)
    part = torch.empty((parts, columns), dtype=torch.float32, device=dy_BO.device)
    _activation_backward_kernel[(blocks, parts)](
        dy_BO, dy_BO if y_BO is None else y_BO, dz_BO, part, dbias_O, tickets, rows, columns, parts,
        RELU=y_BO is not None, ROWS=rows_a_tile, TILES=tiles, COLUMNS=COLUMNS, PARTS=triton.next_power_of_2(parts),
        CHUNK=min(triton.next_power_of_2(parts), 64), num_warps=4,
    )  # fmt: skip
    return dz_BO, dbias_O


@triton.jit
def _logit_kernel(x_ptr, weight_ptr, bias_ptr, logit_ptr, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    logit = tl.sum(x * weight[None, :], axis=1) + tl.load(bias_ptr).to(tl.float32)
    tl.store(logit_ptr + row, logit, mask=row < rows)


@triton.jit
def _logit_backward_kernel(
    dlogit_ptr, x_ptr, weight_ptr, dx_ptr, part_ptr, dweight_ptr, dbias_ptr, ticket_ptr, rows, columns, parts,
    ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < columns
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((WIDTH,), tl.float32)
    dbias = 0.0
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        dlogit = tl.load(dlogit_ptr + row, mask=row < rows, other=0.0)
        tl.store(dx_ptr + at, (dlogit[:, None] * weight[None, :]).to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += tl.sum(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * dlogit[:, None], axis=0)
        dbias += tl.sum(dlogit)
    tl.store(part_ptr + tl.program_id(0) * columns + column, dweight, mask=inside)
    tl.store(part_ptr + parts * columns + tl.program_id(0), dbias)  # the programs' parts of the bias follow
    last, total = _sum_of_parts(part_ptr, ticket_ptr, columns, column, inside, parts, PARTS, CHUNK)
    if last:
        tl.store(dweight_ptr + column, total.to(dweight_ptr.dtype.element_ty), mask=inside)
        part = tl.arange(0, PARTS)
        biases = tl.load(part_ptr + parts * columns + part, mask=part < parts, other=0.0, cache_modifier=".cg")
        tl.store(dbias_ptr, tl.sum(biases).to(dbias_ptr.dtype.element_ty))


def logit_forward(x_BN: Tensor, weight_1N: Tensor, bias_1: Tensor) -> Tensor:
    """Float32 [B]."""
    rows, columns = x_BN.shape
    logit_B = torch.empty(rows, dtype=torch.float32, device=x_BN.device)
    tile = 16
    _logit_kernel[(triton.cdiv(rows, tile),)](
        x_BN, weight_1N, bias_1, logit_B, rows, columns,
        ROWS=tile, WIDTH=triton.next_power_of_2(columns), num_warps=4,
    )  # fmt: skip
    return logit_B


def logit_backward(dlogit_B: Tensor, x_BN: Tensor, weight_1N: Tensor, tickets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and the bias; ``tickets`` int32 [1], at zero before and after."""
    rows, columns = x_BN.shape
    tile = 16
    tiles = triton.next_power_of_2(triton.cdiv(triton.cdiv(rows, tile), 64))
    parts = triton.cdiv(rows, tile * tiles)
    dx_BN, dweight_1N = torch.empty_like(x_BN), torch.empty_like(weight_1N)
    dbias_1 = torch.empty(1, dtype=weight_1N.dtype, device=x_BN.device)
    part = torch.empty(parts * (columns + 1), dtype=torch.float32, device=x_BN.device)
    _logit_backward_kernel[(parts,)](
        dlogit_B, x_BN, weight_1N, dx_BN, part, dweight_1N, dbias_1, tickets, rows, columns, parts,
        ROWS=tile, TILES=tiles, WIDTH=triton.next_power_of_2(columns), PARTS=triton.next_power_of_2(parts),
        CHUNK=min(triton.next_power_of_2(parts), 4096 // min(4096, triton.next_power_of_2(columns) // 2)), num_warps=4,
    )  # fmt: skip
    return dx_BN, dweight_1N, dbias_1
