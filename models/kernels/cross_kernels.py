"""Triton kernels of the low-rank cross network; :mod:`models.kernels.cross` says what they compute and launches them.

Shapes: B rows, X columns of the input, L layers, R rank, O outputs, S parts into which the columns are cut. A block
whose size is no power of two is padded by masks: RANK and OUT are R and O rounded up. The stacks of x and q pass 2^31
elements, so offsets of their layers are int64; offsets within a layer are not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_contraction(
    dense_ptr,  # [B, N] of row stride dense_stride
    emb_ptr,  # [B, X - N] of row stride emb_stride
    down_ptr,  # [R, X]
    x0_ptr,  # out: [B, X]
    parts_ptr,  # out: [S, B, R] float32
    rows,
    columns,
    dense_columns,
    dense_stride,
    emb_stride,
    rank,
    tiles,  # column tiles of one part
    BLOCK_B: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RANK: tl.constexpr,
):
    """x_0 = [dense, emb], and the parts of V_0 x_0."""
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_inside = row < rows
    rank_col = tl.arange(0, RANK)
    part = tl.program_id(1)
    acc = tl.zeros((BLOCK_B, RANK), tl.float32)
    for tile in range(part * tiles, (part + 1) * tiles):
        col = tile * BLOCK_X + tl.arange(0, BLOCK_X)
        mask = row_inside[:, None] & (col < columns)[None, :]
        is_dense = (col < dense_columns)[None, :]
        x0 = tl.load(dense_ptr + row[:, None] * dense_stride + col[None, :], mask=mask & is_dense, other=0.0)
        emb_col = col - dense_columns
        emb = tl.load(emb_ptr + row[:, None] * emb_stride + emb_col[None, :], mask=mask & (is_dense == 0), other=0.0)
        x0 = x0 + emb
        tl.store(x0_ptr + row[:, None] * columns + col[None, :], x0, mask=mask)
        down_mask = (rank_col < rank)[:, None] & (col < columns)[None, :]
        down = tl.load(down_ptr + rank_col[:, None] * columns + col[None, :], mask=down_mask, other=0.0)
        acc = tl.dot(x0, tl.trans(down), acc)
    mask = row_inside[:, None] & (rank_col < rank)[None, :]
    tl.store(parts_ptr + part * rows * rank + row[:, None] * rank + rank_col[None, :], acc, mask=mask)


@triton.jit
def _weight_tile(weight_ptr, small_col, small, col, columns, COLUMNS_FIRST: tl.constexpr):
    """[small, columns at col] of a weight that is stored [columns, small] or [small, columns]."""
    if COLUMNS_FIRST:
        mask = (col < columns)[:, None] & (small_col < small)[None, :]
        return tl.trans(tl.load(weight_ptr + col[:, None] * small + small_col[None, :], mask=mask, other=0.0))
    mask = (small_col < small)[:, None] & (col < columns)[None, :]
    return tl.load(weight_ptr + small_col[:, None] * columns + col[None, :], mask=mask, other=0.0)


@triton.jit
def cross_layer(
    x0_ptr,  # [B, X]
    base_ptr,  # [B, X], read where HAS_BASE
    parts_ptr,  # [S, B, R] float32, the parts of c; read where S > 0
    c_ptr,  # [B, R]: in where S = 0, else out
    expand_ptr,  # W, [X, R] in the forward, [R, X] in the backward
    bias_ptr,  # [X], read in the forward
    contract_ptr,  # Z, [NEXT, X] in the forward, [X, NEXT] in the backward
    y_ptr,  # out: [B, X]
    next_parts_ptr,  # out: [S, B, NEXT] float32
    rows,
    columns,
    rank,
    next_rank,
    tiles,  # column tiles of one part
    BACKWARD: tl.constexpr,
    HAS_BASE: tl.constexpr,
    S: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RANK: tl.constexpr,
    NEXT: tl.constexpr,
):
    """Writes y = x_0 * (W c + bias) + base and the parts of Z y."""
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_inside = row < rows
    rank_col = tl.arange(0, RANK)
    next_col = tl.arange(0, NEXT)
    part = tl.program_id(1)
    c_offset = row[:, None] * rank + rank_col[None, :]
    c_mask = row_inside[:, None] & (rank_col < rank)[None, :]
    if S == 0:
        c = tl.load(c_ptr + c_offset, mask=c_mask, other=0.0)
    else:
        total = tl.load(parts_ptr + c_offset, mask=c_mask, other=0.0)
        for other_part in tl.static_range(1, S):
            total += tl.load(parts_ptr + other_part * rows * rank + c_offset, mask=c_mask, other=0.0)
        c = total.to(c_ptr.dtype.element_ty)
        if part == 0:
            tl.store(c_ptr + c_offset, c, mask=c_mask)
    acc = tl.zeros((BLOCK_B, NEXT), tl.float32)
    first_col = part * tiles * BLOCK_X + tl.arange(0, BLOCK_X)
    if not BACKWARD:
        next_bias = tl.load(bias_ptr + first_col, mask=first_col < columns, other=0.0)
    for tile in range(tiles):
        col = first_col + tile * BLOCK_X
        offset = row[:, None] * columns + col[None, :]
        mask = row_inside[:, None] & (col < columns)[None, :]
        gate = tl.dot(c, _weight_tile(expand_ptr, rank_col, rank, col, columns, not BACKWARD))
        if not BACKWARD:
            gate += next_bias.to(tl.float32)[None, :]
            # Too few bytes for the asynchronous copies that fetch the other operands ahead: by hand, one tile ahead.
            next_bias = tl.load(bias_ptr + col + BLOCK_X, mask=col + BLOCK_X < columns, other=0.0)
        x0 = tl.load(x0_ptr + offset, mask=mask, other=0.0)
        y = x0.to(tl.float32) * gate
        if HAS_BASE:
            y += tl.load(base_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = y.to(x0.dtype)
        tl.store(y_ptr + offset, y, mask=mask)
        contract = _weight_tile(contract_ptr, next_col, next_rank, col, columns, BACKWARD)
        acc = tl.dot(y, tl.trans(contract), acc)
    next_mask = row_inside[:, None] & (next_col < next_rank)[None, :]
    tl.store(
        next_parts_ptr + part * rows * next_rank + row[:, None] * next_rank + next_col[None, :], acc, mask=next_mask
    )


@triton.jit
def input_gradient(
    out_grad_ptr,  # [B, O]
    projection_ptr,  # [O, X]
    down_ptrs,  # V_0 .. V_{L-1}, each [R, X]
    up_ptrs,  # U_0 .. U_{L-1}, each [X, R]
    bias_ptrs,  # b_0 .. b_{L-1}, each [X]
    t_ptr,  # [L, B, R]
    dt_ptr,  # [L, B, R]
    dense_grad_ptr,  # out: [B, N]
    emb_grad_ptr,  # out: [B, X - N]
    rows,
    columns,
    dense_columns,
    rank,
    outputs,
    LAYERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
):
    """dx_0 = d_0 + sum over l of d_{l+1} * (U_l t_l + b_l), everything but t and dt computed anew."""
    row = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    col = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    row_inside = row < rows
    col_inside = col < columns
    rank_col = tl.arange(0, RANK)
    out_col = tl.arange(0, OUT)
    out_grad_mask = row_inside[:, None] & (out_col < outputs)[None, :]
    out_grad = tl.load(out_grad_ptr + row[:, None] * outputs + out_col[None, :], mask=out_grad_mask, other=0.0)
    d = tl.dot(out_grad, _weight_tile(projection_ptr, out_col, outputs, col, columns, False))
    dx0 = tl.zeros((BLOCK_B, BLOCK_X), tl.float32)
    small = row[:, None] * rank + rank_col[None, :]
    small_mask = row_inside[:, None] & (rank_col < rank)[None, :]
    for layer in tl.static_range(LAYERS - 1, -1, -1):
        offset = layer * rows * rank + small
        t = tl.load(t_ptr + offset, mask=small_mask, other=0.0)
        bias = tl.load(bias_ptrs[layer] + col, mask=col_inside, other=0.0).to(tl.float32)
        dx0 += d * (tl.dot(t, _weight_tile(up_ptrs[layer], rank_col, rank, col, columns, True)) + bias[None, :])
        dt = tl.load(dt_ptr + offset, mask=small_mask, other=0.0)
        d += tl.dot(dt, _weight_tile(down_ptrs[layer], rank_col, rank, col, columns, False))
    dx0 = (dx0 + d).to(out_grad.dtype)
    is_dense = (col < dense_columns)[None, :]
    mask = row_inside[:, None] & col_inside[None, :]
    tl.store(dense_grad_ptr + row[:, None] * dense_columns + col[None, :], dx0, mask=mask & is_dense)
    emb_offset = row[:, None] * (columns - dense_columns) + (col - dense_columns)[None, :]
    tl.store(emb_grad_ptr + emb_offset, dx0, mask=mask & (is_dense == 0))


@triton.jit
def _outer_product(
    wide_ptr, narrow_ptr, out_ptr, sum_ptr, rows, columns, width, out_col_stride, out_width_stride,
    WIDE_SUM: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_X: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """wide^T narrow over all rows at one tile of wide's columns, and with WIDE_SUM the sums of wide's columns."""
    col = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    width_col = tl.arange(0, WIDTH)
    acc = tl.zeros((BLOCK_X, WIDTH), tl.float32)
    total = tl.zeros((BLOCK_B, BLOCK_X), tl.float32)
    for start in range(0, rows, BLOCK_B):
        row = start + tl.arange(0, BLOCK_B)
        wide_mask = (row < rows)[:, None] & (col < columns)[None, :]
        wide = tl.load(wide_ptr + row[:, None] * columns + col[None, :], mask=wide_mask, other=0.0)
        narrow_mask = (row < rows)[:, None] & (width_col < width)[None, :]
        narrow = tl.load(narrow_ptr + row[:, None] * width + width_col[None, :], mask=narrow_mask, other=0.0)
        acc = tl.dot(tl.trans(wide), narrow, acc)
        if WIDE_SUM:
            total += wide.to(tl.float32)
    out = out_ptr + col[:, None] * out_col_stride + width_col[None, :] * out_width_stride
    mask = (col < columns)[:, None] & (width_col < width)[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
    if WIDE_SUM:
        tl.store(sum_ptr + col, tl.sum(total, axis=0).to(sum_ptr.dtype.element_ty), mask=col < columns)


@triton.jit
def weight_gradients(
    x_ptr,  # [L + 1, B, X]
    q_ptr,  # [L, B, X]
    t_ptr,  # [L, B, R]
    dt_ptr,  # [L, B, R]
    out_grad_ptr,  # [B, O]
    up_grad_ptr,  # out: [L, X, R], q_l^T t_l
    bias_grad_ptr,  # out: [L, X], sums of q_l
    down_grad_ptr,  # out: [L, R, X], dt_l^T x_l
    projection_grad_ptr,  # out: [O, X], out_grad^T x_L
    projection_bias_grad_ptr,  # out: [O]
    rows,
    columns,
    rank,
    outputs,
    LAYERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_X: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
):
    """All weight gradients; the second grid dimension runs over the 2 L + 1 products."""
    task = tl.program_id(1)
    if task < LAYERS:
        _outer_product(
            q_ptr + task.to(tl.int64) * rows * columns, t_ptr + task * rows * rank, up_grad_ptr + task * columns * rank,
            bias_grad_ptr + task * columns, rows, columns, rank, rank, 1, True, BLOCK_B, BLOCK_X, RANK,
        )  # fmt: skip
    elif task < 2 * LAYERS:
        layer = task - LAYERS
        _outer_product(
            x_ptr + layer.to(tl.int64) * rows * columns, dt_ptr + layer * rows * rank,
            down_grad_ptr + layer * columns * rank, bias_grad_ptr, rows, columns, rank, 1, columns,
            False, BLOCK_B, BLOCK_X, RANK,
        )  # fmt: skip
    else:
        _outer_product(
            x_ptr + (task - LAYERS).to(tl.int64) * rows * columns, out_grad_ptr, projection_grad_ptr,
            bias_grad_ptr, rows, columns, outputs, 1, columns, False, BLOCK_B, BLOCK_X, OUT,
        )  # fmt: skip
        if tl.program_id(0) == 0:
            out_col = tl.arange(0, OUT)
            total = tl.zeros((BLOCK_B, OUT), tl.float32)
            for start in range(0, rows, BLOCK_B):
                row = start + tl.arange(0, BLOCK_B)
                mask = (row < rows)[:, None] & (out_col < outputs)[None, :]
                offset = row[:, None] * outputs + out_col[None, :]
                total += tl.load(out_grad_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            result = tl.sum(total, axis=0).to(projection_bias_grad_ptr.dtype.element_ty)
            tl.store(projection_bias_grad_ptr + out_col, result, mask=out_col < outputs)
