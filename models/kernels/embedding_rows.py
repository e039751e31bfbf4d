"""Embedding tables in Triton: pooled lookup, sort keys of ids, exact row-wise update with nothing on the host.

The definitions are :mod:`models.embeddings.torch_backend` and :mod:`models.embeddings.row_optimizer`; the host's side
is :mod:`models.embeddings.own_kernels`. All tables lie in one buffer, one after the other. Shapes: B rows of the batch,
F features, D embedding dim, E = sum of dims, V ids of the batch (padding included).

The update is a segmented sum over the ids in sorted order. Each program takes ``CHUNK`` sorted ids, whatever rows they
are of, so that a row that half the batch names costs no more than others: rows that lie inside are finished, sums of
rows that go on beyond an edge are written down, and a second kernel adds those. The order of every sum is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Lines of ``fields``, int64 [6, F], one number a feature.
FIRST_ROW, ROWS, OFFSET, DIM, COLUMN, AVERAGED = (tl.constexpr(line) for line in range(6))


@triton.jit
def lookup(
    values,  # int64 [V]
    ends,  # int32 [F * B], where each bag ends in values; not read when SINGLE
    weights,  # float32 [V]; not read unless WEIGHTED
    fields,  # int64 [6, F]
    outside,  # int64 [2, F], lowest and highest id outside its table so far
    tables,  # float32, all weights
    pooled,  # [B, E], written
    B,
    F,
    E,
    SINGLE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALIGN: tl.constexpr,  # power of two that divides every dim
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, at least the largest dim
):
    """Pooled embeddings of BLOCK_B rows of one feature; an id outside its table is noted and read as id 0."""
    feature = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    live = row < B
    dim = tl.multiple_of(tl.load(fields + DIM * F + feature), ALIGN)
    column = tl.multiple_of(tl.load(fields + COLUMN * F + feature), ALIGN)
    d = tl.arange(0, BLOCK_D)
    bag = feature * B + row
    if SINGLE:
        total = _looked_up(values, weights, fields, outside, tables, bag, live, feature, dim, d, F, WEIGHTED, ALIGN)
    else:
        end = tl.load(ends + bag, mask=live, other=0)
        start = tl.load(ends + bag - 1, mask=live & (bag > 0), other=0)
        total = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
        for step in range(tl.max(end - start, axis=0)):
            position = start + step
            total += _looked_up(
                values, weights, fields, outside, tables, position, position < end, feature, dim, d, F, WEIGHTED, ALIGN
            )
        if tl.load(fields + AVERAGED * F + feature) != 0:
            total = total / tl.maximum(end - start, 1).to(tl.float32)[:, None]
    target = tl.multiple_of(row.to(tl.int64) * E + column, ALIGN)
    tl.store(
        pooled + target[:, None] + d[None, :],
        total.to(pooled.dtype.element_ty),
        mask=live[:, None] & (d < dim)[None, :],
    )


@triton.jit
def _looked_up(
    values,
    weights,
    fields,
    outside,
    tables,
    position,
    live,
    feature,
    dim,
    d,
    F,
    WEIGHTED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Weighted table rows [positions, BLOCK_D] of ``values`` at ``position``; zero where not ``live``."""
    ids = tl.load(values + position, mask=live, other=0)
    inside = (ids >= 0) & (ids < tl.load(fields + ROWS * F + feature))
    tl.atomic_min(outside + feature + tl.zeros_like(position), ids, mask=live & (ids < 0))
    tl.atomic_max(outside + F + feature + tl.zeros_like(position), ids, mask=live & (ids >= 0) & ~inside)
    base = tl.multiple_of(tl.load(fields + OFFSET * F + feature) + tl.where(inside, ids, 0) * dim, ALIGN)
    found = tl.load(tables + base[:, None] + d[None, :], mask=live[:, None] & (d < dim)[None, :], other=0.0)
    if WEIGHTED:
        found *= tl.load(weights + position, mask=live, other=0.0)[:, None]
    return found


@triton.jit
def sort_keys(
    values,  # int64 [V]
    ends,  # int32 [F * B]; not read when SINGLE
    weights,  # float32 [V]; not read unless WEIGHTED
    fields,  # int64 [6, F]
    keys,  # int32 or int64 [V], written: row over all tables; ALL_ROWS for padding and ids outside their table
    bags,  # int32 [V], written unless SINGLE: the bag of each id
    scales,  # float32 [V], written where WEIGHTED or MEAN: what the id's bag's gradient counts with
    V,
    B,
    F,
    all_rows,
    SINGLE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # at least log2(F * B) + 1
    BLOCK: tl.constexpr,
):
    """What the update needs of each id before the sort."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = position < V
    bag = position
    if not SINGLE:
        # The first bag that ends beyond the position; F * B for padding.
        low = tl.zeros_like(position)
        high = low + F * B
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            beyond = tl.load(ends + middle, mask=low < high, other=0) > position
            high = tl.where((low < high) & beyond, middle, high)
            low = tl.where((low < high) & ~beyond, middle + 1, low)
        live = live & (low < F * B)
        bag = tl.where(live, low, 0)
        tl.store(bags + position, bag, mask=position < V)
    feature = bag // B
    ids = tl.load(values + position, mask=live, other=-1)
    inside = live & (ids >= 0) & (ids < tl.load(fields + ROWS * F + feature, mask=live, other=0))
    key = tl.where(inside, tl.load(fields + FIRST_ROW * F + feature, mask=live, other=0) + ids, all_rows)
    tl.store(keys + position, key.to(keys.dtype.element_ty), mask=position < V)
    if WEIGHTED or MEAN:
        scale = tl.full([BLOCK], 1.0, tl.float32)
        if WEIGHTED:
            scale = tl.load(weights + position, mask=live, other=0.0)
        if MEAN:
            end = tl.load(ends + bag, mask=live, other=1)
            start = tl.load(ends + bag - 1, mask=live & (bag > 0), other=0)
            averaged = tl.load(fields + AVERAGED * F + feature, mask=live, other=0) != 0
            scale = tl.where(averaged, scale / tl.maximum(end - start, 1).to(tl.float32), scale)
        tl.store(scales + position, scale, mask=position < V)


@triton.jit
def update_inside(
    keys,  # int32 or int64 [V], sorted (each feature's B by themselves when SORTED_BY_FEATURE)
    index,  # int64 [V], where each key was before the sort (within its feature when SORTED_BY_FEATURE)
    bags,  # int32 [V]; not read when SINGLE
    scales,  # float32 [V]; not read unless SCALED
    gradient,  # [B, E]
    fields,  # int64 [6, F]
    tables,  # float32, all weights, updated
    state,  # float32, all Adagrad sums, updated
    lr,  # float32 [1]
    edges,  # float32 [chunks, 2, BLOCK_D], written: sums of a row that came in from the left, that goes out right only
    V,
    B,
    F,
    E,
    all_rows,
    eps,
    KIND: tl.constexpr,
    SINGLE: tl.constexpr,
    SCALED: tl.constexpr,
    SORTED_BY_FEATURE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient sums of the rows of CHUNK sorted ids, and the optimizer's step of those that lie inside."""
    chunk = tl.program_id(0)
    slot = tl.arange(0, CHUNK)
    position = chunk * CHUNK + slot
    here = position < V
    key = tl.load(keys + position, mask=here, other=all_rows)
    before = tl.load(keys + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
    after = tl.load(keys + (chunk + 1) * CHUNK, mask=(chunk + 1) * CHUNK < V, other=-1)
    next_key = tl.load(keys + position + 1, mask=position + 1 < V, other=-1)
    real = here & (key < all_rows)
    last = real & ((slot == CHUNK - 1) | (key != next_key))
    from_left = key == before
    to_right = key == after
    whole = last & ~from_left & ~to_right

    place = tl.load(index + position, mask=here, other=0)
    if SORTED_BY_FEATURE:
        place += position // B * B
    bag = place.to(tl.int32) if SINGLE else tl.load(bags + place, mask=here, other=0)
    feature = bag // B
    dim = tl.multiple_of(tl.load(fields + DIM * F + feature, mask=here, other=0), ALIGN)
    column = tl.load(fields + COLUMN * F + feature, mask=here, other=0)
    d = tl.arange(0, BLOCK_D)
    source = tl.multiple_of((bag - feature * B).to(tl.int64) * E + column, ALIGN)
    in_row = d[None, :] < dim[:, None]
    given = tl.load(gradient + source[:, None] + d[None, :], mask=real[:, None] & in_row, other=0.0)
    first_row = tl.load(fields + FIRST_ROW * F + feature, mask=here, other=0)
    base = tl.load(fields + OFFSET * F + feature, mask=here, other=0) + (key - first_row) * dim
    base = tl.multiple_of(base, ALIGN)
    # Loaded before the sums, so that both wait for memory at once.
    weight = tl.load(tables + base[:, None] + d[None, :], mask=whole[:, None] & in_row, other=0.0)

    same_row = tl.where(key[:, None] == key[None, :], 1.0, 0.0).to(tl.bfloat16)
    if SCALED:
        given = given.to(tl.float32) * tl.load(scales + place, mask=real, other=0.0)[:, None]
    sums = _exact_product(same_row, given)
    step = _direction(sums, state, key, base, dim, d, whole, in_row, eps, KIND)
    tl.store(tables + base[:, None] + d[None, :], weight - tl.load(lr) * step, mask=whole[:, None] & in_row)
    edge = edges + ((chunk * 2 + tl.where(from_left, 0, 1)).to(tl.int64) * BLOCK_D)[:, None] + d[None, :]
    tl.store(edge, sums, mask=(last & (from_left | to_right))[:, None] & in_row)


@triton.jit
def update_across(
    keys,
    index,
    bags,
    gradient_edges,  # float32 [chunks, 2, BLOCK_D], as ``update_inside`` left them
    fields,
    tables,
    state,
    lr,
    V,
    B,
    F,
    all_rows,
    eps,
    KIND: tl.constexpr,
    SINGLE: tl.constexpr,
    SORTED_BY_FEATURE: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The optimizer's step of the row that begins in one chunk and ends in a later one, if there is one."""
    chunk = tl.program_id(0)
    position = (chunk + 1) * CHUNK - 1
    more = position + 1 < V
    key = tl.load(keys + position, mask=more, other=all_rows)
    after = tl.load(keys + position + 1, mask=more, other=-1)
    before = tl.load(keys + chunk * CHUNK - 1, mask=chunk > 0, other=-1)
    if (key == after) & (key != before) & (key < all_rows):
        d = tl.arange(0, BLOCK_D)
        place = tl.load(index + position)
        if SORTED_BY_FEATURE:
            place += position // B * B
        bag = place.to(tl.int32) if SINGLE else tl.load(bags + place)
        feature = bag // B
        dim = tl.multiple_of(tl.load(fields + DIM * F + feature), ALIGN)
        base = tl.load(fields + OFFSET * F + feature) + (key - tl.load(fields + FIRST_ROW * F + feature)) * dim
        base = tl.multiple_of(base, ALIGN)
        weight = tl.load(tables + base + d, mask=d < dim, other=0.0)
        total = tl.load(gradient_edges + (chunk.to(tl.int64) * 2 + 1) * BLOCK_D + d, mask=d < dim, other=0.0)
        first = chunk + 1
        going = 1
        while going > 0:
            later = first + tl.arange(0, BLOCK_C)
            ours = tl.load(keys + later * CHUNK, mask=later * CHUNK < V, other=-1) == key
            edge = gradient_edges + (later.to(tl.int64) * 2 * BLOCK_D)[:, None] + d[None, :]
            total += tl.sum(tl.load(edge, mask=ours[:, None] & (d < dim)[None, :], other=0.0), axis=0)
            first += BLOCK_C
            going = tl.min(ours.to(tl.int32), axis=0)
        one = tl.arange(0, 1)
        in_row = (d < dim)[None, :]
        step = _direction(total[None, :], state, key + one, base + one, dim + one, d, one == 0, in_row, eps, KIND)
        tl.store(tables + base + d[None, :], weight[None, :] - tl.load(lr) * step, mask=in_row)


@triton.jit
def _exact_product(ones, given):
    """Float32 ``ones @ given`` for a matrix of zeros and ones on the matrix units.

    Products of bf16 are exact, and three bf16 numbers hold all 24 bits of a float32. A number that is not finite
    spoils the sums of its chunk.
    """
    high = given.to(tl.bfloat16)
    total = tl.dot(ones, high)
    if given.dtype == tl.float32:
        rest = given - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        total = tl.dot(ones, middle, acc=total)
        total = tl.dot(ones, (rest - middle.to(tl.float32)).to(tl.bfloat16), acc=total)
    return total


@triton.jit
def _direction(sums, state, key, base, dim, d, chosen, in_row, eps, KIND: tl.constexpr):
    """What the learning rate multiplies [rows, BLOCK_D], and the new Adagrad sums of the ``chosen`` rows."""
    if KIND == "rowwise_adagrad":
        # Columns past the row's dim are zero.
        square = tl.sum(sums * sums, axis=1) / dim.to(tl.float32)
        total = tl.load(state + key, mask=chosen, other=0.0) + square
        tl.store(state + key, total, mask=chosen)
        step = sums / (tl.sqrt_rn(total) + eps)[:, None]
    elif KIND == "adagrad":
        cells = state + base[:, None] + d[None, :]
        total = tl.load(cells, mask=chosen[:, None] & in_row, other=0.0) + sums * sums
        tl.store(cells, total, mask=chosen[:, None] & in_row)
        step = sums / (tl.sqrt_rn(total) + eps)
    else:
        step = sums
    return step
