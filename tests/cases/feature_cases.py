"""Blocks, configurations and shortcuts that the tests of the features share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data.bad_rows import BadRows
from data.block import EncodedBlock
from data.features.fit import FeaturesFit, merge_fits
from data.features.fitted import Features
from data.features.raw import RawRows
from data.features.read import read_rows
from data.sources.source import Block
from erase_rec.config.schema import FeaturesConfig, LabelConfig

MISSING, UNSEEN = 0, 1


def features_config(*sparse: dict[str, Any], dense: tuple[dict[str, Any], ...] = ()) -> FeaturesConfig:
    """Features from what a YAML file would say."""
    return FeaturesConfig.model_validate({"sparse": sparse, "dense": dense})


def block(first_number: int = 2, file_index: int = 0, **columns: Any) -> Block:
    """Rows of a text file, from its first row on; labels are 0 unless given."""
    rows = max(map(len, columns.values()))
    table = pa.table({"label": ["0"] * rows} | columns)
    return Block(table, "log.csv", file_index, "line", np.arange(rows), first_number)


def read(
    config: FeaturesConfig,
    one: Block,
    *,
    label: dict[str, Any] | None = None,
    bad: BadRows | None = None,
    extra: Sequence[str] = (),
) -> RawRows:
    """Raw rows; bad ones are refused unless ``bad`` says otherwise."""
    return read_rows(config, "label", LabelConfig.model_validate(label or {}), one, bad or BadRows(), extra)


def fit(config: FeaturesConfig, *blocks: Block) -> Features:
    """Features fitted on blocks, each a chunk."""
    fitting = FeaturesFit(config)
    for one in blocks:
        fitting.add(read(config, one))
    return merge_fits(config, [fitting])


def encode(features: Features, one: Block) -> EncodedBlock:
    """Encoded rows of a block."""
    return features.encode(read(features.config, one))


def ids(encoded: EncodedBlock, position: int = 0) -> list[int]:
    """Table rows of a single-valued feature."""
    found: list[int] = encoded.ids[position].tolist()
    return found


def assert_same_block(found: EncodedBlock, expected: EncodedBlock) -> None:
    """Equal bit for bit, types included."""
    pairs = list(zip(found.dense, expected.dense, strict=True)) + list(zip(found.ids, expected.ids, strict=True))
    assert found.bags.keys() == expected.bags.keys()
    for position, bags in expected.bags.items():
        other = found.bags[position]
        pairs += [(other.values, bags.values), (other.offsets, bags.offsets)]
        assert (other.weights is None) == (bags.weights is None)
        if bags.weights is not None:
            pairs.append((other.weights, bags.weights))
    pairs += [(found.label, expected.label), (found.rows.numbers, expected.rows.numbers)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (found.rows.file, found.rows.unit) == (expected.rows.file, expected.rows.unit)
