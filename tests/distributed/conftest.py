"""Ranks as forked processes: a test gives a function, each rank runs it, and its results come back in rank order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import pytest
import torch.distributed as dist


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
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            target_arguments = (sender, rank, size, store.port, function, arguments)
            process = context.Process(target=_rank, args=target_arguments, daemon=True)
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
    sender: Connection, rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
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
