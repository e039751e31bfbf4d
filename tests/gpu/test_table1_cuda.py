"""Every row of the paper's table over NCCL: ranks on GPUs of their own train as one process with the whole batch does.

On a machine with one GPU it is one rank under torchrun.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from table1_cases import ROWS, Setting, differences, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SETTING = Setting(device="cuda", steps=12, global_batch_size=2048)
TOLERANCE = 2e-5
"""float32 over twelve steps: sums are rounded in another order over halves of a batch, and by other kernels."""


@pytest.mark.parametrize("row", ROWS)
def test_ranks_train_what_one_process_does(tmp_path: Path, row: str) -> None:
    """The replicas are compared after every step; a rank whose parameters differ would end the run."""
    ranks = min(2, torch.cuda.device_count())
    SETTING.run_on_ranks(row, tmp_path, ranks)
    folder = (tmp_path / str(ranks)).rename(tmp_path / "ranks")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["train"]["steps"]) == ("completed", SETTING.steps)
    assert summary["throughput"]["ranks"] == ranks
    SETTING.run_here(row, tmp_path, 1)
    assert differences(trained(folder), trained(tmp_path / "1"), TOLERANCE) == []
