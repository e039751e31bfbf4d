"""Rows on which an export is compared with the trainer's model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from data.bad_rows import BadRows
from data.block import Bags, BlockStore, EncodedBlock, RowArray, Rows
from data.features.fitted import Features
from data.prepared.store import open_prepared
from data.reading import Reading, open_eval, open_train
from data.sources.source import Source, Split
from erase_rec.config.schema import Config, SparseFeatureConfig
from erase_rec.errors import UserError

_LONGEST_BAG = 4


def rows_to_check(config: Config, features: Features, count: int, seed: int = 0) -> tuple[list[EncodedBlock], str]:
    """``count`` rows: held-out ones of the run, else those it trained on, and where these are too few, made-up ones.

    Returns:
        The rows, and what they are, for people.
    """
    try:
        blocks, kind = _rows_of_run(config, features, count)
        why = ""
    except UserError as error:
        blocks, kind, why = [], "", f" (the run's cannot be read: {str(error).splitlines()[0].partition(';')[0]})"
    found = sum(block.num_rows for block in blocks)
    missing = count - found
    if not missing:
        return blocks, f"{found:,} {kind} rows"
    made = f"{missing:,} generated rows{why}"
    blocks.append(generated(features, missing, seed))
    return blocks, f"{found:,} {kind} and {made}" if found else made


def generated(features: Features, count: int, seed: int) -> EncodedBlock:
    """Rows with ids from all over their tables, bags of 0 to 4 of them, and dense values around 0."""
    rng = np.random.default_rng(seed)
    ids: list[RowArray] = []
    bags: dict[int, Bags] = {}
    for position, feature in enumerate(features.config.sparse):
        table_rows = features.encodings[position].table_rows
        if feature.multi_valued:
            bags[position] = _generated_bags(rng, feature, table_rows, count)
        else:
            ids.append(rng.integers(0, table_rows, count))
    return EncodedBlock(
        dense=[rng.normal(size=count).astype(np.float32) for _ in features.config.dense],
        ids=ids,
        bags=bags,
        label=np.zeros(count, dtype=np.uint8),
        rows=Rows("generated", "row", np.arange(1, count + 1)),
    )


def _generated_bags(rng: np.random.Generator, feature: SparseFeatureConfig, table_rows: int, count: int) -> Bags:
    lengths = rng.integers(0, _LONGEST_BAG + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    weights = None if feature.weights is None else rng.random(offsets[-1]).astype(np.float32)
    return Bags(rng.integers(0, table_rows, offsets[-1]), offsets, weights)


def _rows_of_run(config: Config, features: Features, count: int) -> tuple[list[EncodedBlock], str]:
    """The first rows, no more than are there.

    Raises:
        UserError: they cannot be read (any more).
    """
    if config.data.prepared is not None:
        prepared = open_prepared(Path(config.data.prepared), config)
        if prepared.eval is not None and prepared.eval.block_rows.sum():
            return _of_store(prepared.eval, count), "held-out"
        return _of_store(prepared.train, count), "training"
    evaluation = open_eval(config)
    if evaluation is not None:
        return _of_source(config, features, evaluation, "eval", count), "held-out"
    return _of_source(config, features, open_train(config), "train", count), "training"


def _of_store(store: BlockStore, count: int) -> list[EncodedBlock]:
    blocks: list[EncodedBlock] = []
    for number in range(len(store.block_rows)):
        if count <= 0:
            break
        blocks.append(first_rows(store.read(number), count))
        count -= blocks[-1].num_rows
    return blocks


def _of_source(config: Config, features: Features, source: Source, split: Split, count: int) -> list[EncodedBlock]:
    reading = Reading.of(config, source, split)
    blocks: list[EncodedBlock] = []
    chunks = source.chunks()
    with closing(chunks):  # type: ignore[type-var]  # a generator
        for chunk in chunks:
            read = reading.read(chunk, BadRows("skip"))
            if read is not None:
                blocks.append(first_rows(features.encode(read.rows), count))
                count -= blocks[-1].num_rows
            if count <= 0:
                break
    return blocks


def first_rows(block: EncodedBlock, count: int) -> EncodedBlock:
    """At most ``count`` rows of a block."""
    bags = {
        position: Bags(
            bag.values[: bag.offsets[: count + 1][-1]],
            bag.offsets[: count + 1],
            None if bag.weights is None else bag.weights[: bag.offsets[: count + 1][-1]],
        )
        for position, bag in block.bags.items()
    }
    return EncodedBlock(
        dense=[column[:count] for column in block.dense],
        ids=[column[:count] for column in block.ids],
        bags=bags,
        label=block.label[:count],
        rows=Rows(block.rows.file, block.rows.unit, block.rows.numbers[:count]),
    )
