"""What tests of prepared rows share: a silent report, and the comparison with rows that were never prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.dataset import Datasets, build_datasets
from data.loader import Loader
from data.prepared.manifest import Manifest
from data.prepared.prepare import Options, prepare
from erase_rec.config.schema import Config

MEMORY_BYTES = 8 << 30
"""The bound counts the main process, here one that has run many tests."""


class Silent:
    """A report that keeps what it is told, and stops the preparation at a given event."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.lines: list[str] = []
        self.events = 0
        self._stop_at = stop_at

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start(self, name: str, total: int) -> None:
        self._count()

    def advance(self, amount: int, rows: int) -> None:
        self._count()

    def _count(self) -> None:
        self.events += 1
        if self.events == self._stop_at:
            raise KeyboardInterrupt


def run(
    config: Config, folder: Path, *, workers: int = 1, force: bool = False, report: Silent | None = None
) -> Manifest:
    """Prepares."""
    return prepare(config, folder, Options(workers, MEMORY_BYTES, force=force), report or Silent())


def reading_from(config: Config, folder: Path) -> Config:
    """The configuration with prepared rows and without the files."""
    data = config.data.model_copy(update={"prepared": str(folder), "train": (), "eval": ()})
    return config.model_copy(update={"data": data})


def assert_same_rows(config: Config, folder: Path) -> Datasets:
    """Training from the folder is training from the files: batches, order, places, counts, fingerprint."""
    found, expected = build_datasets(reading_from(config, folder)), build_datasets(config)
    _assert_same_batches(found.train, expected.train, 2)
    _assert_same_batches(found.eval, expected.eval, 1)
    assert found.fingerprint == expected.fingerprint
    assert found.missing_share == expected.missing_share
    assert found.num_clipped == expected.num_clipped
    assert found.unseen_share_of == pytest.approx(expected.unseen_share_of, nan_ok=True)
    assert found.table_rows == expected.table_rows
    assert (found.bad_rows.count, found.bad_rows.reasons) == (expected.bad_rows.count, expected.bad_rows.reasons)
    return found


def _assert_same_batches(found: Loader | None, expected: Loader | None, epochs: int) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.num_rows == expected.num_rows
    for epoch in range(epochs):
        for one, other in zip(found.batches(epoch), expected.batches(epoch), strict=True):
            assert torch.equal(one.dense, other.dense)
            assert torch.equal(one.label, other.label)
            assert torch.equal(one.row_ids, other.row_ids)
            assert torch.equal(one.sparse.values, other.sparse.values)
            assert torch.equal(one.sparse.lengths, other.sparse.lengths)
            weights = (one.sparse.weights, other.sparse.weights)
            assert weights == (None, None) or torch.equal(*weights)  # type: ignore[arg-type]
            assert found.locate(one.row_ids) == expected.locate(other.row_ids)
