"""Checkpoints written beside training: the state of their step whatever comes after, one at a time, failures told."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import call

from erase_rec import Callback, Config, Trainer
from erase_rec.callbacks import CallbackError, RunState
from erase_rec.checkpoint import CheckpointManager, load, read_state, stored_layout, writing
from erase_rec.checkpoint.background import HostCopy
from erase_rec.checkpoint.stalls import Stalls
from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.distributed.world import World
from erase_rec.errors import UserError

SOON_S = 0.2
LATE_S = 60.0


class Disk:
    """A disk that keeps still until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def save(self, *arguments: Any, **options: Any) -> None:
        self.reached.set()
        assert self.go.wait(LATE_S)
        REAL_SAVE(*arguments, **options)


REAL_SAVE = writing.dcp_save


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    held = Disk()
    monkeypatch.setattr(writing, "dcp_save", held.save)
    yield held
    held.go.set()


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path, keep=2, in_background=True)


def test_what_is_published_is_the_state_at_the_save(manager: CheckpointManager, disk: Disk) -> None:
    whole = torch.arange(6.0).reshape(2, 3).t()
    part = Shards((4, 2), torch.float32, [Shard((0, 0), torch.ones(4, 2))])
    parameter = torch.nn.Parameter(torch.full((3,), 5.0))
    state = {"losses": [1.0]}
    path = manager.save(1, {"whole": whole, "part": part, "parameter": parameter}, state, is_best=True)
    assert disk.reached.wait(LATE_S)
    whole.zero_()
    part.parts[0].tensor.zero_()
    parameter.data.zero_()
    state["losses"].append(2.0)
    assert manager.published() == []
    assert manager.latest() == (None, [])
    disk.go.set()
    manager.finish()
    assert manager.published() == [path]
    assert manager.published() == []
    assert manager.best() == path
    into = {"whole": torch.empty(3, 2), "part": torch.empty(4, 2), "parameter": torch.empty(3)}
    load(path, into)
    assert torch.equal(into["whole"], torch.arange(6.0).reshape(2, 3).t())
    assert bool((into["part"] == 1).all())
    assert into["parameter"].tolist() == [5.0] * 3
    assert read_state(path) == {"losses": [1.0]}


def test_the_next_save_waits_for_the_last_and_its_copy_leaves_that_alone(
    manager: CheckpointManager, disk: Disk
) -> None:
    first = manager.save(1, {"w": torch.ones(4)}, {}, is_best=False)
    second = threading.Thread(target=manager.save, args=(2, {"w": torch.zeros(4)}, {}), kwargs={"is_best": False})
    second.start()
    second.join(SOON_S)
    assert second.is_alive()
    disk.go.set()
    second.join(LATE_S)
    manager.finish()
    assert [path.name for path in manager.published()] == ["step_00000001", "step_00000002"]
    load(first, into := {"w": torch.empty(4)})
    assert into["w"].tolist() == [1.0] * 4


def test_a_disk_that_hangs_keeps_nobody_for_longer_than_asked(manager: CheckpointManager, disk: Disk) -> None:
    manager.save(3, {"w": torch.ones(4)}, {}, is_best=False)
    manager.settle(0.01)
    with pytest.raises(UserError, match=r"step_00000003 is not written after 0\.01 seconds; .* saved before are kept"):
        manager.finish(0.01)


def full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("asked", ["published", "finish", "save"])
def test_whoever_asks_next_hears_of_a_failure_once(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    good = manager.save(1, {"w": torch.ones(4)}, {}, is_best=False)
    manager.finish()
    monkeypatch.setattr(writing, "dcp_save", full)
    manager.save(2, {"w": torch.ones(4)}, {}, is_best=False)
    manager.settle(LATE_S)
    more = (3, {"w": torch.ones(4)}, {})
    with pytest.raises(UserError, match=r"step_00000002: No space left on device; .* saved before are kept"):
        manager.save(*more, is_best=False) if asked == "save" else getattr(manager, asked)()
    assert manager.published() == [good]
    assert manager.latest() == (good, [])


def test_who_is_told_to_end_while_a_disk_hangs_waits_no_longer_than_for_a_rank(tmp_path: Path, disk: Disk) -> None:
    world = World()
    manager = CheckpointManager(tmp_path, 2, world, in_background=True, timeout_s=SOON_S)
    manager.save(1, {"w": torch.zeros(2)}, {}, is_best=False)
    assert disk.reached.wait(LATE_S)
    world.stop.noted = signal.SIGTERM
    with pytest.raises(UserError, match=r"step_00000001 is not written after 0\.2 seconds"):
        manager.save(2, {"w": torch.zeros(2)}, {}, is_best=False)


def test_copies_take_their_memory_once() -> None:
    copy = HostCopy()
    held: dict[str, Held] = {
        "w": torch.ones(3),
        "t": Shards((2, 2), torch.float64, [Shard((1, 0), torch.ones(1, 2, dtype=torch.float64))]),
    }
    first = copy.of(held)
    held["w"] = torch.full((3,), 2.0)
    second = copy.of(held)
    assert isinstance(first["w"], torch.Tensor)
    assert isinstance(second["w"], torch.Tensor)
    assert first["w"].data_ptr() == second["w"].data_ptr()
    assert second["w"].tolist() == [2.0] * 3
    part = second["t"]
    assert isinstance(part, Shards)
    assert (part.shape, part.dtype, part.parts[0].offsets) == (torch.Size((2, 2)), torch.float64, (1, 0))


class Ticks:
    """A clock that goes on by one a mark."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


def test_stalls_are_told_once_and_summed() -> None:
    stalls = Stalls(Ticks())
    assert stalls.scalars() == {}
    assert stalls.sentence() is None
    for _ in range(2):
        with stalls.standing_still():
            pass
    assert stalls.scalars() == {"time/checkpoint_stall_s": 2.0}
    assert stalls.scalars() == {}
    with stalls.standing_still(saves=0):
        pass
    assert stalls.sentence() == "2 checkpoints saved; training stood still for 3.00 s"


RUN = [
    "data.params={rows: 601, eval_rows: 101}",
    *("train.epochs=null", "train.steps=6", "train.local_batch_size=50", "train.threads=1", "train.log_every_steps=2"),
    *("train.checkpoint_every_steps=2", "train.keep_checkpoints=9", "run.name=r"),
]


def test_a_run_leaves_the_checkpoints_that_it_leaves_without_the_thread(tmp_path: Path) -> None:
    told: list[Path] = []

    class Told(Callback):
        def on_checkpoint(self, run: RunState, path: Path) -> None:
            assert path.is_dir()
            told.append(path)

    for name in ("false", "true"):
        overrides = [*RUN, f"run.dir={tmp_path / name}", f"train.checkpoint_async={name}"]
        Trainer(Config.from_yaml("ctr_erase.yaml", overrides), callbacks=[Told()], progress=False).fit()
    alone, beside = told[: len(told) // 2], told[len(told) // 2 :]
    assert [path.name for path in alone] == [path.name for path in beside]
    assert [path.name for path in alone] == [f"step_0000000{step}" for step in (2, 4, 6, 6)], "6 is also the best"
    for expected, found in zip(alone, beside, strict=True):
        layout = stored_layout(expected)
        assert layout == stored_layout(found)
        values = [{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout.items()} for _ in range(2)]
        load(expected, values[0])
        load(found, values[1])
        assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
        assert read_state(expected) == read_state(found)
    rows = (tmp_path / "true" / "r" / "metrics.jsonl").read_text()
    assert rows.count("time/checkpoint_stall_s") == 2, "of steps 2 and 4, logged at steps 4 and 6"


def test_a_full_disk_beside_training_ends_the_run_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def second_is_full(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            full()
        REAL_SAVE(*arguments, **options)

    monkeypatch.setattr(writing, "dcp_save", second_is_full)
    ended = call(tmp_path, "train", "--config", "ctr_erase.yaml", *RUN, "train.checkpoint_async=true", expect=2)
    assert "step_00000004: No space left on device" in ended.stderr
    folder = tmp_path / "runs" / "r" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last", "step_00000002"]
    assert calls == 2, "training goes no further than the next checkpoint"


def test_a_run_that_ends_by_an_error_waits_for_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Callback):
        def on_step(self, run: RunState) -> None:
            if run.step == 3:
                raise RuntimeError("no more")

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(SOON_S)  # the run has ended by then, unless it waits
        REAL_SAVE(*arguments, **options)

    monkeypatch.setattr(writing, "dcp_save", slow)
    overrides = [*RUN, f"run.dir={tmp_path}", "train.checkpoint_async=true"]
    with pytest.raises(CallbackError, match="no more"):
        Trainer(Config.from_yaml("ctr_erase.yaml", overrides), callbacks=[Fails()], progress=False).fit()
    assert (tmp_path / "r" / "checkpoints" / "last").read_text() == "step_00000003"


def test_a_run_that_is_told_to_end_waits_for_a_disk_no_longer_than_for_a_rank(tmp_path: Path, disk: Disk) -> None:
    class Told(Callback):
        def on_step(self, run: RunState) -> None:
            if run.step == 3:
                assert disk.reached.wait(LATE_S)
                os.kill(os.getpid(), signal.SIGTERM)

    overrides = [*RUN, f"run.dir={tmp_path}", "train.checkpoint_async=true", "distributed.timeout_s=0.2"]
    trainer = Trainer(Config.from_yaml("ctr_erase.yaml", overrides), callbacks=[Told()], progress=False)
    with pytest.raises(UserError, match=r"step_00000002 is not written after 0\.2 seconds; .* saved before are kept"):
        trainer.fit()
    assert not disk.go.is_set()
    assert trainer.run.summary is not None
    assert trainer.run.summary.train.steps == 3
