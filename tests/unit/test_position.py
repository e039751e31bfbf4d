"""Where a run is and where it ends, whatever number of ranks trained before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data.block import EncodedBlock, Rows
from data.loader import Loader
from data.store import MemoryStore
from erase_rec.config.schema import TrainConfig
from erase_rec.position import Position, planned_steps


def loader(num_rows: int, batch: int, ranks: int = 1) -> Loader:
    rows = Rows("a.csv", "line", np.arange(num_rows))
    block = EncodedBlock([], [np.zeros(num_rows, np.int32)], {}, np.zeros(num_rows, np.uint8), rows)
    return Loader(MemoryStore([block]), local_batch_size=batch, world_size=ranks, equal=True)


def train(**length: Any) -> TrainConfig:
    return TrainConfig.model_validate(length)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"samples": 250}, {"samples": 1}, {"samples": 100}, {"steps": 7}])
@pytest.mark.parametrize(("num_rows", "batch", "ranks"), [(100, 10, 1), (103, 10, 2), (101, 60, 3), (100, 1000, 2)])
def test_a_run_takes_as_many_steps_as_planned_from_wherever_it_is_asked(
    length: dict[str, int], num_rows: int, batch: int, ranks: int
) -> None:
    """Against a loop over the loader's batches."""
    each = loader(num_rows, batch, ranks)
    position, planned = Position(), planned_steps(train(**length), each, Position())
    while True:
        assert planned_steps(train(**length), each, position) == planned
        done = {
            "steps": position.step >= length.get("steps", 0),
            "epochs": position.epoch >= length.get("epochs", 0),
            "samples": position.rows >= length.get("samples", 0),
        }
        if done[next(iter(length))]:
            break
        batch_rows = next(each.batches(position.epoch, position.epoch_rows)).size * ranks
        position = position.after(batch_rows).normal(each)
    assert position.step == planned


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 3), (3, 1), (2, 1)])
def test_an_epoch_goes_on_with_another_number_of_ranks(first: int, then: int) -> None:
    before, after = loader(301, 10, first), loader(301, 10, then)
    position = Position()
    for _ in range(4):
        position = position.after(10 * first)
    assert not position.ends_epoch(after)
    left = after.steps_left(position.epoch_rows)
    assert planned_steps(train(epochs=2), after, position) == 4 + left + after.steps_left()
    rows = 301 - position.epoch_rows
    assert after.dropped_rows(position.epoch_rows) == rows % (10 * then) % then
    for _ in range(left):
        size = next(after.batches(0, position.epoch_rows)).size
        position = position.after(size * then)
    assert position.ends_epoch(after)
    assert position.rows == 301 - after.dropped_rows(40 * first)
    assert position.normal(after) == Position(position.step, 1, 0, position.rows)
    assert before.steps_left(301) == 0


def test_fewer_rows_left_than_ranks_end_the_epoch() -> None:
    """Two rows are left of an epoch that four ranks go on with: none can take as many as the others."""
    position = Position(step=3, epoch=0, epoch_rows=30, rows=30)
    each = loader(32, 10, 4)
    assert position.normal(each) == Position(3, 1, 0, 30)
    assert planned_steps(train(epochs=1), each, position) == 3


@pytest.mark.parametrize("length", [{"epochs": 1}, {"samples": 50}])
def test_a_run_that_has_more_than_asked_for_is_finished(length: dict[str, int]) -> None:
    position = Position(step=30, epoch=3, epoch_rows=0, rows=300)
    assert planned_steps(train(**length), loader(100, 10), position) == 30
