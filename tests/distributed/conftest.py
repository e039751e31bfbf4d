"""Ranks as processes: a test gives a function, each rank runs it, and its results come back in rank order.

A rank is forked from a server that has one thread and has imported what ranks need. Forked from the test process
itself, a rank can hang for ever: threads that run there (of the store, of autograd, of earlier groups) may hold locks
that nobody releases in the child.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist

_IMPORTED_ONCE = ["torch", "torchrec", "fbgemm_gpu", "pytest", "erase_rec.api.assembly"]


class RunRanks(Protocol):
    """``run_ranks(2, function, argument)`` calls ``function(argument)`` on each of two ranks."""

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results in rank order; fails the test where a rank raises, or does not end in time."""
        ...


@pytest.fixture(scope="session")
def rank_server() -> Iterator[BaseContext]:
    """Where ranks are forked; its own numpy starts no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENBLAS_NUM_THREADS", "1")
        yield context


@pytest.fixture
def run_ranks(rank_server: BaseContext) -> RunRanks:
    """Runs ranks whose environment is as torchrun makes it; the function joins them by ``join_world``."""

    def run(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = rank_server.Pipe(duplex=False)
            target_arguments = (sender, warnings.filters, rank, size, store.port, function, arguments)
            process = rank_server.Process(target=_rank, args=target_arguments, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        try:
            outcomes = [_receive(rank, pipe, deadline) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
        if problems := [problem for problem, _ in outcomes if problem is not None]:
            pytest.fail("\n".join(problems), pytrace=False)
        return [result for _, result in outcomes]

    return run


def _rank(
    sender: Connection,
    filters: Sequence[Any],
    rank: int,
    size: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    warnings.filters[:] = filters
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    try:
        outcome = (None, function(*arguments))
    except BaseException:
        outcome = (f"rank {rank}:\n{traceback.format_exc()}", None)
        raise
    finally:
        sender.send_bytes(pickle.dumps(outcome))


def _receive(rank: int, pipe: Connection, deadline: float) -> tuple[str | None, Any]:
    if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
        return f"rank {rank} did not end in time", None
    try:
        outcome: tuple[str | None, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return f"rank {rank} ended without a result", None
    return outcome
