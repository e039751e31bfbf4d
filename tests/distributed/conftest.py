"""Ranks as processes: a test gives a function, each rank runs it, and its results come back in rank order.

A rank is forked from the server of :mod:`warm_process`, which has imported what ranks need.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from warm_process import rank_environment, server


class RunRanks(Protocol):
    """``run_ranks(2, function, argument)`` calls ``function(argument)`` on each of two ranks."""

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results in rank order; fails the test where a rank raises, or does not end in time."""
        ...


@pytest.fixture
def run_ranks() -> RunRanks:
    """Runs ranks whose environment is as torchrun makes it; the function joins them by ``join_world``."""

    def run(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = server().Pipe(duplex=False)
            target_arguments = (sender, warnings.filters, rank, size, store.port, function, arguments)
            process = server().Process(target=_rank, args=target_arguments, daemon=True)
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
    os.environ.update(rank_environment(rank, size, port))
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
