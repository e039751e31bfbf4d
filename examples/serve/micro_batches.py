"""Joins requests that come at the same time into one call, and refuses those that would have to wait too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")
Rows = Sequence[Any]


class OverloadedError(Exception):
    """As many rows wait already as may wait."""


@dataclass
class _Waiting(Generic[Answer]):
    rows: Rows
    answer: asyncio.Future[Answer]
    since: float


class MicroBatches(Generic[Answer]):
    """Calls ``score`` in a thread of its own, with the requests of up to ``max_rows`` rows at a time.

    The first request of a batch waits for others for ``max_wait_s``, unless the batch is full before. While a batch is
    scored the next one gathers, so under load nobody waits for the clock. Rows that wait or are being scored are
    bounded: that bounds how long an accepted request takes, whatever comes in. Belongs to one event loop.

    Attributes:
        pending_rows: rows that wait or are being scored.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Rows]], Sequence[Answer]],
        *,
        max_rows: int,
        max_wait_s: float,
        max_pending_rows: int,
        observe: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            score: an answer for each request, from their rows.
            max_rows: of a batch; a request with more is a batch of its own.
            max_wait_s: longest wait for others.
            max_pending_rows: more than these are refused.
            observe: told the rows of each batch.
        """
        self._score, self._observe = score, observe
        self._max_rows, self._max_wait_s, self._max_pending_rows = max_rows, max_wait_s, max_pending_rows
        self._waiting: deque[_Waiting[Answer]] = deque()
        self._waiting_rows = self.pending_rows = 0
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self._task is not None and not self._task.done() and not self._closing

    def start(self) -> None:
        """Begins to take requests; in the event loop."""
        self._task = asyncio.create_task(self._run())

    async def submit(self, rows: Rows) -> Answer:
        """The answer for ``rows``, at least one.

        Raises:
            OverloadedError: too many rows are pending, or the server is being stopped.
        """
        if not self.running or self.pending_rows + len(rows) > self._max_pending_rows:
            raise OverloadedError
        loop = asyncio.get_running_loop()
        waiting = _Waiting[Answer](rows, loop.create_future(), loop.time())
        self._waiting.append(waiting)
        self._waiting_rows += len(rows)
        self.pending_rows += len(rows)
        self._arrived.set()
        if self._waiting_rows >= self._max_rows:
            self._full.set()
        return await waiting.answer

    async def stop(self) -> None:
        """Answers what was accepted, and takes no more."""
        self._closing = True
        self._arrived.set()
        self._full.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        while not (self._closing and not self._waiting):
            await self._arrived.wait()
            if self._waiting:
                await self._wait_for_others()
                await self._answer(self._take())
            if not self._waiting and not self._closing:
                self._arrived.clear()

    async def _wait_for_others(self) -> None:
        since = self._waiting[0].since
        left = since + self._max_wait_s - asyncio.get_running_loop().time()
        if left > 0 and self._waiting_rows < self._max_rows and not self._closing:
            self._full.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), left)

    def _take(self) -> list[_Waiting[Answer]]:
        """The requests of the next batch, in the order of their arrival; at least one."""
        batch: list[_Waiting[Answer]] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0].rows) <= self._max_rows):
            batch.append(self._waiting.popleft())
            rows += len(batch[-1].rows)
        self._waiting_rows -= rows
        return batch

    async def _answer(self, batch: list[_Waiting[Answer]]) -> None:
        """Scores a batch. An error is its requests' answer: the next batch has nothing to do with it."""
        rows = sum(len(each.rows) for each in batch)
        wanted = [each for each in batch if not each.answer.cancelled()]  # of the others, the client has gone
        try:
            if wanted:
                self._observe(sum(len(each.rows) for each in wanted))
                call = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._score, [each.rows for each in wanted]
                )
                for each, answer in zip(wanted, await call, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(answer)
        except Exception as error:  # noqa: BLE001  # whatever it is, these requests fail with it
            for each in wanted:
                if not each.answer.done():
                    each.answer.set_exception(error)
        finally:
            self.pending_rows -= rows
