"""The pickled index of a checkpoint runs no code, and what it says is checked."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from erase_rec import checkpoint, tensor_index
from erase_rec.checkpoint import CheckpointError, CheckpointManager
from erase_rec.tensor_index import read_index

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool)


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(1.0)}
    return CheckpointManager(tmp_path / "checkpoints", keep=1).save(1, tensors, {"a": 1}, is_best=False)


def put(path: Path, index: bytes) -> None:
    """Replaces the index, and puts every checksum right."""
    (path / ".metadata").write_bytes(index)
    record = json.loads((path / "state.json").read_text())
    record["files"][".metadata"] = {"bytes": len(index), "crc32": zlib.crc32(index)}
    (path / "state.json").write_text(json.dumps(checkpoint.sealed(record)))


def changed(path: Path, change: Callable[[Metadata], Any]) -> None:
    index = read_index((path / ".metadata").read_bytes())
    change(index)
    put(path, pickle.dumps(index))


def test_an_index_is_read_as_torch_reads_it(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    found, expected = read_index(content), pickle.loads(content)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert {name: dtype for name, (_, dtype) in checkpoint.stored_layout(saved).items()} == {
        **{str(dtype): dtype for dtype in DTYPES},
        "scalar": torch.float32,
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_an_index_is_not_run(saved: Path, tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    hostile = pickle.dumps(Touches(marker), protocol)
    put(saved, hostile)
    for read in (checkpoint.verify, checkpoint.stored_layout, lambda path: checkpoint.load(path, {})):
        with pytest.raises(CheckpointError, match="has no place in an index of tensors"):
            read(saved)
    assert not marker.exists()
    pickle.loads(hostile)  # the test can fail
    assert marker.exists()


def test_code_hidden_among_an_indexs_own_values_is_not_run(saved: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    changed(saved, lambda index: setattr(index, "planner_data", Touches(marker)))
    with pytest.raises(CheckpointError, match="has no place in an index"):
        checkpoint.stored_layout(saved)
    assert not marker.exists()


def _first(index: Metadata) -> Any:
    return next(iter(index.state_dict_metadata.values()))


def _place(index: Metadata) -> Any:
    return next(iter(index.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: setattr(index, "state_dict_metadata", [1]), "it lists nothing"),
        (lambda index: setattr(index, "storage_data", None), "it lists nothing"),
        (lambda index: index.state_dict_metadata.update({"x": 1}), "'x'"),
        (lambda index: setattr(_first(index).properties, "dtype", 7), "has no dtype"),
        (lambda index: setattr(_first(index), "size", (3, 2)), "has no shape"),
        (lambda index: setattr(_first(index).chunks[0], "sizes", torch.Size([1 << 40, 2])), "a part outside"),
        (lambda index: setattr(_first(index).chunks[0], "offsets", torch.Size([1, 0])), "a part outside"),
        (lambda index: setattr(_place(index), "relative_path", "../../../etc/passwd"), "a tensor in '../"),
        (lambda index: setattr(_place(index), "relative_path", "/etc/passwd"), "a tensor in '/etc"),
        (lambda index: setattr(_place(index), "offset", -1), "a tensor at -1"),
    ],
)
def test_values_that_an_index_cannot_have_are_refused(
    saved: Path, change: Callable[[Metadata], Any], words: str
) -> None:
    changed(saved, change)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.stored_layout(saved)


def test_an_index_that_says_other_than_the_files_is_damage(saved: Path) -> None:
    changed(saved, lambda index: setattr(_place(index), "offset", 1 << 40))
    into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in checkpoint.stored_layout(saved).items()}
    with pytest.raises(CheckpointError, match="cannot be used"):
        checkpoint.load(saved, into)


def test_an_index_larger_than_any_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_index, "MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="bytes, more than any"):
        checkpoint.stored_layout(saved)


def test_a_number_changed_in_the_record_is_damage(saved: Path) -> None:
    state = saved / "state.json"
    state.write_text(state.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(CheckpointError, match=r"state\.json was changed after it was written"):
        checkpoint.read_state(saved)


def test_a_record_nested_without_end_is_no_json(saved: Path) -> None:
    (saved / "state.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        checkpoint.read_state(saved)


@pytest.mark.parametrize("mark", [b"../../elsewhere", b"/etc", b"\xff", b"w" * 5000, b"", b"step_00000001\n", b"a\0b"])
def test_a_mark_of_the_best_that_names_no_checkpoint_is_refused(saved: Path, mark: bytes) -> None:
    (saved.parent / "best").write_bytes(mark)
    with pytest.raises(CheckpointError, match="best names no checkpoint"):
        CheckpointManager(saved.parent, keep=1).best()
