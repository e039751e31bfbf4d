"""Resident batches: random rows of a workload's shape, on the device before the first step.

Dense values are normal, labels are fair coins, and ids come from the whole of each table, so that as many rows are
touched as the workload can touch. Rows of a data source would be slow to make in such numbers and would reach a small
part of large tables; what a step costs does not depend on what the rows say.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import Config, SparseFeatureConfig
from erase_rec.prefetch import prefetch

LONGEST_BAG = 20
"""Ids of the longest bag of a multi-valued feature that has no ``max_length``."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RandomRows:
    """Draws batches.

    Attributes:
        features: the sparse features.
        table_rows: rows of each one's table.
        num_dense: dense features.
        exponent: the id of rank r is drawn in proportion to (r + 1) ** -exponent (Zipf); 0: all alike.
        seed: of everything.
    """

    features: Sequence[SparseFeatureConfig]
    table_rows: Mapping[str, int]
    num_dense: int
    exponent: float
    seed: int

    @classmethod
    def of(cls, config: Config, table_rows: Mapping[str, int], *, exponent: float, seed: int) -> RandomRows:
        """For the features of ``config``."""
        return cls(config.features.sparse, table_rows, len(config.features.dense), exponent, seed)

    def batches(self, size: int, count: int, device: torch.device) -> list[Batch]:
        """``count`` different batches of ``size`` rows, on ``device``."""
        popularity = {rows: _Popularity(rows, self.exponent, self.seed) for rows in set(self.table_rows.values())}
        batches = [self._batch(size, number, popularity).to(device) for number in range(count)]
        if device.type != "cuda":
            return batches
        return [batch.arriving(torch.cuda.current_stream(device)) for batch in batches]

    def _batch(self, size: int, number: int, popularity: Mapping[int, _Popularity]) -> Batch:
        rng = np.random.default_rng([self.seed, size, number])
        lengths_FB = np.ones((len(self.features), size), dtype=np.int32)
        for position, feature in enumerate(self.features):
            if feature.multi_valued:
                lengths_FB[position] = rng.integers(1, (feature.max_length or LONGEST_BAG) + 1, size=size)
        ids = [
            popularity[self.table_rows[feature.name]].draw(rng, int(lengths.sum()))
            for feature, lengths in zip(self.features, lengths_FB, strict=True)
        ]
        weighted = any(feature.weights for feature in self.features)
        sparse = SparseBatch(
            values=torch.from_numpy(np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)),
            lengths=torch.from_numpy(lengths_FB.reshape(-1)),
            weights=torch.ones(int(lengths_FB.sum())) if weighted else None,
            num_features=len(self.features),
            single_valued=not any(feature.multi_valued for feature in self.features),
        )
        return Batch(
            dense=torch.from_numpy(rng.standard_normal((size, self.num_dense), dtype=np.float32)),
            sparse=sparse,
            label=torch.from_numpy(rng.integers(2, size=size).astype(np.float32)),
            row_ids=torch.arange(size),
        )


class _Popularity:
    """How ids of tables of one size are drawn."""

    def __init__(self, rows: int, exponent: float, seed: int) -> None:
        self._rows = rows
        self._edges: NDArray[np.float64] | None = None
        if exponent > 0:
            self._edges = np.cumsum((np.arange(rows) + 1.0) ** -exponent)
            self._edges /= self._edges[-1]
            # Popular ids lie all over a table, as those of a hash do, not side by side.
            self._place = np.random.default_rng([seed, rows]).permutation(rows)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        if self._edges is None:
            return rng.integers(self._rows, size=count)
        ranks = np.searchsorted(self._edges, rng.random(count), side="right")
        return self._place[np.minimum(ranks, self._rows - 1)]


def rotated(batches: Sequence[Batch]) -> Iterator[Batch]:
    """The batches, over and over."""
    return cycle(batches)


def told(batches: Iterator[Batch], count: int, expect: Callable[[Batch], None] | None) -> Iterator[Batch]:
    """The next ``count`` batches; ``expect`` is told of each but the first a step ahead, as in training."""
    return prefetch((next(batches) for _ in range(count)), torch.device("cpu"), expect=expect)  # they are where they go


def full(batches: Generator[Batch, None, None], size: int) -> Iterator[Batch]:
    """The batches of ``size`` rows; a loader's last one of an epoch may be shorter. Closes ``batches`` at its end."""
    try:
        for batch in batches:
            if batch.size == size:
                yield batch
    finally:
        batches.close()


def rows_touched(batch: Batch) -> list[int]:
    """Different rows of each feature's table that a batch names; synchronises the host."""
    lengths_F = batch.sparse.lengths.reshape(batch.sparse.num_features, -1).sum(dim=1).tolist()
    values = batch.sparse.values[: sum(lengths_F)]
    return [int(torch.unique(ids).numel()) for ids in torch.split(values, lengths_F)]
