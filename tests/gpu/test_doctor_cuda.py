"""``erase-rec doctor`` on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from erase_rec.cli.doctor_machine import look, machine_checks

pytestmark = pytest.mark.gpu


def test_the_device_is_seen_and_captures(tmp_path: Path) -> None:
    seen = look(tmp_path / "runs")
    assert len(seen.gpus) == torch.cuda.device_count()
    assert seen.gpus[0].name == torch.cuda.get_device_name(0)
    assert 0 < seen.gpus[0].free_bytes <= seen.gpus[0].total_bytes
    assert seen.capture_error is None
    levels = {check.name: check.level for check in machine_checks(seen)}
    assert levels["gpu"] == levels["cuda_graphs"] == "ok"
