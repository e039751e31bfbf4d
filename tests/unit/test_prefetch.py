"""Copies ahead: what is issued when, and that no copy overwrites a batch that a step may still read.

The device is played by a log of what both streams were given; on a real one see ``tests/gpu/test_prefetch_cuda.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from erase_rec.batch import Batch, SparseBatch
from erase_rec.prefetch import Pieces, prefetch


def make_batch(value: int) -> Batch:
    ids = torch.full((3,), value)
    sparse = SparseBatch(ids, torch.ones(3, dtype=torch.int32), None, 1, single_valued=True)
    return Batch(torch.full((3, 2), float(value)), sparse, torch.zeros(3), ids)


@dataclass
class Source:
    """Batches 0, 1, ..., and whether they were closed."""

    count: int
    taken: list[int] = field(default_factory=list)
    closed: bool = False

    def batches(self) -> Iterator[Batch]:
        try:
            for value in range(self.count):
                self.taken.append(value)
                yield make_batch(value)
        finally:
            self.closed = True


@dataclass
class FakeDevice:
    """Implements :class:`erase_rec.prefetch.Copies`.

    Attributes:
        main: steps that the main stream was given.
        issued: how many steps that were, when each copy was issued: the copy runs after them.
        waited: copies that the main stream waits for.
    """

    main: list[int] = field(default_factory=list)
    issued: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    def begin(self, batch: Batch) -> tuple[Batch, int]:
        self.issued.append(len(self.main))
        return batch, int(batch.row_ids[0])

    def use(self, copied: int) -> None:
        self.waited.append(copied)


CUDA = torch.device("cuda")


def test_each_copy_is_issued_before_the_step_that_it_runs_beside() -> None:
    source, device = Source(5), FakeDevice()
    seen = []
    for batch in prefetch(source.batches(), CUDA, device):
        step = int(batch.row_ids[0])
        seen.append(step)
        assert device.waited == list(range(step + 1)), "the main stream waits for this batch's copy, and no other yet"
        assert len(device.issued) == min(step + 2, 5), "the next copy is under way, and none after it"
        device.main.append(step)
    assert seen == list(range(5))
    # Copy k runs after the steps up to k - 2: step k - 1 and copy k run side by side. A block freed by the host after
    # step j was issued is taken by copy j + 2 at the earliest, which runs after step j.
    assert device.issued == [0, 0, 1, 2, 3]
    assert source.closed


def test_a_batch_is_expected_before_the_one_ahead_of_it_is_handed_out() -> None:
    """Then copies are a batch further ahead: what step k does with batch k + 1 waits for step k - 2 at most."""
    source, device = Source(9), FakeDevice()
    expected: list[int] = []

    def expect(batch: Batch) -> None:
        number = int(batch.row_ids[0])
        assert batch.sparse.counts == (3,), "counted on the host, which asks no device for it"
        assert device.issued[number] <= max(number - 2, 0)
        expected.append(number)

    for batch in prefetch(source.batches(), CUDA, device, expect=expect, count=5):
        step = int(batch.row_ids[0])
        assert expected == list(range(1, min(step + 2, 5)))
        device.main.append(step)
    assert device.main == list(range(5))
    assert device.issued == [0, 0, 0, 1, 2]
    assert source.taken == list(range(5)), "none that nobody wants"
    assert source.closed


def test_a_batch_is_expected_on_the_cpu() -> None:
    source, expected = Source(3), list[int]()
    found = []
    cpu = torch.device("cpu")
    for batch in prefetch(source.batches(), cpu, expect=lambda batch: expected.append(int(batch.row_ids[0]))):
        found.append((int(batch.row_ids[0]), [*expected]))
    assert found == [(0, [1]), (1, [1, 2]), (2, [1, 2])]


def test_an_abandoned_iterator_closes_the_batches() -> None:
    source, device = Source(5), FakeDevice()
    batches = prefetch(source.batches(), CUDA, device)
    next(batches)
    assert source.taken == [0, 1]
    batches.close()
    assert source.closed


def test_batches_pass_through_on_the_cpu() -> None:
    source = Source(3)
    batches = prefetch(source.batches(), torch.device("cpu"))
    first = next(batches)
    assert source.taken == [0], "nothing is taken ahead: the loader's threads do that"
    assert [int(first.row_ids[0]), *(int(batch.row_ids[0]) for batch in batches)] == [0, 1, 2]
    assert source.closed


def test_no_batch_is_no_error() -> None:
    assert list(prefetch(Source(0).batches(), CUDA, FakeDevice())) == []


def test_an_error_of_the_loader_comes_in_place_of_the_batch_before_it() -> None:
    """One step early, as the batch is asked for while the one before it is handed out."""

    def failing() -> Iterator[Batch]:
        yield make_batch(0)
        yield make_batch(1)
        raise OSError("planted")

    batches = prefetch(failing(), CUDA, FakeDevice())
    assert int(next(batches).row_ids[0]) == 0
    with pytest.raises(OSError, match="planted"):
        next(batches)


def run_of_batches(count: int, rows: int, features: int = 3) -> list[Batch]:
    """Batches one after the other in common buffers, as the loader makes them."""
    dense, label = torch.randn(count * rows, 2), torch.randn(count * rows)
    values = torch.arange(count * rows * features)
    ones = torch.ones(rows * features, dtype=torch.int32)
    return [
        Batch(
            dense[number * rows : (number + 1) * rows],
            SparseBatch(values[number * rows * features : (number + 1) * rows * features], ones, None, features, True),
            label[number * rows : (number + 1) * rows],
            torch.arange(rows),
        )
        for number in range(count)
    ]


def same(found: Batch, expected: Batch) -> bool:
    pairs = [(found.dense, expected.dense), (found.label, expected.label)]
    pairs += [(found.sparse.values, expected.sparse.values), (found.sparse.lengths, expected.sparse.lengths)]
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


@pytest.mark.parametrize(("piece_bytes", "copies"), [(1, 10), (5 * 3 * 8 * 3, 4), (10**6, 1)])
def test_a_piece_serves_the_batches_that_follow(piece_bytes: int, copies: int) -> None:
    """Its size is that of ids, whose batches take 5 * 3 * 8 bytes: three of them, or all, or each alone."""
    pieces = Pieces(torch.device("cpu"), piece_bytes)
    batches = run_of_batches(10, 5)
    begun = 0
    kept = []
    for batch in batches:
        begun += not pieces.hold(batch)
        kept.append(pieces.batch(batch))
        assert pieces.hold(batch)
    assert begun == copies
    for found, batch in zip(kept, batches, strict=True):
        assert same(found, batch)
        assert found.dense.data_ptr() != batch.dense.data_ptr()


def test_buffers_of_their_own_are_copied_each() -> None:
    """A short batch that was joined from two windows, and the next window's, which may lie where one was freed."""
    pieces = Pieces(torch.device("cpu"))
    for batch in [*run_of_batches(2, 5), *run_of_batches(1, 3), *run_of_batches(2, 5)]:
        assert same(pieces.batch(batch), batch)
