"""Checkpoints: exact round trip, atomic under kills, retention, damage and misfits named, full disks survived."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import call
from torch import Tensor

from erase_rec import checkpoint
from erase_rec.checkpoint import CheckpointError, CheckpointFormatError, CheckpointManager, load, read_state
from erase_rec.errors import UserError
from erase_rec.random_state import restore_rng, rng_state

CPU = torch.device("cpu")


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "dense/towers.a.weight": torch.full((4, 3), value),
        "table/user": torch.arange(10, dtype=torch.float64).reshape(2, 5).t() * value,  # not contiguous
        "optimizer/step": torch.tensor(value),
        "rng/cpu": torch.full((6,), int(value), dtype=torch.uint8),
        "empty": torch.empty(0, 8),
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 99) for name, tensor in tensors().items()}


def loaded(path: Path) -> dict[str, Tensor]:
    into = blank()
    checkpoint.load(path, into)
    return into


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", keep=2)


def test_round_trip_is_exact_in_place_and_keeps_state(manager: CheckpointManager) -> None:
    state = {"epoch": 2, "step_in_epoch": 7, "best": {"since": 1}, "ne": math.nan, "name": "días"}
    path = manager.save(10, tensors(3.0), state, is_best=False)
    assert path.name == "step_00000010"
    into = blank()
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    checkpoint.load(path, into)
    assert same(into, tensors(3.0))
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses
    found = checkpoint.read_state(path)
    assert math.isnan(found.pop("ne"))
    assert found == {name: value for name, value in state.items() if name != "ne"}


def test_parameters_are_filled_in_place(manager: CheckpointManager) -> None:
    path = manager.save(1, {"w": torch.ones(3)}, {}, is_best=False)
    parameter = torch.nn.Parameter(torch.zeros(3))
    checkpoint.load(path, {"w": parameter})
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.requires_grad


def test_nothing_is_there_before_the_first_save(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.recover()
    assert manager.latest() == (None, [])
    assert manager.best() is None
    assert not (tmp_path / "checkpoints").exists()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_retention_keeps_the_newest_and_the_best(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in range(1, 7):
        manager.save(step, tensors(step), {}, is_best=step == 2)
    folder = tmp_path / "checkpoints"
    assert names(folder) == ["best", "last", "step_00000002", "step_00000005", "step_00000006"]
    assert manager.best() == folder / "step_00000002"
    assert manager.latest() == (folder / "step_00000006", [])
    assert (folder / "last").read_text() == "step_00000006"


def test_a_new_best_releases_the_old_one(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in range(1, 6):
        manager.save(step, tensors(), {}, is_best=step in {1, 3})
    assert names(tmp_path / "checkpoints") == ["best", "last", "step_00000003", "step_00000004", "step_00000005"]


def test_steps_of_nine_digits_are_newer_than_those_of_eight(manager: CheckpointManager) -> None:
    manager.save(99_999_999, tensors(), {}, is_best=False)
    newest = manager.save(100_000_000, tensors(), {}, is_best=False)
    assert manager.latest() == (newest, [])


def test_saving_a_step_again_replaces_it(manager: CheckpointManager, tmp_path: Path) -> None:
    manager.save(4, tensors(1.0), {"try": 1}, is_best=False)
    path = manager.save(4, tensors(2.0), {"try": 2}, is_best=True)
    assert same(loaded(path), tensors(2.0))
    assert checkpoint.read_state(path) == {"try": 2}
    assert names(tmp_path / "checkpoints") == ["best", "last", "step_00000004"]


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit flip": (lambda path: flip_byte(path / "__0_0.distcp"), "__0_0.distcp is not what was written"),
    "cut tensors": (lambda path: cut(path / "__0_0.distcp"), "__0_0.distcp has .* bytes, .* were written"),
    "no tensors": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read"),
    "no index": (lambda path: (path / ".metadata").unlink(), ".metadata cannot be read"),
    "no record": (lambda path: (path / "state.json").unlink(), "state.json cannot be read"),
    "cut record": (lambda path: cut(path / "state.json"), "state.json is not JSON"),
    "no text": (lambda path: (path / "state.json").write_bytes(b"\xff\xfe"), "state.json is not JSON"),
    "foreign record": (lambda path: (path / "state.json").write_text("[]"), "not the record of a checkpoint"),
}


@pytest.mark.parametrize("found", [1, 9])
def test_a_checkpoint_of_another_format_is_refused_not_skipped(manager: CheckpointManager, found: int) -> None:
    """Starting again from an older checkpoint, or from nothing, would throw away a run that is not damaged."""
    manager.save(1, tensors(1.0), {}, is_best=False)
    path = manager.save(2, tensors(2.0), {}, is_best=False)
    (path / "state.json").write_text(f'{{"format": {found}, "files": {{}}, "state": {{}}}}')
    for read in (manager.latest, lambda: load(path, tensors(0.0)), lambda: read_state(path)):
        with pytest.raises(
            CheckpointFormatError, match=f"its format is {found}, this version reads {checkpoint.FORMAT}; continue with"
        ):
            read()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_and_named(manager: CheckpointManager, damage: str) -> None:
    good = manager.save(1, tensors(1.0), {}, is_best=False)
    bad = manager.save(2, tensors(2.0), {}, is_best=False)
    harm, reason = DAMAGES[damage]
    harm(bad)
    path, messages = manager.latest()
    assert path == good
    assert len(messages) == 1
    assert str(bad) in messages[0]
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(bad, blank())


def test_an_index_that_torch_cannot_read_is_damage(manager: CheckpointManager) -> None:
    path = manager.save(1, tensors(), {}, is_best=False)
    (path / ".metadata").write_bytes(b"no pickle")
    record = json.loads((path / "state.json").read_text())
    record["files"][".metadata"] = {"bytes": 9, "crc32": zlib.crc32(b"no pickle")}
    (path / "state.json").write_text(json.dumps(checkpoint.sealed(record)))
    with pytest.raises(CheckpointError, match="cannot read its tensor index"):
        checkpoint.verify(path)


def test_retention_never_removes_sound_checkpoints_for_damaged_newer_ones(manager: CheckpointManager) -> None:
    for step in (10, 20, 30):
        manager.save(step, tensors(step), {}, is_best=False)
    for path in manager._folder.glob("step_000000[23]0"):
        (path / "state.json").unlink()
    manager.save(12, tensors(12.0), {}, is_best=False)
    path, messages = manager.latest()
    assert path is not None
    assert path.name == "step_00000012"
    assert len(messages) == 2


def test_misfits_are_refused_with_their_names_and_change_nothing(manager: CheckpointManager) -> None:
    path = manager.save(1, tensors(), {}, is_best=False)
    into = blank()
    into["new"] = into.pop("empty")
    into["optimizer/step"] = torch.zeros(2)
    into["table/user"] = into["table/user"].float()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, into)
    message = str(caught.value)
    assert "it lacks new;" in message
    assert "it also holds empty;" in message
    assert "optimizer/step (float32 [] there, float32 [2] here)" in message
    assert "table/user (float64 [5, 2] there, float32 [5, 2] here)" in message
    assert bool((into["dense/towers.a.weight"] == 99).all())


def test_many_misfits_are_counted_not_listed(manager: CheckpointManager) -> None:
    path = manager.save(1, tensors(), {}, is_best=False)
    with pytest.raises(CheckpointError, match=r"it lacks more\.0, .* and 92 more;"):
        checkpoint.load(path, blank() | {f"more.{number}": torch.zeros(1) for number in range(100)})


def test_a_subset_can_be_loaded(manager: CheckpointManager) -> None:
    path = manager.save(1, tensors(5.0), {}, is_best=False)
    into = {"optimizer/step": torch.tensor(0.0)}
    checkpoint.load(path, into, subset=True)
    assert into["optimizer/step"].item() == 5.0


def saved(manager: CheckpointManager, step: int, content: dict[str, Tensor], state: dict[str, Any]) -> None:
    manager.save(step, content, state, is_best=True)
    manager.finish()


def killed_save(folder: Path, step: int, value: float, operations: int, *, in_background: bool) -> bool:
    """Saves in a child that is killed before its n-th operation on the file system; True where it got to the end."""
    child = os.fork()
    if child == 0:
        left = operations

        def before(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} and str(folder) in str(arguments):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(before)
            manager = CheckpointManager(folder, keep=1, in_background=in_background)
            saved(manager, step, tensors(value), {"value": value})
            status = 0
        finally:
            os._exit(status)  # never back into pytest
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, "the save failed by itself"
    return status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("step", "in_background"), [(2, True), (1, False)], ids=["next step, beside training", "same step again"]
)
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_checkpoint_whole(
    tmp_path: Path, step: int, in_background: bool
) -> None:
    done, operations, old_survived = False, 0, 0
    while not done:
        folder = tmp_path / str(operations)
        manager = CheckpointManager(folder, keep=1)
        manager.save(1, tensors(1.0), {"value": 1.0}, is_best=True)
        done = killed_save(folder, step, 2.0, operations, in_background=in_background)
        manager.recover()
        path, messages = manager.latest()
        assert path is not None
        assert messages == []
        value = checkpoint.read_state(path)["value"]
        assert same(loaded(path), tensors(value))
        manager.name_again(path)
        assert manager.best() == path, "each was the best of its time"
        assert (folder / "last").read_text() == path.name
        assert set(names(folder)) <= {"best", "last", "step_00000001", "step_00000002"}
        old_survived += value == 1.0
        operations += 1
    assert 5 < old_survived < operations, "kills fell before and after the publication"


def test_a_run_goes_on_from_a_checkpoint_that_was_to_be_the_best(tmp_path: Path) -> None:
    run = ("data.params={rows: 200, eval_rows: 50}", "train.local_batch_size=100", "train.threads=1", "run.name=r")
    call(tmp_path, "train", "--config", "ctr_erase.yaml", *run)
    best = tmp_path / "runs" / "r" / "checkpoints" / "best"
    name = best.read_text()
    best.unlink()  # its save was killed between its two names
    call(tmp_path, "train", "--resume", "runs/r")
    assert best.read_text() == name


def test_leftovers_of_killed_saves_are_no_checkpoints_and_are_cleared(
    manager: CheckpointManager, tmp_path: Path
) -> None:
    good = manager.save(1, tensors(), {}, is_best=False)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000002.partial").mkdir()
    (folder / "step_00000002.partial" / "__0_0.distcp").write_bytes(b"half")
    (folder / "best.partial").write_text("step_0")
    assert manager.latest() == (good, [])
    manager.recover()
    assert names(folder) == ["last", "step_00000001"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_one_message_and_keeps_the_earlier_checkpoint(tmp_path: Path, in_background: bool) -> None:
    resource = pytest.importorskip("resource")
    manager = CheckpointManager(tmp_path / "checkpoints", keep=2, in_background=in_background)
    good = manager.save(1, tensors(), {}, is_best=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a write beyond fails, as on a full disk
    try:
        with pytest.raises(UserError, match=r"cannot write checkpoint .*step_00000002: .*saved before are kept"):
            saved(manager, 2, {"big": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert manager.latest() == (good, [])
    assert names(tmp_path / "checkpoints") == ["last", "step_00000001"]


def test_a_failing_rename_restores_the_checkpoint_that_was_to_be_replaced(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manager.save(1, tensors(1.0), {}, is_best=False)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "step_00000001.partial":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        manager.save(1, tensors(2.0), {}, is_best=False)
    assert manager.latest() == (path, [])
    assert same(loaded(path), tensors(1.0))


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write checkpoint .*Not a directory"):
        CheckpointManager(tmp_path / "file" / "checkpoints", keep=1).save(1, tensors(), {}, is_best=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TypeError])
def test_what_is_no_disk_error_comes_through_as_itself(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error):
        manager.save(1, tensors(), {}, is_best=False)


def test_random_numbers_go_on_where_they_stopped() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    saved = {name: state.clone() for name, state in rng_state(CPU).items()}
    expected = torch.rand(5)
    torch.manual_seed(4)
    restore_rng(saved, CPU)
    assert torch.equal(torch.rand(5), expected)
    assert set(saved) == {"cpu"}
