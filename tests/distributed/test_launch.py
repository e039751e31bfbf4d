"""The environment that torchrun makes, and what is refused of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erase_rec.distributed import launch
from erase_rec.distributed.launch import Place, join_world
from erase_rec.errors import UserError

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def place(**variables: str) -> Place:
    return Place.read(variables)


def test_without_torchrun_a_process_is_alone() -> None:
    assert place() == Place(0, 1, 0)
    assert place(MASTER_ADDR="other") == Place(0, 1, 0)


def test_torchruns_variables_are_read() -> None:
    assert place(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", **ADDRESS) == Place(3, 4, 1)
    assert place(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0") == Place(0, 1, 0)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, LOCAL_RANK is not set; start ranks with: torchrun"),
        ({"RANK": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 'a', no number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "ranks count from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 do not fit together"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, "but MASTER_PORT not set"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match="environment: ") as caught:
        place(**variables)
    assert problem in str(caught.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(UserError, match=r"rank 5 is number 3 on this machine, which has 2 GPU\(s\): .*-node 2, or"),
        join_world(on_cuda=True, timeout_s=5, grouped=False),
    ):
        pass


@pytest.mark.parametrize("grouped", [False, True])
def test_one_process_gets_a_group_where_it_asks_for_one(grouped: bool) -> None:
    with join_world(on_cuda=False, timeout_s=5, grouped=grouped) as world:
        assert (world.rank, world.size, world.grouped) == (0, 1, grouped)
        assert dist.is_initialized() == grouped
        tensor = torch.full((3,), 2.0)
        world.mean("a", tensor).wait()
        assert tensor.tolist() == [2.0] * 3
        assert world.collectives.count == grouped
    assert not dist.is_initialized()


def test_an_error_of_a_single_process_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="planted"), join_world(on_cuda=False, timeout_s=5, grouped=True):
        raise KeyError("planted")
    assert not dist.is_initialized()


def met(stale: list[str]) -> list[int]:
    place = Place.read()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if place.rank == 0:
        for key in stale:
            store.set(key, "of a rank that has ended")
    with join_world(on_cuda=False, timeout_s=60, grouped=False) as world:
        return world.gather_objects("found", world.rank)


def test_ranks_meet_beside_what_earlier_ones_left_in_the_store(run_ranks: Any) -> None:
    stale = ["hello/1", "hello/2", "group/0", "board/failure", "board/told"]
    assert run_ranks(3, met, stale) == [[0, 1, 2]] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("hello/1", "of a rank that has ended")
    with pytest.raises(RuntimeError, match=r"of 2 ranks these did not start within distributed\.timeout_s: 1"):
        launch._meet(store, Place(0, 2, 0), timedelta(seconds=0.1))
