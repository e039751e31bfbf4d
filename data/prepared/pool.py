"""Worker processes that give results in the order of tasks. One that dies is noticed; all end with their parent.

Not ``ProcessPoolExecutor``: its workers outlive a parent that is killed, and end only when their tasks are done.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeVar

from data.errors import DataError
from data.prepared.nursery import Nursery, ended

Task = TypeVar("Task")
Result = TypeVar("Result")

_PRELOAD = ("data.prepared.work", "data.prepared.budget", "data.sources.delimited")
_RESULTS_A_WORKER = 4
"""Results that wait for a slow task before them."""


@dataclass
class _Worker:
    pipe: Connection
    number: int | None = None
    """Of the task that it works on."""


class WorkerPool:
    """A context; leaving it ends the workers, whatever they do."""

    def __init__(self, count: int, nursery: Nursery | None = None) -> None:
        """Asks for ``count`` workers and does not wait for them.

        Args:
            count: workers.
            nursery: where they come from, of :func:`open_nursery`; the pool closes it. None: one of its own.
        """
        self._nursery = nursery or open_nursery()
        self._workers = [_Worker(self._nursery.fork()) for _ in range(count)]
        self._pids: list[int] = []
        """Of the workers, in their order, as far as they were asked for."""

    @property
    def size(self) -> int:
        """Workers."""
        return len(self._workers)

    def shrink(self, count: int) -> None:
        """Ends all but ``count`` workers; none is at work."""
        pids = self.pids()
        for pid in pids[count:]:
            self._nursery.wait(pid, kill=True)
        self._workers, self._pids = self._workers[:count], pids[:count]

    def pids(self) -> list[int]:
        """Process numbers of the workers; waits until they are there."""
        while len(self._pids) < len(self._workers):
            self._pids.append(self._nursery.number())
        return self._pids

    def in_order(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Results in the order of the tasks.

        Tasks are drawn lazily: at most one a worker waits, besides those that are worked on, so what they hold is
        bounded. The error of the first task that fails, or cannot be drawn, is raised when all before it are done.

        Args:
            function: of a module; called in the workers.
            tasks: picklable.

        Raises:
            DataError: a worker ended without a word.
        """
        source, drawn = iter(tasks), 0
        waiting: deque[tuple[int, Task]] = deque()
        done: dict[int, tuple[bool, Any]] = {}
        next_out, drained = 0, False
        while True:
            while next_out in done:
                succeeded, value = done.pop(next_out)
                if not succeeded:
                    raise value
                next_out += 1
                yield value
            idle = [worker for worker in self._workers if worker.number is None]
            while idle and waiting:
                self._give(idle.pop(), function, *waiting.popleft())
            if not drained and len(waiting) < self.size and len(done) < _RESULTS_A_WORKER * self.size:
                try:
                    waiting.append((drawn, next(source)))
                    drawn += 1
                except StopIteration:
                    drained = True
                except DataError as error:  # its turn comes after the tasks before it
                    done[drawn], drained = (False, error), True
                self._collect(done, wait=False)
            elif any(worker.number is not None for worker in self._workers):
                self._collect(done, wait=True)
            elif not waiting:
                return

    def _collect(self, done: dict[int, tuple[bool, Any]], *, wait: bool) -> None:
        """Takes what workers have sent."""
        busy = {worker.pipe: worker for worker in self._workers if worker.number is not None}
        for pipe in connection.wait(list(busy), None if wait else 0):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.number is not None
            try:
                done[worker.number] = worker.pipe.recv()
            except (EOFError, ConnectionError):
                raise self._died(worker) from None
            worker.number = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.pipe.close()
        self._workers = []
        self._nursery.close()  # whatever is not finished was not published

    def _give(self, worker: _Worker, function: Callable[[Any], Any], number: int, task: Any) -> None:
        try:
            worker.pipe.send((function, task))
        except OSError:
            raise self._died(worker) from None
        worker.number = number

    def _died(self, worker: _Worker) -> DataError:
        return ended(self._nursery.wait(self.pids()[self._workers.index(worker)], kill=False))


def open_nursery() -> Nursery:
    """Where workers of a preparation come from; started early, it is ready when they are needed."""
    return Nursery("data.prepared.pool:serve", _PRELOAD)


def serve(pipe: Connection) -> None:
    """Runs in a worker: one task after the other."""
    while True:
        try:
            function, task = pipe.recv()
        except EOFError:
            return
        try:
            outcome = (True, function(task))
        except Exception as error:  # noqa: BLE001, raised again by the parent
            if not isinstance(error, DataError):
                error.add_note(traceback.format_exc())  # a traceback does not travel
            outcome = (False, error)
        pipe.send(outcome)
