"""Part files: what is written comes back, from the mapped file, and readable by plain Arrow."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data.block import Bags, EncodedBlock, Rows
from data.prepared.part import part_writer, read_block
from erase_rec.config.schema import FeaturesConfig

FEATURES = FeaturesConfig.model_validate(
    {
        "dense": ["label", "I2"],
        "sparse": [
            {"name": "C1", "num_embeddings": 9},
            {"name": "tags", "num_embeddings": 9, "multi_valued": True, "weights": "w"},
            {"name": "a/b", "num_embeddings": 9},
            {"name": "bag", "num_embeddings": 9, "multi_valued": True},
        ],
    }
)


def make_block(rows: int, first: int, seed: int = 0) -> EncodedBlock:
    rng = np.random.default_rng(seed)

    def bags(weighted: bool) -> Bags:
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, rows))])
        count = int(offsets[-1])
        weights = rng.random(count, dtype=np.float32) if weighted else None
        return Bags(rng.integers(0, 11, count).astype(np.int32), offsets, weights)

    return EncodedBlock(
        dense=[rng.random(rows, dtype=np.float32) for _ in range(2)],
        ids=[rng.integers(0, 11, rows).astype(np.int32) for _ in range(2)],
        bags={1: bags(True), 3: bags(False)},
        label=rng.integers(0, 2, rows).astype(np.uint8),
        rows=Rows("log.csv", "line", first + np.cumsum(rng.integers(1, 3, rows))),
    )


def assert_same(found: EncodedBlock, expected: EncodedBlock) -> None:
    for one, other in zip((*found.dense, *found.ids), (*expected.dense, *expected.ids), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert found.bags.keys() == expected.bags.keys()
    for position, bags in expected.bags.items():
        np.testing.assert_array_equal(found.bags[position].values, bags.values)
        np.testing.assert_array_equal(found.bags[position].offsets, bags.offsets)
        weights = found.bags[position].weights
        assert (weights is None) == (bags.weights is None)
        if weights is not None and bags.weights is not None:
            np.testing.assert_array_equal(weights, bags.weights)
    np.testing.assert_array_equal(found.label, expected.label)
    assert (found.rows.file, found.rows.unit) == (expected.rows.file, expected.rows.unit)
    np.testing.assert_array_equal(found.rows.numbers, expected.rows.numbers)


def test_blocks_come_back_from_the_mapped_file(tmp_path: Path) -> None:
    blocks = [make_block(50, 0), make_block(1, 6_000_000_000, seed=1), make_block(30, 6_000_000_007, seed=2)]
    path = tmp_path / "part.arrow"
    with part_writer(path, FEATURES) as writer:
        for position, block in enumerate(blocks):
            writer.write(block, file_index=position)
        assert not path.exists(), "a part is whole or not there"
    info = writer.info
    assert list(tmp_path.iterdir()) == [path]
    assert info.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert info.num_bytes == path.stat().st_size
    assert info.block_rows == [50, 1, 30]
    assert info.block_files == [0, 1, 2]
    assert info.block_positives == [int(block.label.sum()) for block in blocks]
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    allocated = pa.total_allocated_bytes()
    for position, block in enumerate(blocks):
        assert_same(
            read_block(reader.get_batch(position), FEATURES, "log.csv", "line", info.block_firsts[position]), block
        )
    assert pa.total_allocated_bytes() == allocated, "nothing is copied"


def test_unseen_values_are_counted(tmp_path: Path) -> None:
    block = make_block(200, 0)
    with part_writer(tmp_path / "part.arrow", FEATURES) as writer:
        writer.write(block, 0)
        writer.write(block, 0)
    columns = [block.ids[0], block.bags[1].values, block.ids[1], block.bags[3].values]
    assert writer.info.unseen == [2 * int((column == 1).sum()) for column in columns]
    assert writer.info.values == [2 * len(column) for column in columns]


def test_columns_are_named_after_the_features(tmp_path: Path) -> None:
    """A feature may be called like a column of the format."""
    block, time = make_block(5, 0), np.arange(5.0)
    with part_writer(tmp_path / "part.arrow", FEATURES) as writer:
        writer.write(block, 0, time)
    table = pa.ipc.open_file(str(tmp_path / "part.arrow")).read_all()
    assert table.schema.names == [
        *("dense/label", "dense/I2", "sparse/C1", "sparse/tags", "weights/tags", "sparse/a/b", "sparse/bag"),
        *("label", "number", "time"),
    ]
    assert not any(field.nullable for field in table.schema)
    assert table["time"].to_pylist() == time.tolist()


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "part.arrow"

    def fail() -> None:
        with part_writer(path, FEATURES) as writer:
            writer.write(make_block(5, 0), 0)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []
