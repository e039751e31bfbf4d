"""Joins the ranks that torchrun started; without torchrun a process is alone."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from erase_rec.distributed.failure import Board, board_store
from erase_rec.distributed.stop import Stop, Stopped
from erase_rec.distributed.world import World
from erase_rec.errors import UserError

MEET_S = 0.01
"""Time between two looks for ranks that have not come yet."""
NO_JOB = "none"
"""What torchrun calls a job without ``--rdzv-id``."""

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = "start ranks with: torchrun --nproc-per-node N train.py ..."


@dataclass(frozen=True)
class Place:
    """Where the environment puts this process among the ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Reads torchrun's variables; without any of them the process is alone.

        Raises:
            UserError: some are missing or do not fit together.
        """
        given = {name: environment[name] for name in _NUMBERS if name in environment}
        if not given:
            return cls()
        problems = [f"{name} is not set" for name in _NUMBERS if name not in given]
        problems += [f"{name} is {value!r}, no number" for name, value in given.items() if not value.isdecimal()]
        if problems:
            raise UserError(f"environment: {', '.join(problems)}; {_REMEDY}, or unset {', '.join(given)}")
        rank, size, local_rank = (int(given[name]) for name in _NUMBERS)
        if rank >= size or local_rank > rank:
            raise UserError(
                f"environment: RANK={rank}, WORLD_SIZE={size} and LOCAL_RANK={local_rank} do not fit together: "
                f"ranks count from 0 to WORLD_SIZE - 1; {_REMEDY}"
            )
        absent = [name for name in _ADDRESS if name not in environment]
        if size > 1 and absent:
            raise UserError(f"environment: WORLD_SIZE={size}, but {' and '.join(absent)} not set; {_REMEDY}")
        return cls(rank, size, local_rank)


@dataclass(frozen=True)
class Job:
    """What torchrun says of the job that this process belongs to.

    Attributes:
        id: ``--rdzv-id``, or one that ``--standalone`` makes up; None: there is no torchrun, or it was given none.
        restarts: times that the ranks were started again after a failure. A change of their number is none, and a
            launcher that is itself started again begins at zero.
        may_restart: ``--max-restarts`` is above zero.
    """

    id: str | None = None
    restarts: int = 0
    may_restart: bool = False

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Job:
        """Reads torchrun's variables."""
        name = environment.get("TORCHELASTIC_RUN_ID", NO_JOB)
        return cls(
            None if name == NO_JOB else name,
            int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        )


@contextmanager
def join_world(*, on_cuda: bool, timeout_s: float, grouped: bool) -> Iterator[World]:
    """This process among its ranks, until the block ends.

    Several ranks wait for each other at the end of the block. If one of them raises inside it, all of them end with
    its exit code, and the first rank prints its message (see :mod:`erase_rec.distributed.failure`); but not where all
    raise :class:`Stopped`, which comes out of the block.

    Args:
        on_cuda: the ranks compute on CUDA: each takes the GPU of its local rank as its current device.
        timeout_s: longest wait for another rank.
        grouped: make a process group for a single process, too.

    Raises:
        UserError: the environment is not torchrun's, or there are fewer GPUs than ranks.
    """
    place = Place.read()
    if on_cuda:
        _take_gpu(place)
    if place.size == 1 and not grouped:
        yield World()
        return
    world = World(place.rank, place.size, place.local_rank, grouped=True, stop=Stop(alone=place.size == 1))
    store = _make_group(place, on_cuda, timedelta(seconds=timeout_s))
    board = Board(board_store(store), world, timeout_s) if place.size > 1 else None
    stopped: Stopped | None = None
    try:
        try:
            yield world
        except Stopped as told:
            stopped = told
        world.barrier("end")
    except BaseException as error:
        if board is not None:
            board.fail(error)
        raise
    finally:
        if board is not None:
            board.close()
        for captures in list(world.captures):
            captures.release()
        dist.destroy_process_group()
    if stopped is not None:
        raise stopped


def _take_gpu(place: Place) -> None:
    available = torch.cuda.device_count()
    if place.local_rank >= available:
        raise UserError(
            f"rank {place.rank} is number {place.local_rank + 1} on this machine, which has {available} GPU(s): use "
            f"torchrun --nproc-per-node {max(available, 1)}, or train.device=cpu"
        )
    torch.cuda.set_device(place.local_rank)


def _make_group(place: Place, on_cuda: bool, timeout: timedelta) -> Store:
    """Makes the default process group; gloo carries what lies on the host. A store of this start of the ranks alone."""
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    if place.size > 1:
        shared, _, _ = next(iter(rendezvous("env://", place.rank, place.size, timeout=timeout)))
        store = PrefixStore(_meet(shared, place, timeout), shared)
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=place.rank, world_size=place.size, timeout=timeout
    )
    return store


def _meet(store: Store, place: Place, timeout: timedelta) -> str:
    """A name for this start of the ranks, on which they agree.

    A launcher may keep its store over restarts, with all that ranks which have ended wrote: addresses, failures. And
    ranks need not agree on how often they were started. So each rank comes with a name of its own, for which the first
    one answers with its own, and says that it was heard.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    own = uuid.uuid4().hex
    if place.rank > 0:
        store.set(f"hello/{place.rank}", own)
        store.wait([f"welcome/{own}"], timeout)
        name = str(store.get(f"welcome/{own}").decode())
        store.set(f"here/{name}/{place.rank}", "")
        return name
    missing, give_up_s = set(range(1, place.size)), time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > give_up_s:
            ranks = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"of {place.size} ranks these did not start within distributed.timeout_s: {ranks}")
        for rank in sorted(missing):
            if store.check([f"here/{own}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", own)
        time.sleep(MEET_S)
    return own
