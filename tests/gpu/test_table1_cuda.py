"""Every row of the paper's table over NCCL: ranks on GPUs of their own train as one process with the whole batch does.

On a machine with one GPU it is one rank under torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import table1_cases
import torch
import torch.distributed as dist
from table1_cases import CHECKOUT, ROWS, Setting, differences, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SETTING = Setting(device="cuda", steps=12, global_batch_size=2048)
TOLERANCE = 2e-5
"""float32 over twelve steps: sums are rounded in another order over halves of a batch, and by other kernels."""


@contextmanager
def training(setting: Setting, rows: Sequence[str], folder: Path, ranks: int) -> Iterator[None]:
    """Ranks under one torchrun train ``rows`` beside the block, and have ended well when it ends."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in rows]
    meetings = [f"{row}={store.port}" for row, store in zip(rows, stores, strict=True)]
    numbers = [setting.device, str(setting.steps), str(setting.global_batch_size)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(Path(__file__).with_name("table1_ranks.py"))
    packages = [str(CHECKOUT), str(Path(table1_cases.__file__).parent), os.environ.get("PYTHONPATH", "")]
    said = folder / "said.txt"
    with (
        said.open("w") as file,
        subprocess.Popen(
            [*torchrun, script, *numbers, str(folder), *meetings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, packages))},
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield
            assert process.wait(timeout=240) == 0, said.read_text()
        finally:
            process.terminate()  # torchrun ends its ranks


@pytest.mark.parametrize("rows", [ROWS[::2], ROWS[1::2]], ids=",".join)
def test_ranks_train_what_one_process_does(tmp_path: Path, rows: list[str]) -> None:
    """The replicas are compared after every step; a rank whose parameters differ would end the run."""
    ranks = min(2, torch.cuda.device_count())
    on_ranks, alone = tmp_path / "ranks", tmp_path / "alone"
    on_ranks.mkdir()
    with training(SETTING, rows, on_ranks, ranks):
        for row in rows:
            SETTING.run_here(row, alone / row, 1)
    for row in rows:
        folder = on_ranks / row / str(ranks)
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["train"]["steps"]) == ("completed", SETTING.steps)
        assert summary["throughput"]["ranks"] == ranks
        assert differences(trained(folder), trained(alone / row / "1"), TOLERANCE) == [], row
