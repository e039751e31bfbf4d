"""Checkpoints know nothing of ranks and plans: parts are written and read by name; runs go on over other ranks."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import call
from torch import Tensor

from erase_rec.checkpoint import CheckpointError, CheckpointManager, load, stored_layout
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.errors import UserError

WHOLE = torch.arange(60, dtype=torch.float32).reshape(10, 6)
SUMS = torch.arange(10, dtype=torch.float32)
Cut = list[tuple[tuple[int, int], tuple[int, int]]]
"""Rows and columns of a rank's parts."""
BY_ROW: list[Cut] = [[((0, 4), (0, 6))], [((4, 10), (0, 6))]]
BY_COLUMN: list[Cut] = [[((0, 10), (0, 2))], [((0, 10), (2, 4)), ((0, 10), (4, 6))], []]


def parts_of(cut: Cut, *, filled: bool) -> dict[str, Held]:
    """A rank's parts of a table and of a number a row, and a tensor that every rank has."""
    fill = 1.0 if filled else 0.0
    table = [Shard((rows[0], columns[0]), WHOLE[slice(*rows), slice(*columns)] * fill) for rows, columns in cut]
    rows = [rows for rows, columns in cut if columns[0] == 0]
    sums = [Shard((first,), SUMS[first:last] * fill) for first, last in rows]
    return {
        "tables/user": Shards((10, 6), torch.float32, table),
        "table_optimizer/user/sum": Shards((10,), torch.float32, sums),
        "model/weight": torch.full((3,), fill),
    }


def equal(held: dict[str, Held], cut: Cut) -> bool:
    expected = parts_of(cut, filled=True)
    for name, value in expected.items():
        found = held[name]
        if isinstance(value, Shards):
            assert isinstance(found, Shards)
            if not all(torch.equal(a.tensor, b.tensor) for a, b in zip(value.parts, found.parts, strict=True)):
                return False
        else:
            assert isinstance(found, Tensor)
            if not torch.equal(found, value):
                return False
    return True


def save_parts(folder: Path, limit: int | None, in_background: bool) -> str:
    """Saves by row from two ranks, and again with a second rank whose disk is full.

    What is saved in the background is overwritten at once.
    """
    with join_world(on_cuda=False, timeout_s=30, grouped=False) as world:
        manager = CheckpointManager(folder, keep=2, world=world, in_background=in_background, timeout_s=30)
        held = parts_of(BY_ROW[world.rank], filled=True)
        if world.rank:
            held["model/weight"] = torch.zeros(3)  # the first rank's counts
        manager.save(1, held, {"writer": world.rank}, is_best=True)
        if in_background:
            for value in held.values():
                for tensor in [part.tensor for part in value.parts] if isinstance(value, Shards) else [value]:
                    tensor.zero_()
            world.barrier("beside")  # over the ranks' other group
        manager.finish()
        if limit is None:
            return ""
        if world.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        big = Shards((2000, 100), torch.float32, [Shard((1000 * world.rank, 0), torch.zeros(1000, 100))])
        if not in_background:
            with pytest.raises(UserError) as caught:
                manager.save(2, {"tables/user": big}, {}, is_best=True)
            return str(caught.value)
        manager.save(2, {"tables/user": big}, {}, is_best=True)
        with pytest.raises(UserError) as caught:
            manager.finish()
        return str(caught.value)


def load_parts(path: Path) -> bool:
    with join_world(on_cuda=False, timeout_s=30, grouped=False) as world:
        held = parts_of(BY_COLUMN[world.rank], filled=False)
        load(path, held, world=world)
        return equal(held, BY_COLUMN[world.rank])


def refuse_parts(path: Path) -> str:
    with join_world(on_cuda=False, timeout_s=30, grouped=False) as world:
        with pytest.raises(CheckpointError) as caught:
            load(path, parts_of(BY_COLUMN[world.rank], filled=False), world=world)
        return str(caught.value)


@pytest.mark.parametrize("in_background", [False, True])
def test_parts_are_one_tensor_that_any_other_cut_reads(run_ranks: Any, tmp_path: Path, in_background: bool) -> None:
    run_ranks(2, save_parts, tmp_path, None, in_background)
    path = tmp_path / "step_00000001"
    assert stored_layout(path)["tables/user"] == ((10, 6), torch.float32)
    whole = {"tables/user": torch.zeros(10, 6), "table_optimizer/user/sum": torch.zeros(10)}
    whole["model/weight"] = torch.zeros(3)
    load(path, whole)
    assert torch.equal(whole["tables/user"], WHOLE)
    assert torch.equal(whole["table_optimizer/user/sum"], SUMS)
    assert whole["model/weight"].tolist() == [1.0, 1.0, 1.0]
    assert run_ranks(3, load_parts, path) == [True, True, True]
    assert json.loads((path / "state.json").read_text())["state"] == {"writer": 0}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_is_full_on_one_rank_ends_all_and_keeps_the_checkpoint_before(
    run_ranks: Any, tmp_path: Path, in_background: bool
) -> None:
    for message in run_ranks(2, save_parts, tmp_path, 20_000, in_background):
        assert "step_00000002" in message
        assert "the checkpoints saved before are kept" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", "step_00000001"]
    assert CheckpointManager(tmp_path, keep=2).latest() == (tmp_path / "step_00000001", [])


def test_a_damaged_or_missing_part_is_named_and_skipped(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(2, save_parts, tmp_path, None, False)
    path = tmp_path / "step_00000001"
    part = next(path.glob("__1_*.distcp"))
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found, messages = CheckpointManager(tmp_path, keep=2).latest()
    assert found is None
    assert part.name in messages[0]
    # A rank reads some of the files, and every rank refuses.
    for message in run_ranks(3, refuse_parts, path):
        assert f"{part.name} is not what was written" in message
    part.unlink()
    with pytest.raises(CheckpointError, match=part.name):
        load(path, parts_of(BY_ROW[0], filled=False))


OVERRIDES = [
    "data.params={rows: 601, eval_rows: 301}",
    "train.threads=1",
    "train.log_every_steps=5",
    "distributed.check_every=3",
    "eval.local_batch_size=50",
    "run.name=r",
]


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    """A command on a rank; what the run came to."""
    call(folder, "train", *arguments)
    logging.disable(logging.NOTSET)
    loaded: dict[str, Any] = json.loads((folder / "runs" / "r" / "summary.json").read_text())
    return loaded


def test_a_run_goes_on_over_other_ranks_and_plans(run_ranks: Any, tmp_path: Path) -> None:
    """1 -> 2 -> 3 -> 1 ranks: the same evaluation wherever a checkpoint is loaded, and every row once an epoch."""
    given = ["--config", "ctr_erase.yaml", *OVERRIDES, "train.local_batch_size=30"]
    length = ["train.epochs=null", "train.steps=4"]
    found = [train(tmp_path, *given, *length)]
    for ranks, steps, sharding in ((2, 7, "row_wise"), (3, 9, "auto"), (1, 12, "auto")):
        before = found[-1]
        for until in (before["train"]["steps"], steps):
            beside = "true" if ranks > 1 else "false"
            plan_of = [
                f"embedding.sharding={sharding}",
                "schedule.cuda_graph=tower",
                f"train.checkpoint_async={beside}",
            ]
            arguments = ["--resume", "runs/r", f"train.steps={until}", *plan_of]
            if ranks == 1:
                now = train(tmp_path, *arguments)
            else:
                now = run_ranks(ranks, train, tmp_path, *arguments, timeout_s=150)[0]
            assert now["status"] == "completed"
            assert now["train"]["steps"] == until
            if until == before["train"]["steps"]:
                assert now["eval"]["ne"] == pytest.approx(before["eval"]["ne"], rel=1e-6)
                assert now["eval"]["auc"] == pytest.approx(before["eval"]["auc"], rel=1e-6)
                assert now["train"]["ne"] == pytest.approx(before["train"]["ne"], rel=1e-9)
            found.append(now)
        plan = json.loads((tmp_path / "runs" / "r" / "sharding_plan.json").read_text())
        assert plan["world_size"] == (ranks if ranks > 1 else 3)
        if ranks == 2:
            assert {table["sharding"] for table in plan["tables"].values()} == {"row_wise"}
    # 4 steps of 30 rows, 3 of 60, 2 of 90 and 3 of 30.
    assert found[-1]["train"]["rows"] == 120 + 180 + 180 + 90


def test_two_ranks_with_planned_tables_end_as_one_process(run_ranks: Any, tmp_path: Path) -> None:
    given = ["--config", "ctr_erase.yaml", *OVERRIDES, "train.epochs=null", "train.steps=10"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = train(tmp_path / "one", *given, "train.local_batch_size=60")
    arguments = [*given, "train.local_batch_size=30", "embedding.sharding=auto"]
    together = run_ranks(2, train, tmp_path / "two", *arguments, timeout_s=150)[0]
    # float32 sums of the same gradients in another order, through ten steps of Adam.
    assert together["train"]["ne"] == pytest.approx(alone["train"]["ne"], rel=1e-5)
    assert together["eval"]["ne"] == pytest.approx(alone["eval"]["ne"], rel=1e-4)
    assert together["train"]["rows"] == alone["train"]["rows"] == 600


def test_spread_tables_begin_with_the_rows_that_whole_ones_begin_with(run_ranks: Any, tmp_path: Path) -> None:
    """From one process to one and to two ranks whose data have other vocabularies; rates move nothing in float32."""
    given = ["--config", "ctr_erase.yaml", *OVERRIDES[1:], "train.epochs=null", "train.local_batch_size=30"]
    folders = {name: tmp_path / name for name in ("old", "one", "two")}
    for folder in folders.values():
        folder.mkdir()
    train(folders["old"], *given, OVERRIDES[0], "train.steps=4", "optimizer.sparse.lr=0.5")
    begun = [
        *(*given, "train.steps=1", "data.params={rows: 901, eval_rows: 31}"),
        *("optimizer.dense.lr=1e-30", "optimizer.sparse.lr=1e-30"),
        *(f"train.init_from.path={folders['old']}/runs/r", "train.init_from.optimizer=true"),
    ]
    train(folders["one"], *begun)
    run_ranks(2, train, folders["two"], *begun, "embedding.sharding=row_wise", timeout_s=240)
    one, two = (tensors_of(folders[name]) for name in ("one", "two"))
    learnt = [name for name in one if name.startswith(("model/", "tables/"))]
    assert all(torch.equal(one[name], two[name]) for name in learnt)
    fates = json.loads((folders["two"] / "runs" / "r" / "warm_start.json").read_text())
    assert fates == json.loads((folders["one"] / "runs" / "r" / "warm_start.json").read_text())
    assert fates["taken"]["table_optimizer/C1/sum"] == {"from": "table_optimizer/C1/sum", "rows": "by key"}
    # C1 has other categories here: rows were sought, found under other numbers, and not all were there.
    old = tensors_of(folders["old"])["tables/C1"]
    places = {tuple(row): at for at, row in enumerate(old.tolist())}
    rows = [places.get(tuple(row), -1) for row in two["tables/C1"].tolist()]
    assert rows[:2] == [0, 1]
    assert -1 in rows
    assert sum(row >= 0 for row in rows) > 5
    assert any(row not in {-1, at} for at, row in enumerate(rows))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What the only checkpoint of the run below ``folder`` holds."""
    path = folder / "runs" / "r" / "checkpoints" / (folder / "runs" / "r" / "checkpoints" / "last").read_text()
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_layout(path).items()}
    load(path, found)
    return found
