"""Logs are as dense as asked for at first, and bounded however long a run is."""

from __future__ import annotations

import pytest

from erase_rec.log_interval import FULL_ROWS, is_logged, log_interval, most_rows


def rows(total: int, every: int) -> list[int]:
    return [step for step in range(1, total + 1) if is_logged(step, every, total)]


@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_first_rows_are_as_asked_for(every: int) -> None:
    total = FULL_ROWS * every if every < 50 else 1000
    assert rows(total, every) == list(range(every, total + 1, every))


@pytest.mark.parametrize(("total", "every"), [(7, 50), (1, 1), (160_001, 1), (99_999, 2), (123_457, 7)])
def test_rows_are_bounded_and_the_last_step_is_one(total: int, every: int) -> None:
    found = rows(total, every)
    assert found[-1] == total
    assert len(found) <= most_rows(total, every)
    gaps = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert max(gaps[:-1], default=0) <= log_interval(total, every)


def test_rows_grow_with_the_logarithm_of_the_steps() -> None:
    assert log_interval(FULL_ROWS, 1) == 1
    assert log_interval(FULL_ROWS + 1, 1) == 2
    assert log_interval(4 * FULL_ROWS, 1) == 4
    assert log_interval(4 * FULL_ROWS + 1, 1) == 8
    assert most_rows(10**9, 1) == FULL_ROWS + 17 * FULL_ROWS // 2 + 1
    assert most_rows(200_000, 50) == 4001
