"""Worker processes that give results in the order of tasks. One that dies is noticed; all end with their parent.

Not ``ProcessPoolExecutor``: its workers outlive a parent that is killed, and end only when their tasks are done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self, TypeVar

from data.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_ENDING_S = 5.0
_RESULTS_A_WORKER = 4
"""Results that wait for a slow task before them."""


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    number: int | None = None
    """Of the task that it works on."""


class WorkerPool:
    """A context; leaving it ends the workers, whatever they do."""

    def __init__(self, count: int) -> None:
        """Starts ``count`` workers; they are ready when their imports are done."""
        # Not forked: a fork of a process with threads (Arrow has some) can hang.
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    @property
    def size(self) -> int:
        """Workers."""
        return len(self._workers)

    def shrink(self, count: int) -> None:
        """Ends all but ``count`` workers; none is at work."""
        self._workers, surplus = self._workers[:count], self._workers[count:]
        _end(surplus)

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
                _give(idle.pop(), function, *waiting.popleft())
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
                raise _died(worker) from None
            worker.number = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers, self._workers = self._workers, []
        _end(workers)


def _give(worker: _Worker, function: Callable[[Any], Any], number: int, task: Any) -> None:
    try:
        worker.pipe.send((function, task))
    except OSError:
        raise _died(worker) from None
    worker.number = number


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # whatever is not finished was not published
    for worker in workers:
        worker.process.join(_ENDING_S)
        worker.pipe.close()


def _died(worker: _Worker) -> DataError:
    worker.process.join(_ENDING_S)
    code = worker.process.exitcode
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    cause = " (the machine may have run out of memory: give fewer --workers)" if code == -signal.SIGKILL else ""
    return DataError(f"a worker process was ended {how}{cause}; run the same command again: what is finished is kept")


def _serve(pipe: Connection) -> None:
    """Runs in a worker: one task after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
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


def _end_with_parent() -> None:
    """A parent that is killed must not leave workers that go on writing beside those of a second run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
