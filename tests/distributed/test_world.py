"""Collectives through the one door: results, log, main thread only, what a failure says."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from erase_rec.distributed.collective_log import CollectiveLog, LogTail, first_difference
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World


def joined(body: Any) -> Any:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        return body(world)


def every_collective(world: World) -> dict[str, Any]:
    own = torch.arange(3.0) + world.rank
    mean, total = own.clone(), own.clone()
    world.mean("a", mean).wait()
    world.sum("b", total).wait()
    return {
        "mean": mean,
        "sum": total,
        "gather": torch.stack(world.gather("c", own.unsqueeze(1).expand(3, 2).t())),
        "to_first": world.gather_to_first("d", own),
        "objects": world.gather_objects("e", ("rank", world.rank)),
        "broadcast": world.broadcast_object("f", world.rank + 7),
        "digest": world.collectives.digest(),
        "groups": [entry.group for entry in world.collectives.recent],
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_those_of_all_ranks(run_ranks: Any, size: int) -> None:
    results = run_ranks(size, joined, every_collective)
    shares = torch.stack([torch.arange(3.0) + rank for rank in range(size)])
    for rank, result in enumerate(results):
        # Divided before the sum: one rounding a rank.
        assert torch.allclose(result["mean"], shares.mean(0), rtol=1e-6)
        assert torch.equal(result["sum"], shares.sum(0))
        assert torch.equal(result["gather"], shares.unsqueeze(1).expand(size, 2, 3))
        assert result["objects"] == [("rank", other) for other in range(size)]
        assert result["broadcast"] == 7
        assert (result["to_first"] is None) == (rank > 0)
    assert torch.equal(torch.stack(results[0]["to_first"]), shares)
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["groups"] == (["a", "b", "c", "d", "e", "f"] if size > 1 else [])


def ask_from_a_thread(world: World) -> str:
    raised: list[str] = []

    def ask() -> None:
        try:
            world.sum("tower:cross", torch.zeros(1))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask, name="worker 0")
    thread.start()
    thread.join()
    assert world.collectives.count == 0
    return raised[0]


def test_only_the_main_thread_may_ask(run_ranks: Any) -> None:
    for message in run_ranks(2, joined, ask_from_a_thread):
        assert message.startswith("collective tower:cross was asked for by thread worker 0; only the main thread may")


def test_one_process_without_a_group_needs_none() -> None:
    world, own = World(), torch.ones(2)
    world.mean("a", own).wait()
    assert torch.equal(own, torch.ones(2))
    assert world.gather("b", own)[0] is own
    assert world.broadcast_object("c", 3) == 3
    assert world.collectives.count == 0


def logged(*groups: str) -> CollectiveLog:
    log = CollectiveLog()
    for step, group in enumerate(groups):
        log.step = step
        log.record(group, 4, torch.float32)
    return log


def test_the_digest_tells_order_group_size_and_type() -> None:
    def digest(*entries: tuple[str, int, torch.dtype]) -> str:
        log = CollectiveLog()
        for entry in entries:
            log.record(*entry)
        return log.digest()

    a, b = ("a", 4, torch.float32), ("b", 4, torch.float32)
    digests = [
        digest(a, b),
        digest(b, a),
        digest(a),
        digest(a, ("b", 5, torch.float32)),
        digest(a, ("b", 4, torch.int)),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(a, b) == digests[0]


def test_the_first_difference_of_logs_is_named() -> None:
    same, other = logged("a", "b", "c").tail(), logged("a", "x", "c").tail()
    assert first_difference({0: same, 1: same}) is None
    assert first_difference({0: same, 1: other}) == (
        "the ranks asked for different collectives (number 1): rank 0 for b at step 1 (4 x float32), "
        "rank 1 for x at step 1 (4 x float32)"
    )
    assert first_difference({0: same, 1: logged("a").tail()}) is None, "a rank that is behind asked for nothing else"


def test_logs_are_compared_where_both_are_kept() -> None:
    assert first_difference({0: LogTail(9, ["h", "i"]), 1: LogTail(8, ["g", "h"])}) is None
    assert "number 8" in str(first_difference({0: LogTail(9, ["h", "i"]), 1: LogTail(9, ["h", "x"])}))
