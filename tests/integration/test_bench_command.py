"""`erase-rec bench` as a user types it, on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm_process

SMALL = [
    "data.params={rows: 600, eval_rows: 0}",
    "features.sparse=[C1, C2, C3]",
    "embedding.backend=torch",
    "train.device=cpu",
    "train.threads=1",
]
QUICK = ["--repeats", "5", "--steps", "2", "--warmup", "1"]


def bench(cwd: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = ["-m", "erase_rec", "bench", "--config", "ctr_erase.yaml", *arguments, *QUICK, *SMALL]
    return warm_process.run(cwd, *command, expect=expect)


def rows_by_arm(path: Path, batch: int) -> dict[str, dict[str, Any]]:
    return {row["arm"]: row for row in json.loads(path.read_text())["rows"] if row["batch"] == batch}


def test_rows_pairs_refusals_and_files(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    names = "exact_eager,early_blocking,early_graph_joint"
    result = bench(tmp_path, "--arms", names, "--batch", "16,32", "--out", str(out))
    record = json.loads(out.read_text())
    assert {"device", "driver", "commit", "command", "environment", "ceilings", "date"} <= set(record)
    assert record["batches"] == {"resident": True, "zipf": 0.0, "count": 8}
    assert record["command"].startswith("erase-rec bench --config ctr_erase.yaml")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    for batch in (16, 32):
        rows = rows_by_arm(out, batch)
        assert list(rows) == ["exact_eager", "exact_eager (A/A)", "early_blocking", "early_graph_joint"]
        assert [row["repeats"] for row in rows.values()] == [None, "exact_eager", None, None]
        assert [row["family"] for row in rows.values()] == ["exact", "exact", "early", "early"]
        refused = rows.pop("early_graph_joint")
        assert "the CPU has no CUDA graphs" in refused["refused"]
        assert refused["step_ms_p50"] is None
        assert refused["ratio_to"] == {}
        for name, row in rows.items():
            assert row["workload"] == "ctr_erase"
            assert row["refused"] is None
            assert 0 < row["step_ms_p10"] <= row["step_ms_p50"] <= row["step_ms_p90"]
            assert row["qps_p90"] == pytest.approx(1e3 * batch / row["step_ms_p10"])
            assert len(row["turns_qps_p90"]) == 5
            assert min(row["turns_qps_p90"]) > 0
            assert row["qps_mean"] == pytest.approx(1e3 * batch / row["step_ms_mean"])
            assert 0 < row["floor_ms"] < row["step_ms_p50"]
            assert row["floor"]["flops"] > 0
            assert set(row["ratio_to"]) == set(rows) - {name}
            assert row["kernels"] is None  # only CUDA tells
            assert row["host_ms"] is None
        forward, back = rows["exact_eager"]["ratio_to"], rows["early_blocking"]["ratio_to"]
        assert math.log(forward["early_blocking"][1]) == pytest.approx(-math.log(back["exact_eager"][1]))
    assert "exact_eager (A/A)" in result.stdout
    assert "the CPU has no CUDA graphs" in result.stdout
    flops = [rows_by_arm(out, batch)["exact_eager"]["floor"]["flops"] for batch in (16, 32)]
    assert flops[1] == 2 * flops[0]


def test_batches_of_the_training_loader(tmp_path: Path) -> None:
    """600 rows in batches of 250: the last one of each epoch is short and is left out."""
    out = tmp_path / "r.json"
    bench(tmp_path, "--arms", "exact_eager", "--batch", "250", "--data", "loader", "--out", str(out))
    row = rows_by_arm(out, 250)["exact_eager"]
    assert row["refused"] is None
    assert row["data_wait_ms"] > 0


def test_a_wrong_arm_name_ends_with_one_message(tmp_path: Path) -> None:
    result = bench(tmp_path, "--arms", "exact_eger", expect=2)
    assert "there is no arm 'exact_eger'; did you mean 'exact_eager'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
