"""What a prepared folder holds, as numbers: from its manifest, and from one pass over labels and times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.features.cells import FloatArray
from data.prepared.manifest import FeatureRecord, Manifest
from data.prepared.part import LABEL, TIME
from data.prepared.store import PreparedStore
from erase_rec.config.schema import FeaturesConfig
from erase_rec.config.times import read_time

BINS = 10
STATE_FLOATS: Mapping[str, tuple[int, int]] = {
    "rowwise_adagrad": (1, 0),
    "adagrad": (0, 1),
    "adam": (0, 2),
    "sgd": (0, 0),
}
"""Optimizer state of a table's row in float32: so many, plus so many times its dimension."""


@dataclass(frozen=True)
class TableSize:
    """An embedding table at a chosen dimension.

    Attributes:
        rows: rows, the reserved ones included.
        dim: columns.
        weight_bytes: of its weights.
        state_bytes: of the optimizer's state, by ``optimizer.sparse.kind``.
    """

    rows: int
    dim: int
    weight_bytes: int
    state_bytes: dict[str, int]


@dataclass(frozen=True)
class FeatureFacts:
    """A feature.

    Attributes:
        record: from the manifest.
        missing_share: of its cells in the rows of ``data.train``; None without cells.
        unseen_share: of the values in held-out rows that training never had, a lower bound for ``hash``; None where
            there are none.
        table: None for a number.
    """

    record: FeatureRecord
    missing_share: float | None
    unseen_share: float | None
    table: TableSize | None


@dataclass(frozen=True)
class Bin:
    """Rows that follow each other in the files, or lie in a span of time.

    Attributes:
        name: which ones.
        rows: how many.
        positives: how many of them have label 1.
    """

    name: str
    rows: int
    positives: int

    @property
    def rate(self) -> float | None:
        """Share of positives; None without rows."""
        return self.positives / self.rows if self.rows else None


@dataclass(frozen=True)
class Inspection:
    """All of it.

    Attributes:
        folder: the prepared folder.
        manifest: its manifest.
        dim: chosen dimension of tables whose feature names none.
        features: in model order.
        over: what the bins of ``rates`` divide: ``rows in file order``, or ``time``.
        rates: label rate by split, bin by bin.
    """

    folder: Path
    manifest: Manifest
    dim: int
    features: list[FeatureFacts]
    over: str
    rates: dict[str, list[Bin]]

    def table_bytes(self) -> dict[str, int]:
        """Weights and state of all tables, by the optimizer's kind."""
        tables = [facts.table for facts in self.features if facts.table is not None]
        return {kind: sum(table.weight_bytes + table.state_bytes[kind] for table in tables) for kind in STATE_FLOATS}

    def as_json(self) -> dict[str, Any]:
        """For programs; the manifest itself lies in the folder."""
        return {
            "folder": str(self.folder),
            "fingerprint": self.manifest.fingerprint,
            "splits": {
                name: {"rows": split.rows, "label_rate": split.label_rate, "parts": len(split.parts)}
                for name, split in self.manifest.splits.items()
            },
            "features": [
                {
                    **facts.record.model_dump(),
                    "missing_share": facts.missing_share,
                    "unseen_share": facts.unseen_share,
                    "table": None if facts.table is None else vars(facts.table),
                }
                for facts in self.features
            ],
            "label_rate_over": self.over,
            "label_rates": {
                split: [vars(each) | {"label_rate": each.rate} for each in bins] for split, bins in self.rates.items()
            },
            "bad_rows": self.manifest.bad_rows.model_dump(),
            "row_ids": None if self.manifest.row_ids is None else self.manifest.row_ids.model_dump(),
            "dim": self.dim,
            "table_bytes": self.table_bytes(),
        }


def inspect(folder: Path, dim: int) -> Inspection:
    """Reads the manifest, and every row's label (and time).

    Args:
        folder: a prepared folder.
        dim: dimension of tables whose feature names none.

    Raises:
        DataError: not a whole prepared folder.
    """
    manifest = Manifest.read(folder)
    config = FeaturesConfig.model_validate(manifest.settings["features"])
    dims = [None] * len(config.dense) + [feature.embedding_dim or dim for feature in config.sparse]
    held_out = manifest.splits.get("eval")
    unseen, values = ({}, {}) if held_out is None else (held_out.unseen, held_out.values)
    features = [
        FeatureFacts(
            record=record,
            missing_share=record.missing / record.cells if record.cells else None,
            unseen_share=unseen[record.name] / values[record.name] if values.get(record.name) else None,
            table=None if record.table_rows is None or of_table is None else _table(record.table_rows, of_table),
        )
        for record, of_table in zip(manifest.features, dims, strict=True)
    ]
    stores = {split: PreparedStore(folder, manifest, split) for split in manifest.splits}
    split = manifest.settings["data"]["split"] or {}
    if split.get("by") == "time":
        dates = isinstance(read_time(split["since"]), datetime)
        over, rates = "time", _rates_by_time(list(stores.items()), dates=dates)
    else:
        over, rates = "rows in file order", {name: _rates_by_row(store) for name, store in stores.items()}
    return Inspection(folder, manifest, dim, features, over, rates)


def _table(rows: int, dim: int) -> TableSize:
    state = {kind: 4 * rows * (each + of_dim * dim) for kind, (each, of_dim) in STATE_FLOATS.items()}
    return TableSize(rows, dim, 4 * rows * dim, state)


def _rates_by_row(store: PreparedStore) -> list[Bin]:
    """In ``BINS`` parts of equally many rows."""
    total = int(store.block_rows.sum())
    edges = np.array([total * number // BINS for number in range(BINS + 1)])
    positives, start = np.zeros(BINS, dtype=np.int64), 0
    for label in _columns(store, LABEL):
        inside = np.clip(edges - start, 0, len(label))
        sums = np.concatenate([[0], np.cumsum(label, dtype=np.int64)])
        positives += np.diff(sums[inside])
        start += len(label)
    rows = np.diff(edges)
    return [
        Bin(f"{first + 1:,} to {first + count:,}", count, hits)
        for first, count, hits in zip(edges.tolist(), rows.tolist(), positives.tolist(), strict=False)
        if count
    ]


def _rates_by_time(stores: list[tuple[str, PreparedStore]], *, dates: bool) -> dict[str, list[Bin]]:
    """In ``BINS`` spans of equal length, those of all splits together."""
    first, last = np.inf, -np.inf
    for _, store in stores:
        for times in _columns(store, TIME):
            first, last = min(first, float(times.min())), max(last, float(times.max()))
    edges = np.linspace(first, last, BINS + 1)
    rates = {}
    for name, store in stores:
        rows, positives = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
        for times, label in zip(_columns(store, TIME), _columns(store, LABEL), strict=True):
            bins = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, BINS - 1)
            rows += np.bincount(bins, minlength=BINS)
            positives += np.bincount(bins[label == 1], minlength=BINS)
        names = [f"from {_time(edge, dates=dates)}" for edge in edges[:-1].tolist()]
        rates[name] = [Bin(*each) for each in zip(names, rows.tolist(), positives.tolist(), strict=True)]
    return rates


def _time(value: float, *, dates: bool) -> str:
    # Not datetime, which ends with the year 9999: a column of the wrong unit goes past it.
    return str(np.datetime64(math.floor(value), "s")).replace("T", " ") if dates else f"{value:g}"


def _columns(store: PreparedStore, name: str) -> Iterator[npt.NDArray[np.uint8] | FloatArray]:
    for block in range(len(store.block_rows)):
        yield store.batch(block)[2].column(name).to_numpy()
