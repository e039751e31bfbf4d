"""The loader: every row once an epoch, each epoch in its own order, the same batches with any number of threads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading

import numpy as np
import pytest
import torch

from data.loader import Loader, gather
from data.shuffle import epoch_order, held_out
from data.table import Bags, EncodedTable, Origin
from erase_rec.batch import Batch

NUM_DENSE = 3


def make_table(num_rows: int, *, bags: bool = False, weights: bool = False) -> EncodedTable:
    """Features 0 and 2 single-valued, feature 1 bags of 0 to 3 values when asked for, else single-valued."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(0, 4, num_rows)
    total = int(lengths.sum())
    column = Bags(
        values=rng.integers(0, 50, total).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        weights=rng.random(total, dtype=np.float32) if weights else None,
    )
    return EncodedTable(
        dense=rng.random((num_rows, NUM_DENSE), dtype=np.float32),
        ids=rng.integers(0, 50, (num_rows, 2 if bags else 3)).astype(np.int32),
        bags={1: column} if bags else {},
        label=rng.integers(0, 2, num_rows).astype(np.uint8),
        origins=(Origin("a.csv", 2, "line"), Origin("b.parquet", 1, "row")),
        origin_starts=np.array([0, num_rows // 2]),
        num_missing=np.zeros(NUM_DENSE + 3, dtype=np.int64),
        num_clipped=np.zeros(NUM_DENSE, dtype=np.int64),
    )


def make_loader(
    table: EncodedTable,
    batch: int = 128,
    *,
    seed: int | None = 1,
    workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    equal: bool = False,
) -> Loader:
    return Loader(
        table,
        np.arange(table.num_rows),
        local_batch_size=batch,
        shuffle_seed=seed,
        workers=workers,
        rank=rank,
        world_size=ranks,
        equal=equal,
    )


def row_ids(loader: Loader, epoch: int = 0, start_step: int = 0) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in loader.batches(epoch, start_step)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("num_rows", [1, 256, 257, 1000, 1025])
@pytest.mark.parametrize("batch", [1, 128, 2000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 1])
def test_every_row_comes_once_an_epoch_over_all_ranks(num_rows: int, batch: int, ranks: int, seed: int | None) -> None:
    table = make_table(num_rows)
    loaders = [make_loader(table, batch, seed=seed, rank=rank, ranks=ranks) for rank in range(ranks)]
    epochs = [row_ids(loader) for loader in loaders]
    assert sorted(row for epoch in epochs for rows in epoch for row in rows) == list(range(num_rows))
    assert {len(epoch) for epoch in epochs} == {loaders[0].steps_per_epoch()} == {math.ceil(num_rows / batch / ranks)}
    for sizes in zip(*([len(rows) for rows in epoch] for epoch in epochs), strict=True):
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1, "the remainder is cut evenly"


@pytest.mark.parametrize("num_rows", [3, 256, 257, 1000, 1025, 1026])
@pytest.mark.parametrize("batch", [1, 128, 2000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equal_shares_drop_fewer_rows_than_ranks(num_rows: int, batch: int, ranks: int) -> None:
    table = make_table(num_rows)
    loaders = [make_loader(table, batch, rank=rank, ranks=ranks, equal=True) for rank in range(ranks)]
    epochs = [row_ids(loader) for loader in loaders]
    seen = [row for epoch in epochs for rows in epoch for row in rows]
    dropped = loaders[0].dropped_rows
    assert dropped == num_rows - len(seen) < ranks
    assert len(set(seen)) == len(seen)
    assert {len(epoch) for epoch in epochs} == {loaders[0].steps_per_epoch()}
    for sizes in zip(*([len(rows) for rows in epoch] for epoch in epochs), strict=True):
        assert len(set(sizes)) == 1
        assert 0 < sizes[0] <= batch
    order = flat(row_ids(make_loader(table, batch * ranks)))
    assert set(order) - set(seen) == set(order[num_rows - dropped :]), "the last rows of the epoch's order"


def test_ranks_cut_the_batches_of_one_process() -> None:
    """The global batch of every step is the same rows in the same order whatever the number of ranks."""
    table = make_table(1001)
    whole = row_ids(make_loader(table, 256))
    halves = [row_ids(make_loader(table, 128, rank=rank, ranks=2)) for rank in range(2)]
    assert [first + second for first, second in zip(*halves, strict=True)] == whole


def test_orders_differ_between_epochs_and_seeds_and_repeat() -> None:
    table = make_table(200)
    orders = [
        flat(row_ids(make_loader(table, 32, seed=seed), epoch)) for seed, epoch in [(1, 0), (1, 1), (1, 2), (2, 0)]
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert flat(row_ids(make_loader(table, 32, seed=1), 1)) == orders[1]


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    """A resumed run continues an order drawn by another process, perhaps after an upgrade."""
    assert epoch_order(8, seed=1, epoch=0).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]


def test_without_a_seed_rows_come_in_file_order() -> None:
    assert flat(row_ids(make_loader(make_table(10), 3, seed=None), 5)) == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_from_any_step(workers: int) -> None:
    loader = make_loader(make_table(1000), 64, workers=workers)
    whole = row_ids(loader, 3)
    for start in (1, 7, 15, 16):
        assert row_ids(loader, 3, start) == whole[start:]


@pytest.mark.parametrize("workers", [1, 2, 3, 20])
def test_threads_change_nothing(workers: int) -> None:
    """With more threads than batches too."""
    table = make_table(1000, bags=True, weights=True)
    inline, threaded = (list(make_loader(table, 100, workers=count).batches(0)) for count in (0, workers))
    assert len(inline) == len(threaded) == 10
    for one, other in zip(inline, threaded, strict=True):
        assert_equal(one, other)


def assert_equal(one: Batch, other: Batch) -> None:
    assert one.sparse.weights is not None
    assert other.sparse.weights is not None
    for name in ("dense", "label", "row_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name in ("values", "lengths", "weights"):
        assert torch.equal(getattr(one.sparse, name), getattr(other.sparse, name))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_an_abandoned_epoch_leaves_no_threads() -> None:
    batches = make_loader(make_table(1000), 10, workers=3).batches(0)
    next(batches)
    assert loader_threads()
    batches.close()  # type: ignore[attr-defined]
    assert not loader_threads()


def test_an_error_in_a_thread_surfaces_and_ends_the_threads() -> None:
    table = make_table(100)
    damaged = dataclasses.replace(table, dense=table.dense[:3])
    batches = make_loader(damaged, 1, seed=None, workers=2).batches(0)
    assert [next(batches).row_ids.item() for _ in range(3)] == [0, 1, 2], "the batches before the error come first"
    with pytest.raises(IndexError):
        next(batches)
    assert not loader_threads()


def test_single_valued_rows_are_gathered_feature_by_feature() -> None:
    table = make_table(50)
    batch = gather(table, np.array([7, 3, 3]))
    assert batch.sparse.single_valued
    assert batch.sparse.values.view(3, 3).tolist() == table.ids[[7, 3, 3]].T.tolist()
    assert batch.sparse.lengths.tolist() == [1] * 9
    assert batch.sparse.weights is None
    np.testing.assert_array_equal(batch.dense.numpy(), table.dense[[7, 3, 3]])
    assert batch.label.tolist() == table.label[[7, 3, 3]].tolist()
    assert (batch.sparse.values.dtype, batch.sparse.lengths.dtype) == (torch.int64, torch.int32)
    assert (batch.dense.dtype, batch.label.dtype, batch.row_ids.dtype) == (torch.float32, torch.float32, torch.int64)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_gathered_feature_by_feature(weighted: bool) -> None:
    """Against a loop over rows; feature 1 is the bags, between two single-valued features."""
    table = make_table(50, bags=True, weights=weighted)
    rows = [9, 0, 41, 9]
    batch = gather(table, np.array(rows))
    bags = table.bags[1]
    values, lengths, weights = [], [], []
    for column in (0, None, 1):
        for row in rows:
            if column is None:
                part = slice(bags.offsets[row], bags.offsets[row + 1])
                ids = bags.values[part].tolist()
                weights += bags.weights[part].tolist() if bags.weights is not None else [1.0] * len(ids)
            else:
                ids = [int(table.ids[row, column])]
                weights.append(1.0)
            values += ids
            lengths.append(len(ids))
    assert not batch.sparse.single_valued
    assert batch.sparse.values.tolist() == values
    assert batch.sparse.lengths.tolist() == lengths
    assert (batch.sparse.weights is None) == (not weighted)
    if batch.sparse.weights is not None:
        assert batch.sparse.weights.tolist() == weights


@pytest.mark.parametrize("bags", [False, True])
def test_a_batch_without_rows_has_the_right_shapes(bags: bool) -> None:
    batch = gather(make_table(50, bags=bags), np.array([], dtype=np.int64))
    assert batch.size == 0
    assert batch.dense.shape == (0, NUM_DENSE)
    assert batch.sparse.values.shape == batch.sparse.lengths.shape == (0,)
    assert batch.sparse.num_features == 3


def test_a_loader_without_rows_has_no_batches() -> None:
    loader = make_loader(make_table(0))
    assert loader.steps_per_epoch() == loader.num_rows == 0
    assert list(loader.batches(0)) == []
    assert math.isnan(loader.base_rate)


def test_base_rate_and_size_are_those_of_all_ranks() -> None:
    table = make_table(1000)
    for rank in range(2):
        loader = make_loader(table, rank=rank, ranks=2)
        assert loader.num_rows == 1000
        assert loader.base_rate == pytest.approx(table.label.mean())


def test_rows_are_located_in_their_files() -> None:
    loader = make_loader(make_table(10))
    assert loader.locate(torch.tensor([0, 4, 5, 9])) == ["a.csv:2", "a.csv:6", "b.parquet row 1", "b.parquet row 5"]


def test_held_out_rows_depend_on_seed_and_row_only() -> None:
    whole = held_out(0, 100_000, seed=1, fraction=0.1)
    # The deviation of 100,000 draws at 0.1 is 0.00095; four of them.
    assert whole.mean() == pytest.approx(0.1, abs=0.004)
    pieces = [held_out(start, 1000, seed=1, fraction=0.1) for start in range(0, 100_000, 1000)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    other = held_out(0, 100_000, seed=2, fraction=0.1)
    assert (whole & other).mean() == pytest.approx(0.01, abs=0.002), "seeds are independent"
    assert (held_out(0, 100_000, seed=1, fraction=0.2) >= whole).all(), "a larger fraction holds out more of the same"
