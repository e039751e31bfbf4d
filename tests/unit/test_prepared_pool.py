"""Worker processes: order, errors, laziness, and what happens when one dies."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.errors import DataError
from data.prepared.pool import WorkerPool


def test_results_come_in_the_order_of_the_tasks() -> None:
    """Whoever is done first: the first tasks take longest."""
    with WorkerPool(2) as pool:
        assert list(pool.in_order(time.sleep, [0.2, 0.1, 0, 0])) == [None] * 4
        assert list(pool.in_order(math.factorial, range(20))) == [math.factorial(number) for number in range(20)]
        assert list(pool.in_order(math.factorial, [])) == []
        pool.shrink(1)
        assert pool.size == 1
        assert list(pool.in_order(abs, [-3, 2])) == [3, 2]


def test_the_first_error_in_order_is_raised_after_what_lies_before_it() -> None:
    found: list[int] = []

    def collect(pool: WorkerPool) -> None:
        for result in pool.in_order(math.factorial, [3, 4, -1, -2]):
            found.append(result)

    with WorkerPool(2) as pool, pytest.raises(ValueError, match="factorial") as refused:
        collect(pool)
    assert found == [6, 24]
    assert "Traceback" in refused.value.__notes__[0], "that of the worker comes along"


def test_an_error_in_drawing_tasks_comes_in_its_turn() -> None:
    """A damaged file is not reported before a bad row that stands before it."""

    def tasks(last: float) -> Iterator[float]:
        yield 0.3
        yield last
        raise DataError("damaged")

    with WorkerPool(2) as pool, pytest.raises(ValueError, match="non-negative"):
        list(pool.in_order(time.sleep, tasks(-1)))
    with WorkerPool(2) as pool:
        results = pool.in_order(time.sleep, tasks(0))
        assert [next(results), next(results)] == [None, None]
        with pytest.raises(DataError, match="damaged"):
            next(results)


def test_tasks_are_drawn_when_they_are_needed() -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    with WorkerPool(2) as pool:
        results = pool.in_order(abs, tasks())
        for _ in range(5):
            next(results)
        assert len(drawn) < 30


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [(os._exit, 3, "with exit code 3"), (signal.raise_signal, signal.SIGKILL, "by signal 9.*give fewer --workers")],
)
def test_a_worker_that_dies_is_one_message(function: object, argument: int, words: str) -> None:
    with WorkerPool(2) as pool, pytest.raises(DataError, match=rf"a worker process was ended {words}"):
        list(pool.in_order(function, [argument]))  # type: ignore[arg-type]


def test_workers_end_with_a_parent_that_is_killed(checkout: Path) -> None:
    script = (
        "import time\n"
        "from data.prepared.pool import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    pool = WorkerPool(2)\n"
        "    print(*pool.pids(), flush=True)\n"
        "    list(pool.in_order(time.sleep, [600, 600]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=checkout, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(number) for number in parent.stdout.readline().split()]
        time.sleep(1)  # they are at work, or still starting
        parent.kill()
    deadline = time.monotonic() + 60
    while any(_is_alive(number) for number in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
    assert len(workers) == 2


def _is_alive(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_workers_that_are_forked_can_use_arrow_without_pandas() -> None:
    """Arrow would import it with the first array that it converts."""
    with WorkerPool(2) as pool:
        code = "import sys, pyarrow\nassert pyarrow.array([1]).to_numpy()[0] == 1\nassert 'pandas' not in sys.modules"
        assert list(pool.in_order(exec, [code, code])) == [None, None]


def test_a_pool_whose_nursery_is_gone_is_one_message() -> None:
    with WorkerPool(1) as pool:
        assert list(pool.in_order(abs, [-1])) == [1]
        pool._nursery._process.kill()
        pool._nursery._process.wait()
        pool.pids()
        with pytest.raises(DataError, match="a worker process was ended by signal 9"):
            list(pool.in_order(os._exit, [0]))
