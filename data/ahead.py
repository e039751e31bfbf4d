"""Work done ahead in threads, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, name: str = "ahead", *, spare: int = 0
) -> Iterator[Result]:
    """``function`` of each item, in the order of the items whatever the number of threads.

    While a result is in use, those of the next ``workers + spare`` items are made, or are there. Closing the iterator,
    or an error in it, ends the threads.

    Args:
        function: called in a thread.
        items: read by the caller's thread, no further ahead than needed.
        workers: threads; 0: everything happens in the caller's thread, when it is asked for.
        name: what the threads are called.
        spare: results that are kept besides, so that one that takes longer than usual is not waited for; without
            threads there are none.
    """
    if workers == 0:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > workers + spare:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
