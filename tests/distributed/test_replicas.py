"""The guard finds replicas that differ in one bit, and names the block and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from erase_rec.distributed.launch import join_world
from erase_rec.distributed.replicas import CHUNK, DivergenceError, ReplicaGuard, RunningStatistics, bit_hash
from erase_rec.distributed.world import World


class Model:
    """Two towers, an over-arch and two tables, as far as the guard looks."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        names = ("towers.cross.w", "towers.cross.b", "towers.crossed.w", "over_arch.w")
        self.dense = {name: torch.randn(3, 4, generator=generator) for name in names}
        self.table = {name: torch.randn(50, 4, generator=generator) for name in ("c1", "c2")}
        self.embeddings = self

    def tower_names(self) -> Sequence[str]:
        return ("cross", "crossed")

    def dense_state(self) -> dict[str, Tensor]:
        return self.dense

    def tables(self) -> Mapping[str, Tensor]:
        return self.table


def compare(change: str | None, rank: int) -> str | None:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        model = Model()
        guard = ReplicaGuard(world, model, 10)  # type: ignore[arg-type]
        guard.check(0)
        if world.rank == rank:
            if change in model.dense:
                value = model.dense[change]
                value[1, 2] = torch.nextafter(value[1, 2], torch.tensor(9.0))
            elif change in model.table:
                model.table[change][49, 3] *= -1
            elif change == "log":
                world.collectives.record("tower:cross", 12, torch.float32)
            elif change is not None:
                world.collectives.record("rest.0", 12, torch.float32)
        if change == "order" and world.rank != rank:
            world.collectives.record("rest.1", 12, torch.float32)
        try:
            guard.check(20)
        except DivergenceError as error:
            return str(error)
        return None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("towers.cross.b", "tower cross"),
        ("towers.crossed.w", "tower crossed"),
        ("over_arch.w", "over-arch"),
        ("c2", "table c2"),
    ],
)
def test_one_bit_of_one_rank_is_found(run_ranks: Any, change: str, names: str) -> None:
    for message in run_ranks(3, compare, change, 1):
        assert message.startswith(
            f"step 20: the ranks' parameters differ: {names} (ranks 0, 2 | rank 1); their gradients"
        )


def test_equal_ranks_pass(run_ranks: Any) -> None:
    assert run_ranks(2, compare, None, 0) == [None, None]


def test_a_collective_that_one_rank_did_not_ask_for_is_named(run_ranks: Any) -> None:
    for message in run_ranks(2, compare, "order", 1):
        assert "step 20: the ranks asked for different collectives" in message
        assert "rank 0 for rest.1 at step 0 (12 x float32), rank 1 for rest.0 at step 0 (12 x float32)" in message


def test_a_log_that_is_longer_is_found(run_ranks: Any) -> None:
    for message in run_ranks(2, compare, "log", 0):
        # Before: the first comparison's two gatherings.
        assert message == "step 20: the ranks asked for different collectives: rank 0 for 3, rank 1 for 2 in all"


class Normalised(nn.Module):
    """A trained and a frozen tower and an over-arch, all with running statistics, as far as averaging looks."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.crossed, self.over_arch = nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4)

    def tower_names(self) -> Sequence[str]:
        return ("cross", "crossed")

    def tower(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def averaged_statistics(ranks: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batches_SRBN = torch.randn(6, ranks, 5, 4, generator=generator)
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        model, expected = Normalised(), [nn.BatchNorm1d(4) for _ in range(ranks)]
        assert model.crossed.running_mean is not None
        model.crossed.running_mean.fill_(world.rank)
        statistics = RunningStatistics(world, model)  # type: ignore[arg-type]
        for batches_RBN in batches_SRBN:
            for rank, batch_BN in enumerate(batches_RBN):
                expected[rank](batch_BN)
            model.cross(batches_RBN[world.rank])
            statistics.average()
        for name in ("running_mean", "running_var"):
            found = model.cross.get_buffer(name)
            of_ranks = torch.stack([norm.get_buffer(name) for norm in expected])
            assert torch.allclose(found, of_ranks.mean(dim=0), atol=1e-6)
            assert all(torch.equal(found, other) for other in world.gather("test", found)), "equal bit for bit"
        assert (model.crossed.running_mean == world.rank).all(), "a frozen tower keeps its statistics"


@pytest.mark.parametrize("ranks", [2, 3])
def test_running_statistics_become_the_mean_over_the_ranks(run_ranks: Any, ranks: int) -> None:
    run_ranks(ranks, averaged_statistics, ranks)


def test_comparisons_are_due_at_the_start_and_every_so_many_steps() -> None:
    guard = ReplicaGuard(World(size=2), Model(), 10)  # type: ignore[arg-type]
    assert [step for step in range(25) if guard.is_due(step)] == [0, 10, 20]
    alone = ReplicaGuard(World(), Model(), 10)  # type: ignore[arg-type]
    assert not any(alone.is_due(step) for step in range(25))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_the_hash_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(-100, 100, (CHUNK + 300,), generator=generator).to(dtype)
    expected = bit_hash([values])
    assert bit_hash([values.clone()]) == expected
    for position in (0, 1, CHUNK - 1, CHUNK, CHUNK + 299):
        changed = values.clone()
        changed[position] += 1
        assert bit_hash([changed]) != expected
    swapped = values.clone()
    swapped[0], swapped[CHUNK] = values[CHUNK] + 1, values[0]
    assert bit_hash([swapped]) != expected
    assert bit_hash([values[:10], values[10:20]]) != bit_hash([values[10:20], values[:10]])


def test_the_hash_tells_zero_from_minus_zero() -> None:
    assert bit_hash([torch.tensor([0.0])]) != bit_hash([torch.tensor([-0.0])])
