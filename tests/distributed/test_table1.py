"""Every row of the paper's table, on two ranks under torchrun: trains what one process does with twice the batch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from table1_cases import ROWS, Setting, differences, trained

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.schedule.plan import Plan

SETTING = Setting(device="cpu", steps=6, global_batch_size=100)
TOLERANCE = 1e-6
"""float32: sums over two halves of a batch are rounded in another order than over the whole; six steps of it."""


def train_rows(folder: Path, ports: dict[str, int]) -> list[str]:
    """What one rank prints of each row; every row is a group of its own."""
    said = []
    for row, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        said.append(SETTING.run_here(row, folder / row, 2))
    return said


def require_equal_to_one_process(row: str, folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["2"], "one rank writes"
    summary = json.loads((folder / "2" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["train"]["steps"] == SETTING.steps
    assert summary["train"]["rows"] == SETTING.steps * SETTING.global_batch_size
    assert summary["throughput"]["ranks"] == 2
    SETTING.run_here(row, folder, 1)
    assert differences(trained(folder / "2"), trained(folder / "1"), TOLERANCE) == [], row


@pytest.mark.timeout(600)
def test_two_ranks_train_what_one_process_does(run_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The replicas are compared after every step; a rank whose parameters differ would end the run."""
    stores = {row: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for row in ROWS}
    ports = {row: store.port for row, store in stores.items()}
    first, second = run_ranks(2, train_rows, tmp_path, ports, timeout_s=500)
    assert second == [""] * len(ROWS), "one rank speaks"
    for row, said in zip(ROWS, first, strict=True):
        assert said.count("no CUDA graphs; every operation is launched by itself") == (
            1 if row in {"row1", "erase"} else 0
        )
        require_equal_to_one_process(row, tmp_path / row)


@pytest.mark.timeout(300)
def test_a_row_under_torchrun(tmp_path: Path) -> None:
    SETTING.run_on_ranks("row2", tmp_path, 2)
    require_equal_to_one_process("row2", tmp_path)


def loaded(row: str) -> Config:
    return load_config(f"table1/{row}.yaml", catalog=ContentCatalog()).config


def test_the_rows_differ_in_their_order_of_work_alone() -> None:
    """Data, model, batch and optimizers are the same; the exact arms have no local losses."""
    configs = {row: loaded(row) for row in ROWS}
    ordered = {"detach", "stream", "loss"}
    assert len(configs) == 8
    plain = configs["erase"].model_dump(exclude={"schedule", "distributed", "towers"})
    for row, config in configs.items():
        assert config.model_dump(exclude={"schedule", "distributed", "towers"}) == plain, row
        for tower, other in zip(config.towers, configs["erase"].towers, strict=True):
            assert tower.model_dump(exclude=ordered) == other.model_dump(exclude=ordered), (row, tower.name)
            assert tower.detach == (row not in {"baseline", "exact_streams"})
            assert tower.loss == (other.loss if tower.detach else None)


def test_each_row_is_what_the_paper_says() -> None:
    found = {
        row: (
            config.schedule.early_backward,
            config.schedule.dispatch,
            config.schedule.cuda_graph,
            config.distributed.reduction,
            config.distributed.find_unused_parameters,
        )
        for row, config in ((row, loaded(row)) for row in ROWS)
    }
    assert found == {
        "baseline": (False, "blocking", "none", "ddp", False),
        "row3": (True, "blocking", "none", "ddp", False),
        "row2": (True, "blocking", "none", "ddp", True),
        "row1": (True, "non_blocking", "tower", "ddp", False),
        "row0_nonblocking": (True, "non_blocking", "none", "ddp", True),
        "row0_blocking": (True, "blocking", "none", "ddp", True),
        "exact_streams": (False, "blocking", "none", None, None),
        "erase": (True, "blocking", "step", None, None),
    }
    assert Plan.from_config(loaded("row0_blocking")) == Plan.from_config(loaded("row2"))
