"""The loader: every row once an epoch, each epoch in its own order, the same batches with any number of threads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.ahead import in_order
from data.block import Bags, EncodedBlock, Rows
from data.gather import Picked, gather, join
from data.loader import THREAD_NAME, Loader
from data.shuffle import held_out, windows
from data.store import MemoryStore
from erase_rec.batch import Batch

NUM_DENSE = 3


def make_block(num_rows: int, *, bags: bool = False, weights: bool = False, first: int = 0) -> EncodedBlock:
    """Features 0 and 2 single-valued, feature 1 bags of 0 to 3 values when asked for, else single-valued."""
    rng = np.random.default_rng(7 + first)
    lengths = rng.integers(0, 4, num_rows)
    total = int(lengths.sum())
    column = Bags(
        values=rng.integers(0, 50, total).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        weights=rng.random(total, dtype=np.float32) if weights else None,
    )
    return EncodedBlock(
        dense=[rng.random(num_rows, dtype=np.float32) for _ in range(NUM_DENSE)],
        ids=[rng.integers(0, 50, num_rows).astype(np.int32) for _ in range(2 if bags else 3)],
        bags={1: column} if bags else {},
        label=rng.integers(0, 2, num_rows).astype(np.uint8),
        rows=Rows(f"{first}.csv", "line", np.arange(num_rows) + 2),
    )


def make_store(*block_rows: int, bags: bool = False, weights: bool = False) -> MemoryStore:
    starts = itertools.accumulate(block_rows, initial=0)
    return MemoryStore([make_block(n, bags=bags, weights=weights, first=at) for n, at in zip(block_rows, starts)])  # noqa: B905


def make_loader(
    store: MemoryStore,
    batch: int = 128,
    *,
    seed: int | None = 1,
    window: int = 200,
    workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    equal: bool = False,
) -> Loader:
    return Loader(
        store,
        local_batch_size=batch,
        shuffle_seed=seed,
        window_rows=window,
        workers=workers,
        rank=rank,
        world_size=ranks,
        equal=equal,
    )


def row_ids(loader: Loader, epoch: int = 0, start_row: int = 0) -> list[list[int]]:
    return [batch.row_ids.tolist() for batch in loader.batches(epoch, start_row)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


@settings(deadline=None, max_examples=200)
@given(
    blocks=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    window=st.integers(1, 150),
    batch=st.integers(1, 70),
    stages=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    seed=st.none() | st.integers(0, 9),
    equal=st.booleans(),
    workers=st.sampled_from([0, 0, 2]),
)
def test_every_row_comes_once_an_epoch_however_it_is_interrupted(
    blocks: list[int],
    window: int,
    batch: int,
    stages: list[tuple[int, int]],
    seed: int | None,
    equal: bool,
    workers: int,
) -> None:
    """Each stage goes on where the one before stopped, on another number of ranks; the last to the end."""
    store, total = make_store(*blocks), sum(blocks)
    whole = flat(row_ids(make_loader(store, total, seed=seed, window=window), 5))
    row, dropped, seen = 0, 0, []
    for stage, (ranks, count) in enumerate(stages):
        loaders = [
            make_loader(store, batch, seed=seed, window=window, workers=workers, rank=rank, ranks=ranks, equal=equal)
            for rank in range(ranks)
        ]
        iterators = [loader.batches(5, row) for loader in loaders]
        steps = loaders[0].steps_left(row)
        if stage == len(stages) - 1:
            dropped = loaders[0].dropped_rows(row)
        else:
            steps = min(steps, count)
        for _ in range(steps):
            taken = [next(each).row_ids.tolist() for each in iterators]
            sizes = [len(each) for each in taken]
            assert max(sizes) <= batch
            assert max(sizes) - min(sizes) <= (0 if equal else 1), "what is left is cut evenly"
            seen += flat(taken)
            row += sum(sizes)
        if stage == len(stages) - 1:
            assert all(next(each, None) is None for each in iterators)
        for each in iterators:
            each.close()  # type: ignore[attr-defined]
    assert dropped < stages[-1][0]
    assert seen == whole[: total - dropped], "the order of one process that was never interrupted"
    assert sorted(whole) == list(range(total))


def test_orders_differ_between_epochs_and_seeds_and_repeat() -> None:
    store = make_store(60, 60, 80)
    orders = [
        flat(row_ids(make_loader(store, 32, seed=seed, window=window), epoch))
        for seed, epoch, window in [(1, 0, 200), (1, 1, 200), (1, 2, 200), (2, 0, 200), (1, 0, 60), (1, 1, 60)]
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert flat(row_ids(make_loader(store, 32), 1)) == orders[1]


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    """A resumed run continues an order drawn by another process, perhaps after an upgrade."""
    found = list(windows(np.array([3, 3, 2, 4, 5]), 6, seed=1, epoch=0))
    assert [window.blocks.tolist() for window in found] == [[4, 0], [1, 2, 3]]
    orders = [window.order() for window in found]
    assert [None if order is None else order.tolist() for order in orders] == [
        [5, 2, 6, 7, 4, 0, 1, 3],
        [5, 8, 1, 3, 7, 2, 0, 6, 4],
    ]


def test_windows_are_whole_blocks_with_enough_rows() -> None:
    rows = np.random.default_rng(0).integers(1, 40, 100)
    found = list(windows(rows, 130, seed=3, epoch=2))
    assert sorted(np.concatenate([window.blocks for window in found]).tolist()) == list(range(100))
    assert [window.start for window in found] == [0, *(window.stop for window in found[:-1])]
    for window in found:
        assert window.stop - window.start == rows[window.blocks].sum()
        assert 130 <= window.stop - window.start < 130 + 40 or window is found[-1]
    blocks = np.concatenate([window.blocks for window in found])
    assert abs(np.corrcoef(blocks, np.arange(100))[0, 1]) < 0.3, "blocks come in random order"


def test_a_store_that_fits_a_window_is_permuted_as_a_whole() -> None:
    """Row i is anywhere with the same chance: over many seeds its place is uniform (chi-square, 9 bins)."""
    store = make_store(10, 10, 10)
    places = [flat(row_ids(make_loader(store, 30, seed=seed), 0)).index(7) for seed in range(900)]
    counts = np.bincount(np.array(places) * 9 // 30, minlength=9)
    expected = np.bincount(np.arange(30) * 9 // 30, minlength=9) * 30
    assert ((counts - expected) ** 2 / expected).sum() < 26.1, "the 0.999 quantile with 8 degrees of freedom"


def test_without_a_seed_rows_come_in_file_order() -> None:
    assert flat(row_ids(make_loader(make_store(4, 1, 5), 3, seed=None), 5)) == list(range(10))


def test_ranks_cut_the_batches_of_one_process() -> None:
    """The global batch of every step is the same rows in the same order whatever the number of ranks."""
    store = make_store(300, 1, 700)
    whole = row_ids(make_loader(store, 256))
    halves = [row_ids(make_loader(store, 128, rank=rank, ranks=2)) for rank in range(2)]
    assert [first + second for first, second in zip(*halves, strict=True)] == whole


def test_fewer_rows_than_ranks_leave_ranks_an_empty_batch() -> None:
    store = make_store(1, bags=True, weights=True)
    batches = [list(make_loader(store, 10, rank=rank, ranks=3).batches(0)) for rank in range(3)]
    assert [[batch.size for batch in each] for each in batches] == [[0], [0], [1]]
    assert batches[0][0].dense.shape == (0, NUM_DENSE)
    assert batches[0][0].sparse.lengths.shape == batches[0][0].sparse.values.shape == (0,)
    assert batches[0][0].sparse.num_features == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_endless_batches_go_on_with_the_next_epoch(workers: int) -> None:
    loader = make_loader(make_store(50, 60), 32, window=40, workers=workers, ranks=2, rank=1, equal=True)
    expected = [each for epoch in (3, 4, 5) for each in row_ids(loader, epoch, 64 if epoch == 3 else 0)]
    endless = loader.batches(3, 64, endless=True)
    assert [next(endless).row_ids.tolist() for _ in expected] == expected
    endless.close()  # type: ignore[attr-defined]


def test_a_loader_without_rows_has_no_batches() -> None:
    loader = make_loader(make_store())
    assert loader.steps_left() == loader.num_rows == loader.dropped_rows() == 0
    assert list(loader.batches(0)) == []
    assert math.isnan(loader.base_rate)


def test_base_rate_and_size_are_those_of_all_ranks() -> None:
    store = make_store(400, 600)
    labels = np.concatenate([store.read(block).label for block in range(2)])
    for rank in range(2):
        loader = make_loader(store, rank=rank, ranks=2)
        assert loader.num_rows == 1000
        assert loader.base_rate == pytest.approx(labels.mean())


def test_rows_are_located_in_their_files() -> None:
    loader = make_loader(make_store(5, 5))
    assert loader.locate(torch.tensor([9, 0, 4, 5])) == ["5.csv:6", "0.csv:2", "0.csv:6", "5.csv:2"]
    assert loader.locate(torch.tensor([], dtype=torch.int64)) == []


def assert_equal(one: Batch, other: Batch) -> None:
    for name in ("dense", "label", "row_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert one.sparse.single_valued == other.sparse.single_valued
    assert torch.equal(one.sparse.values, other.sparse.values)
    assert torch.equal(one.sparse.lengths, other.sparse.lengths)
    if one.sparse.weights is None or other.sparse.weights is None:
        assert one.sparse.weights is other.sparse.weights
    else:
        assert torch.equal(one.sparse.weights, other.sparse.weights)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


class CountingStore(MemoryStore):
    """Counts the blocks read."""

    reads = 0

    def read(self, block: int) -> EncodedBlock:
        self.reads += 1
        return super().read(block)


class DamagedStore(MemoryStore):
    """Its third block cannot be read."""

    def read(self, block: int) -> EncodedBlock:
        if block == 2:
            raise OSError("planted")
        return super().read(block)


@pytest.mark.parametrize("workers", [1, 2, 3, 20])
@pytest.mark.parametrize("bags", [False, True])
def test_threads_change_nothing(workers: int, bags: bool) -> None:
    """With more threads than windows too; batches are larger and smaller than windows."""
    store = make_store(100, 37, 1, 263, 400, 199, bags=bags, weights=bags)
    for batch in (90, 450):
        inline, threaded = (list(make_loader(store, batch, workers=count).batches(0)) for count in (0, workers))
        assert len(inline) == len(threaded) == math.ceil(1000 / batch)
        for one, other in zip(inline, threaded, strict=True):
            assert_equal(one, other)


def test_so_many_windows_are_made_ahead() -> None:
    """A block is a window here; while the first is in use, there are those of the workers besides, and a spare one."""
    store = CountingStore([make_block(10, first=10 * number) for number in range(30)])
    for workers, ahead in ((0, 0), (1, 2), (3, 4)):
        store.reads = 0
        batches = make_loader(store, 10, window=10, workers=workers).batches(0)
        for used in range(1, 10):
            next(batches)
            assert store.reads <= used + ahead
        batches.close()  # type: ignore[attr-defined]
        assert store.reads <= 9 + ahead


def test_a_window_s_blocks_are_read_in_file_order() -> None:
    """Whatever the order in which their rows come: a row group is read from its start."""
    read: list[int] = []

    class NotingStore(MemoryStore):
        def read(self, block: int) -> EncodedBlock:
            read.append(block)
            return super().read(block)

    store = NotingStore([make_block(10, first=10 * number) for number in range(12)])
    list(make_loader(store, 10, window=40).batches(0))
    assert read != sorted(read)
    assert [sorted(read[start : start + 4]) for start in range(0, 12, 4)] == [
        read[start : start + 4] for start in range(0, 12, 4)
    ]


def test_the_next_epoch_is_begun_while_this_one_ends() -> None:
    started = threading.Event()

    class NoticingStore(CountingStore):
        def read(self, block: int) -> EncodedBlock:
            found = super().read(block)
            if self.reads == 2:
                started.set()
            return found

    batches = make_loader(NoticingStore([make_block(100)]), 10, workers=1).batches(0, endless=True)
    next(batches)
    assert started.wait(30), "the next epoch's window is read while the first batch of this one is in use"
    batches.close()  # type: ignore[attr-defined]


def test_an_abandoned_epoch_leaves_no_threads() -> None:
    batches = make_loader(make_store(*[100] * 10), 10, window=100, workers=3).batches(0, endless=True)
    next(batches)
    assert loader_threads()
    batches.close()  # type: ignore[attr-defined]
    assert not loader_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_surfaces_after_the_batches_before_it_and_ends_the_threads(workers: int) -> None:
    store = DamagedStore([make_block(1, first=number) for number in range(100)])
    batches = make_loader(store, 1, seed=None, workers=workers).batches(0)
    assert [next(batches).row_ids.item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="planted"):
        next(batches)
    assert not loader_threads()


def test_items_are_read_no_further_than_needed() -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    results = in_order(lambda item: item * item, items(), workers=2)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(taken) == 5
    results.close()  # type: ignore[attr-defined]


def test_a_spare_result_is_there_while_the_thread_is_held_up() -> None:
    """One thread: while result 0 is in use it makes 1 and 2, the spare one; so 1 and 2 come though 3 takes for ever."""
    go_on, reached = threading.Event(), threading.Event()

    def slow(item: int) -> int:
        if item == 2:
            reached.set()
        assert item != 3 or go_on.wait(60)
        return item

    results = in_order(slow, range(5), workers=1, spare=1)
    assert next(results) == 0
    assert reached.wait(60), "the thread went on to the spare result while the first one was in use"
    assert [next(results) for _ in range(2)] == [1, 2]
    go_on.set()
    assert list(results) == [3, 4]


def picked(store: MemoryStore, rows: list[int], *sizes: int) -> list[Batch]:
    blocks = [store.read(block) for block in range(len(store.block_rows))]
    return gather(Picked(blocks, np.array(rows, dtype=np.int64), sizes or (len(rows),)), np.array(rows, np.int64))


def test_single_valued_rows_are_gathered_feature_by_feature() -> None:
    store = make_store(20, 30)
    first, second = store.read(0), store.read(1)
    (batch,) = picked(store, [7, 23, 23, 49])
    assert batch.sparse.single_valued
    expected = [[one[7], other[3], other[3], other[29]] for one, other in zip(first.ids, second.ids, strict=True)]
    assert batch.sparse.values.view(3, 4).tolist() == expected
    assert batch.sparse.lengths.tolist() == [1] * 12
    assert batch.sparse.weights is None
    dense = [[one[7], other[3], other[3], other[29]] for one, other in zip(first.dense, second.dense, strict=True)]
    np.testing.assert_array_equal(batch.dense.T.numpy(), dense)
    assert batch.label.tolist() == [first.label[7], second.label[3], second.label[3], second.label[29]]
    assert (batch.sparse.values.dtype, batch.sparse.lengths.dtype) == (torch.int64, torch.int32)
    assert (batch.dense.dtype, batch.label.dtype, batch.row_ids.dtype) == (torch.float32,) * 2 + (torch.int64,)
    assert batch.dense.is_contiguous()
    assert batch.sparse.values.is_contiguous()


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_gathered_feature_by_feature(weighted: bool) -> None:
    """Feature 1 is the bags, between two single-valued features."""
    store = make_store(50, bags=True, weights=weighted)
    block, rows = store.read(0), [9, 0, 41, 9]
    (batch,) = picked(store, rows)
    bags = block.bags[1]
    values, lengths, weights = [], [], []
    for column in (0, None, 1):
        for row in rows:
            if column is None:
                part = slice(bags.offsets[row], bags.offsets[row + 1])
                ids = bags.values[part].tolist()
                weights += bags.weights[part].tolist() if bags.weights is not None else [1.0] * len(ids)
            else:
                ids = [int(block.ids[column][row])]
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
@pytest.mark.parametrize("sizes", [(3, 0, 5, 5, 5, 2), (20,), (0, 20, 0), (1,) * 20])
def test_cut_rows_join_to_the_whole(bags: bool, sizes: tuple[int, ...]) -> None:
    store = make_store(13, 30, 7, bags=bags, weights=bags)
    rows = np.random.default_rng(1).integers(0, 50, 20).tolist()
    (whole,) = picked(store, rows)
    parts = picked(store, rows, *sizes)
    assert [part.size for part in parts] == list(sizes)
    assert_equal(join(parts), whole)
    start = 0
    for part in parts:
        assert_equal(part, picked(store, rows[start : start + part.size])[0])
        start += part.size


@pytest.mark.parametrize("bags", [False, True])
def test_a_batch_without_rows_has_the_right_shapes(bags: bool) -> None:
    (batch,) = picked(make_store(50, bags=bags), [], 0)
    assert batch.size == 0
    assert batch.dense.shape == (0, NUM_DENSE)
    assert batch.sparse.values.shape == batch.sparse.lengths.shape == (0,)
    assert batch.sparse.num_features == 3


def test_long_ids_and_no_features_of_a_kind() -> None:
    block = make_block(4)
    long = dataclasses.replace(block, dense=[], ids=[np.array([2**40, 1, 2, 3])])
    batch = next(make_loader(MemoryStore([long]), 4, seed=None).batches(0))
    assert batch.sparse.values.tolist() == [2**40, 1, 2, 3]
    assert batch.dense.shape == (4, 0)
    none = dataclasses.replace(block, ids=[])
    assert next(make_loader(MemoryStore([none]), 4, seed=None).batches(0)).sparse.values.shape == (0,)


def test_held_out_rows_depend_on_seed_and_key_only() -> None:
    whole = held_out(np.arange(100_000), seed=1, fraction=0.1)
    # The deviation of 100,000 draws at 0.1 is 0.00095; four of them.
    assert whole.mean() == pytest.approx(0.1, abs=0.004)
    pieces = [held_out(np.arange(start, start + 1000), seed=1, fraction=0.1) for start in range(0, 100_000, 1000)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    other = held_out(np.arange(100_000), seed=2, fraction=0.1)
    assert (whole & other).mean() == pytest.approx(0.01, abs=0.002), "seeds are independent"
    assert (held_out(np.arange(100_000), seed=1, fraction=0.2) >= whole).all(), "a larger fraction holds out more"
