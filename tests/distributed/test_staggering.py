"""A slow rank shows: the others wait for it in collectives."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from erase_rec.distributed.launch import join_world
from erase_rec.distributed.staggering import Staggering
from erase_rec.distributed.world import World

HELD_S = 0.5


def held_up(slow: int) -> list[dict[str, float]]:
    """Rank ``slow`` asks for a reduction only when the other has waited in it for a while."""
    with join_world(on_cuda=False, timeout_s=60, grouped=False) as world:
        store = dist.distributed_c10d._get_default_store()
        staggering, found = Staggering(world), []
        for step in range(2):
            with staggering.step():
                if world.rank == slow:
                    store.wait([f"waits {step}"])
                    time.sleep(HELD_S)
                pending = world.sum("tower:deep", torch.ones(3))
                if world.rank != slow:
                    store.set(f"waits {step}", "")
                pending.wait()
            world.barrier("outside of the step")
            found.append(staggering.scalars(None))
        return [*found, staggering.scalars(7.0 - world.rank)]


def test_the_slow_rank_is_named(run_ranks: Any) -> None:
    for slow in (0, 1):
        of_rank = run_ranks(2, held_up, slow)
        assert of_rank[0] == of_rank[1]
        *on_host, on_device = of_rank[0]
        for found in on_host:
            assert found["time/slowest_rank"] == slow
            assert found["time/stagger_ms"] > 0
        assert on_device == {"time/stagger_ms": 1.0, "time/slowest_rank": 1.0}


def test_one_rank_is_not_compared() -> None:
    staggering = Staggering(World())
    with staggering.step():
        pass
    assert staggering.scalars(None) == {}
