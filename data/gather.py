"""From encoded blocks to batches: whole columns are gathered, then cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.block import Bags, EncodedBlock, FloatArray, RowArray
from data.features.bags import ragged_positions
from data.features.encoding import IntArray
from erase_rec.batch import Batch, SparseBatch

_TILE_ROWS = 2048
"""Rows that are turned from columns to rows at a time: they stay in a core's cache."""
_NUMPY_TYPES = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True)
class Picked:
    """Rows of several blocks, joined in the order of the blocks.

    Attributes:
        blocks: at least one, of the same features.
        rows: int64 [n], positions among the rows of all blocks.
        sizes: rows of each batch that they are cut into, n in all.
        pin: whether the batches go to page-locked memory; needs CUDA.
    """

    blocks: Sequence[EncodedBlock]
    rows: IntArray
    sizes: Sequence[int]
    pin: bool = False

    def column(self, parts: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The picked rows [n] of a column that has a part in each block."""
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        assert len(whole) == sum(block.num_rows for block in self.blocks)
        return np.take(whole, self.rows, out=out, mode="wrap")  # rows are in range; "raise" copies to out twice

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for batches."""
        if self.pin:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        # NumPy asks for huge pages, torch does not: touching a fresh window page by page took most of the time.
        return torch.from_numpy(np.empty(shape, dtype=_NUMPY_TYPES[dtype]))


def gather(picked: Picked, row_ids: IntArray) -> list[Batch]:
    """Batches of the picked rows; they share memory with each other, but with no block.

    Args:
        picked: the rows.
        row_ids: int64 [n], what the batches call them.
    """
    label = picked.empty((len(picked.rows),), torch.float32)
    label.numpy()[:] = picked.column([block.label for block in picked.blocks])
    sizes = list(picked.sizes)
    dense = torch.split(_gather_dense(picked), sizes)
    sparse = _gather_bags(picked) if picked.blocks[0].bags else _gather_ids(picked)
    parts = zip(dense, sparse, torch.split(label, sizes), torch.split(torch.from_numpy(row_ids), sizes), strict=True)
    return [Batch(*each) for each in parts]


def join(batches: Sequence[Batch], *, pin: bool = False) -> Batch:
    """One batch of the rows of several."""
    sparse = [batch.sparse for batch in batches]
    num_features = sparse[0].num_features
    lengths = [each.lengths.view(num_features, -1) for each in sparse]
    counts = [each.sum(dim=1).tolist() for each in lengths]
    weights = [each.weights for each in sparse if each.weights is not None]
    joined = Batch(
        dense=torch.cat([batch.dense for batch in batches]),
        sparse=SparseBatch(
            values=_join_features([each.values for each in sparse], counts),
            lengths=torch.cat(lengths, dim=1).view(-1),
            weights=_join_features(weights, counts) if weights else None,
            num_features=num_features,
            single_valued=sparse[0].single_valued,
        ),
        label=torch.cat([batch.label for batch in batches]),
        row_ids=torch.cat([batch.row_ids for batch in batches]),
    )
    return joined.pin_memory() if pin else joined


def _join_features(parts: Sequence[Tensor], counts: Sequence[list[int]]) -> Tensor:
    """Feature-major values of all batches, from those of each."""
    by_batch = [torch.split(part, count) for part, count in zip(parts, counts, strict=True)]
    return torch.cat([values for feature in zip(*by_batch, strict=True) for values in feature])


def _gather_dense(picked: Picked) -> Tensor:
    num_rows, num_dense = len(picked.rows), len(picked.blocks[0].dense)
    columns = np.empty((num_dense, num_rows), dtype=np.float32)
    for feature in range(num_dense):
        picked.column([block.dense[feature] for block in picked.blocks], out=columns[feature])
    dense = picked.empty((num_rows, num_dense), torch.float32)
    for start in range(0, num_rows, _TILE_ROWS):
        dense.numpy()[start : start + _TILE_ROWS] = columns[:, start : start + _TILE_ROWS].T
    return dense


def _gather_ids(picked: Picked) -> list[SparseBatch]:
    """Of single-valued features: each batch's values are a run of one array, written feature by feature."""
    num_features, num_rows = len(picked.blocks[0].ids), len(picked.rows)
    values = picked.empty((num_features * num_rows,), torch.int64)
    runs, start = [], 0  # of batches of the same size
    for size, batches in itertools.groupby(picked.sizes):
        count = len(list(batches))
        stop = start + count * size
        into = values.numpy()[num_features * start : num_features * stop].reshape(count, num_features, size)
        runs.append((start, stop, into))
        start = stop
    for feature in range(num_features):
        ids = picked.column([block.ids[feature] for block in picked.blocks])
        for start, stop, into in runs:
            into[:, feature] = ids[start:stop].reshape(len(into), -1)
    ones = picked.empty((num_features * max(picked.sizes, default=0),), torch.int32).fill_(1)
    return [
        SparseBatch(part, ones[: len(part)], None, num_features, single_valued=True)
        for part in torch.split(values, [num_features * size for size in picked.sizes])
    ]


def _gather_bags(picked: Picked) -> list[SparseBatch]:
    """Of features that are not all single-valued."""
    first = picked.blocks[0]
    num_features = len(first.ids) + len(first.bags)
    single = iter(range(len(first.ids)))
    features = [
        _pick_bags(picked, position) if position in first.bags else _as_bags(picked, next(single))
        for position in range(num_features)
    ]
    weighted = any(bags.weights is not None for bags in first.bags.values())
    ends = np.cumsum(picked.sizes)
    return [
        _sparse(features, start, stop, weighted, picked.pin)
        for start, stop in zip((ends - picked.sizes).tolist(), ends.tolist(), strict=True)
    ]


def _pick_bags(picked: Picked, position: int) -> Bags:
    """The picked rows' bags of a multi-valued feature."""
    parts = [block.bags[position] for block in picked.blocks]
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    starts = np.cumsum(lengths) - lengths
    lengths = lengths[picked.rows]
    at = ragged_positions(starts[picked.rows], lengths)
    weights = [part.weights for part in parts if part.weights is not None]
    return Bags(
        values=np.concatenate([part.values for part in parts])[at],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        weights=np.concatenate(weights)[at] if weights else None,
    )


def _as_bags(picked: Picked, feature: int) -> Bags:
    ids: RowArray = picked.column([block.ids[feature] for block in picked.blocks])
    return Bags(ids, np.arange(len(ids) + 1), None)


def _sparse(features: Sequence[Bags], start: int, stop: int, weighted: bool, pin: bool) -> SparseBatch:
    """Of rows ``start`` to ``stop`` - 1."""
    parts = [slice(bags.offsets[start], bags.offsets[stop]) for bags in features]
    values = np.concatenate([bags.values[part] for bags, part in zip(features, parts, strict=True)], dtype=np.int64)
    lengths = np.concatenate([np.diff(bags.offsets[start : stop + 1]) for bags in features], dtype=np.int32)
    weights = None
    if weighted:
        weights = torch.from_numpy(np.concatenate([_weights(*each) for each in zip(features, parts, strict=True)]))
    sparse = SparseBatch(torch.from_numpy(values), torch.from_numpy(lengths), weights, len(features))
    return sparse.pin_memory() if pin else sparse


def _weights(bags: Bags, part: slice) -> FloatArray:
    return np.ones(part.stop - part.start, dtype=np.float32) if bags.weights is None else bags.weights[part]
