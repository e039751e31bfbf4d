"""What is made of the benchmark of batch sizes and widths."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saturation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("saturation", ROOT / "benchmarks/saturation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(arm: str, batch: int, **more: Any) -> dict[str, Any]:
    width = arm.partition("_")[2]
    speeds = {f"aggregate_{width}": [1.1, 1.2, 1.3], f"exact_{width}": [None, 1.05, None]}
    timed = {"step_ms_p50": 0.5, "kernels": 90.0, "copies": 10.0, "kernel_ms_sum": 0.8, "overlap_share": 0.4}
    return {"arm": arm, "batch": batch, "refused": None, "ratio_to": speeds, "idle_share": 0.1} | timed | more


def test_gain_stands_beside_the_kernels_size(
    saturation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(f"{method}_narrow", batch) for batch in (512, 4096) for method in ("exact", "aggregate", "early")]
    rows += [row("exact_wide", 512), row("aggregate_wide", 512), row("early_wide", 512, refused="out of memory")]
    unprofiled = {"kernels": None, "copies": None, "kernel_ms_sum": None, "overlap_share": None, "idle_share": None}
    rows += [row(f"{method}_medium", 512, **unprofiled) for method in ("exact", "aggregate", "early")]
    files = [tmp_path / "saturation.json", tmp_path / "more.json"]
    for file, part in zip(files, (rows[:6], rows[6:]), strict=True):
        file.write_text(json.dumps({"rows": part}))
    saturation.main(files)
    lines = capsys.readouterr().out.splitlines()
    assert "| narrow | 4,096 | 0.500 | 1.200 [1.100, 1.300] | 1.050 | 100 | 8.0 | 40 % | 10 % |" in lines
    assert "| medium | 512 | 0.500 | 1.200 [1.100, 1.300] | 1.050 |  |  |  |  |" in lines
    assert sum(line.startswith("| wide") for line in lines) == 0
    assert (tmp_path / "saturation.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_compare_is_said(saturation: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"rows": [row("early_narrow", 512)]}))
    with pytest.raises(typer.BadParameter, match="early, aggregate and exact were all timed"):
        saturation.main([tmp_path / "x.json"])
