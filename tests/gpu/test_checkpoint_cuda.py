"""Checkpoints of a model on a GPU: copies in page-locked memory are of their moment; rows are taken on the device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from erase_rec.checkpoint import CheckpointManager, load, writing
from erase_rec.checkpoint.background import HostCopy
from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.distributed.world import World
from erase_rec.warm_start.filling import fill
from erase_rec.warm_start.plan import Rows, Taken

pytestmark = pytest.mark.gpu


def test_a_copy_waits_for_the_steps_before_and_is_page_locked() -> None:
    weight = torch.zeros(64, 1024, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-3
    weight += 1  # behind all of that on the stream
    held: dict[str, Held] = {"w": weight, "t": Shards((64, 1024), torch.float32, [Shard((0, 0), weight)])}
    copies = HostCopy().of(held)
    weight += 1
    found = copies["w"]
    assert isinstance(found, torch.Tensor)
    assert found.is_pinned()
    assert bool((found == 1).all())
    part = copies["t"]
    assert isinstance(part, Shards)
    assert bool((part.parts[0].tensor == 1).all())


def test_replays_go_on_while_the_state_before_them_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, save = threading.Event(), writing.dcp_save

    def held(*arguments: Any, **options: Any) -> None:
        assert go.wait(60)
        save(*arguments, **options)

    monkeypatch.setattr(writing, "dcp_save", held)
    weight = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight += 1
    graph.replay()
    manager = CheckpointManager(tmp_path, keep=2, in_background=True)
    path = manager.save(1, {"w": weight}, {}, is_best=False)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((weight == 6).all())
    go.set()
    manager.finish()
    load(path, {"w": weight})
    assert bool((weight == 1).all())


@pytest.mark.parametrize("source", [None, torch.tensor([0, 1, 3, -1, 2])], ids=["by number", "by key"])
def test_rows_are_taken_into_tables_on_the_device(tmp_path: Path, source: torch.Tensor | None) -> None:
    old = torch.arange(8.0).reshape(4, 2)
    path = CheckpointManager(tmp_path, keep=1).save(1, {"tables/t": old}, {}, is_best=False)
    table = torch.full((5, 2), -1.0, device="cuda")
    fill(path, {"tables/t": table}, {"tables/t": Taken("tables/t", Rows(source))}, World())
    order = [0, 1, 2, 3, -1] if source is None else source.tolist()
    expected = torch.stack([old[row] if row >= 0 else torch.full((2,), -1.0) for row in order])
    assert torch.equal(table.cpu(), expected)
