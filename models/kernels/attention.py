"""AutoInt's interacting layer as one kernel forward and one backward, with a small sum for the weight's gradient.

The plain form (:class:`models.towers.autoint.AttentionLayer`) is some ten kernels each way, which write and read the
projections and the scores of 26 fields through device memory. Here a program keeps the weight and takes some samples at
a time, each padded to as many rows as the tensor cores take. The backward pass computes projections and scores anew: it
reads the input, the output for its ReLU, and the output's gradient. Sums are in float32, what goes into a product is
rounded to bf16.

Shapes: B rows of the batch, F fields, D embedding dim, H heads, K head dim, X = H * K, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.partial_sums import sum_parts

ROWS = 128
"""Rows of one projection: 4 samples of up to 32 fields."""
MAX_FIELDS = 32
PARTS = 4
"""Query, key, value and residual, in this order in the weight."""
SMALL_BATCH = 2048
"""Samples up to which the backward leaves half of each multiprocessor to other towers."""


def attention_applies(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> bool:
    """Whether the kernels take these shapes; see :func:`models.kernels.own_kernel_applies` for device and dtype."""
    _, fields, dim = field_BFD.shape
    head_dim = weight_XD.shape[0] // (PARTS * num_heads)
    # Larger tiles do not fit into registers: what would be kept there is stored and loaded again, sample after sample.
    tile = triton.next_power_of_2(dim) * triton.next_power_of_2(head_dim)
    sizes_fit = fields <= MAX_FIELDS and dim <= 64 and head_dim <= 32 and PARTS * num_heads * tile <= 2**14
    return bool(sizes_fit and dim % 16 == 0 and head_dim % 16 == 0 and weight_XD.dtype == field_BFD.dtype)


@triton.jit
def _weight_tile(weight, row, D: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr):
    """Rows ``row`` to ``row + K`` of ``weight`` as a [HEAD, DIM] tile: the smallest powers of two, zeros outside."""
    k = tl.arange(0, HEAD)[:, None]
    d = tl.arange(0, DIM)[None, :]
    return tl.load(weight + (row + k) * D + d, mask=(k < K) & (d < D), other=0.0)


@triton.jit
def _weight_tiles(
    weight, part, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr
):
    tiles = ()
    for head in tl.static_range(H):
        tiles += (_weight_tile(weight, (part * H + head) * K, D, K, DIM, HEAD),)  # type: ignore[assignment]  # mypy reads an empty tuple as of that type
    return tiles


@triton.jit
def _field_rows(field, stride_b, rows, valid, D: tl.constexpr, DIM: tl.constexpr, FIELDS: tl.constexpr):
    """The fields of the block's samples, one a row: [M, DIM], zeros where not ``valid``."""
    d = tl.arange(0, DIM)[None, :]
    offset = (rows // FIELDS)[:, None] * stride_b + (rows % FIELDS)[:, None] * D + d
    return tl.load(field + offset, mask=valid & (d < D), other=0.0)


@triton.jit
def _probabilities(query, key, F: tl.constexpr, FIELDS: tl.constexpr):
    """Softmax over the fields of a sample: [samples, FIELDS, HEAD] twice -> [samples, FIELDS, FIELDS] in float32."""
    exists = tl.arange(0, FIELDS)[None, None, :] < F
    score = tl.where(exists, tl.dot(query, tl.permute(key, (0, 2, 1))), float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=2, keep_dims=True))
    return weight / tl.sum(weight, axis=2, keep_dims=True)


@triton.jit
def _forward_kernel(
    field,  # [B, F, D], rows of the batch stride_b apart
    weight,  # [4 * H * K, D]
    out,  # [B, F, H * K]
    batch,
    stride_b,
    F: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    FIELDS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    rows = tl.arange(0, SAMPLES * FIELDS)
    place = (rows // FIELDS * F + rows % FIELDS)[:, None]
    k = tl.arange(0, HEAD)[None, :]
    query_tiles = _weight_tiles(weight, 0, H, D, K, DIM, HEAD)
    key_tiles = _weight_tiles(weight, 1, H, D, K, DIM, HEAD)
    value_tiles = _weight_tiles(weight, 2, H, D, K, DIM, HEAD)
    residual_tiles = _weight_tiles(weight, 3, H, D, K, DIM, HEAD)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(batch, SAMPLES), tl.num_programs(0)):
        start = block * SAMPLES
        valid = ((rows % FIELDS < F) & (rows // FIELDS < batch - start))[:, None]
        x = _field_rows(field + start * stride_b, stride_b, rows, valid, D, DIM, FIELDS)
        target = out + (start * F + place) * (H * K) + k
        for head in tl.static_range(H):
            query = tl.dot(x, tl.trans(query_tiles[head])).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            key = tl.dot(x, tl.trans(key_tiles[head])).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            value = tl.dot(x, tl.trans(value_tiles[head])).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            attended = tl.dot(_probabilities(query, key, F, FIELDS).to(x.dtype), value)
            result = tl.dot(x, tl.trans(residual_tiles[head])) + attended.reshape(SAMPLES * FIELDS, HEAD)
            tl.store(target + head * K, tl.maximum(result, 0.0).to(x.dtype), mask=valid & (k < K))


@triton.jit
def _backward_kernel(
    field,  # [B, F, D], rows of the batch stride_b apart
    weight,  # [4 * H * K, D]
    out,  # [B, F, H * K]
    grad_out,  # as out
    grad_field,  # [B, F, D]
    partial,  # [P, 4 * H * K, D] float32
    batch,
    stride_b,
    F: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    FIELDS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Head by head: the gradient of one head's weight is as much as the registers hold beside the scores."""
    rows = tl.arange(0, SAMPLES * FIELDS)
    d = tl.arange(0, DIM)[None, :]
    place = (rows // FIELDS * F + rows % FIELDS)[:, None]
    k = tl.arange(0, HEAD)[None, :]
    for head in range(H):
        query_tile = _weight_tile(weight, head * K, D, K, DIM, HEAD)
        key_tile = _weight_tile(weight, (H + head) * K, D, K, DIM, HEAD)
        value_tile = _weight_tile(weight, (2 * H + head) * K, D, K, DIM, HEAD)
        residual_tile = _weight_tile(weight, (3 * H + head) * K, D, K, DIM, HEAD)
        query_sum = tl.zeros((DIM, HEAD), tl.float32)
        key_sum = tl.zeros((DIM, HEAD), tl.float32)
        value_sum = tl.zeros((DIM, HEAD), tl.float32)
        residual_sum = tl.zeros((DIM, HEAD), tl.float32)
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(batch, SAMPLES), tl.num_programs(0)):
            start = block * SAMPLES
            valid = ((rows % FIELDS < F) & (rows // FIELDS < batch - start))[:, None]
            x = _field_rows(field + start * stride_b, stride_b, rows, valid, D, DIM, FIELDS)
            place_out = (start * F + place) * (H * K) + head * K + k
            kept = tl.load(out + place_out, mask=valid & (k < K), other=0.0) > 0
            grad = tl.load(grad_out + place_out, mask=valid & (k < K), other=0.0)
            grad = tl.where(kept, grad, 0.0).to(x.dtype)
            query = tl.dot(x, tl.trans(query_tile)).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            key = tl.dot(x, tl.trans(key_tile)).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            value = tl.dot(x, tl.trans(value_tile)).to(x.dtype).reshape(SAMPLES, FIELDS, HEAD)
            grad_attended = grad.reshape(SAMPLES, FIELDS, HEAD)
            p = _probabilities(query, key, F, FIELDS)
            grad_p = tl.dot(grad_attended, tl.permute(value, (0, 2, 1)))
            grad_score = (p * (grad_p - tl.sum(p * grad_p, axis=2, keep_dims=True))).to(x.dtype)
            grad_value = tl.dot(tl.permute(p.to(x.dtype), (0, 2, 1)), grad_attended)
            grad_query = tl.dot(grad_score, key)
            grad_key = tl.dot(tl.permute(grad_score, (0, 2, 1)), query)
            grad_value = grad_value.to(x.dtype).reshape(SAMPLES * FIELDS, HEAD)
            grad_query = grad_query.to(x.dtype).reshape(SAMPLES * FIELDS, HEAD)
            grad_key = grad_key.to(x.dtype).reshape(SAMPLES * FIELDS, HEAD)
            query_sum = tl.dot(tl.trans(x), grad_query, query_sum)
            key_sum = tl.dot(tl.trans(x), grad_key, key_sum)
            value_sum = tl.dot(tl.trans(x), grad_value, value_sum)
            residual_sum = tl.dot(tl.trans(x), grad, residual_sum)
            grad_x = tl.dot(grad, residual_tile)
            grad_x = tl.dot(grad_query, query_tile, grad_x)
            grad_x = tl.dot(grad_key, key_tile, grad_x)
            grad_x = tl.dot(grad_value, value_tile, grad_x)
            # What this program wrote for the heads before.
            target = grad_field + (start * F + place) * D + d
            grad_x += tl.load(target, mask=valid & (d < D) & (head > 0), other=0.0)
            tl.store(target, grad_x.to(x.dtype), mask=valid & (d < D))
        d_rows = tl.arange(0, DIM)[:, None]
        step: tl.constexpr = H * K * D
        target_sum = partial + tl.program_id(0) * (4 * step) + (head * K + k) * D + d_rows
        inside = (d_rows < D) & (k < K)
        tl.store(target_sum, query_sum, mask=inside)
        tl.store(target_sum + step, key_sum, mask=inside)
        tl.store(target_sum + 2 * step, value_sum, mask=inside)
        tl.store(target_sum + 3 * step, residual_sum, mask=inside)
        # Another thread of this program may read grad_field for the next head than wrote it for this one.
        tl.debug_barrier()


def field_attention(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> Tensor:
    """ReLU(attention(e) + W_res e), differentiable, on the current stream.

    Args:
        field_BFD: [B, F, D]; the samples may lie apart, each one is contiguous.
        weight_XD: [4 * H * K, D], contiguous: query, key, value, residual.
        num_heads: H.

    Returns:
        [B, F, H * K]
    """
    result: Tensor = _attention(field_BFD, weight_XD, num_heads)
    return result


@torch.library.custom_op("erase_rec::field_attention", mutates_args=())
def _attention(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> Tensor:
    field_BFD = _dense_samples(field_BFD)
    out_BFX = _empty_output(field_BFD, weight_XD, num_heads)
    sizes = _sizes(field_BFD, weight_XD, num_heads)
    programs = _programs(field_BFD, per_multiprocessor=2)
    _forward_kernel[(programs,)](
        field_BFD, weight_XD, out_BFX, field_BFD.shape[0], field_BFD.stride(0), **sizes, num_warps=4
    )
    return out_BFX


@torch.library.custom_op("erase_rec::field_attention_backward", mutates_args=())
def _attention_backward(
    field_BFD: Tensor, weight_XD: Tensor, out_BFX: Tensor, grad_BFX: Tensor, num_heads: int
) -> tuple[Tensor, Tensor]:
    field_BFD = _dense_samples(field_BFD)
    grad_field_BFD = torch.empty(field_BFD.shape, dtype=field_BFD.dtype, device=field_BFD.device)
    grad_weight_XD = torch.empty_like(weight_XD)
    # Two fill a multiprocessor's registers, and no other tower's kernel would start: worth it only for many samples.
    programs = _programs(field_BFD, per_multiprocessor=1 if field_BFD.shape[0] <= SMALL_BATCH else 2)
    partial_PXD = torch.empty((programs, *weight_XD.shape), dtype=torch.float32, device=field_BFD.device)
    _backward_kernel[(programs,)](
        field_BFD,
        weight_XD,
        out_BFX,
        grad_BFX.contiguous(),
        grad_field_BFD,
        partial_PXD,
        field_BFD.shape[0],
        field_BFD.stride(0),
        **_sizes(field_BFD, weight_XD, num_heads),
        num_warps=4,
        num_stages=1,
    )
    sum_parts(partial_PXD, grad_weight_XD)
    return grad_field_BFD, grad_weight_XD


@_attention.register_fake
def _(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> Tensor:
    return _empty_output(field_BFD, weight_XD, num_heads)


@_attention_backward.register_fake
def _(field_BFD: Tensor, weight_XD: Tensor, out_BFX: Tensor, grad_BFX: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    return torch.empty(field_BFD.shape, dtype=field_BFD.dtype, device=field_BFD.device), torch.empty_like(weight_XD)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    field_BFD, weight_XD, ctx.num_heads = inputs
    ctx.save_for_backward(field_BFD, weight_XD, output)


def _differentiate(ctx: Any, grad_BFX: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_field_BFD, grad_weight_XD = _attention_backward(*ctx.saved_tensors, grad_BFX, ctx.num_heads)
    return grad_field_BFD, grad_weight_XD, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _dense_samples(field_BFD: Tensor) -> Tensor:
    """``field_BFD`` with each sample contiguous, as the kernels read it."""
    _, _, dim = field_BFD.shape
    return field_BFD if field_BFD.stride()[1:] == (dim, 1) else field_BFD.contiguous()


def _empty_output(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> Tensor:
    batch, fields, _ = field_BFD.shape
    return field_BFD.new_empty((batch, fields, weight_XD.shape[0] // PARTS))


def _sizes(field_BFD: Tensor, weight_XD: Tensor, num_heads: int) -> dict[str, int]:
    _, fields, dim = field_BFD.shape
    head_dim = weight_XD.shape[0] // PARTS // num_heads
    rows = _rows_of_a_sample(fields)
    powers = {"DIM": triton.next_power_of_2(dim), "HEAD": triton.next_power_of_2(head_dim), "FIELDS": rows}
    return {"F": fields, "D": dim, "H": num_heads, "K": head_dim, "SAMPLES": ROWS // rows, **powers}


def _rows_of_a_sample(fields: int) -> int:
    return 16 if fields <= 16 else MAX_FIELDS


def _programs(field_BFD: Tensor, per_multiprocessor: int) -> int:
    """As many programs as run at a time, or as there is work for: each keeps the weight over all its samples."""
    batch, fields, _ = field_BFD.shape
    blocks = triton.cdiv(batch, ROWS // _rows_of_a_sample(fields))
    # On the CPU there is Triton's interpreter only: any number serves.
    cuda = field_BFD.is_cuda
    count = torch.cuda.get_device_properties(field_BFD.device).multi_processor_count if cuda else 1
    return int(min(blocks, per_multiprocessor * count))
