"""``erase-rec report`` on runs that were trained, as a user types it."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import warm_process

from erase_rec.step_timeline import StepTimeline

SMALL = [
    "data.params={rows: 2000, eval_rows: 1000}",
    "embedding.backend=torch",
    "train.local_batch_size=250",
    "train.threads=1",
    "train.log_every_steps=2",
    "train.warmup_qps_steps=2",
]


def erase_rec(cwd: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return warm_process.run(cwd, "-m", "erase_rec", *arguments, expect=expect)


def test_two_trained_runs_are_reported(tmp_path: Path) -> None:
    for preset in ("exact", "erase"):
        config = ["--config", "ctr_erase.yaml", f"schedule.preset={preset}", f"run.name={preset}"]
        erase_rec(tmp_path, "train", *config, *SMALL)
    result = erase_rec(tmp_path, "report", "runs", "--out", "made/report.html")
    assert "One run only of exact, erase" in result.stdout
    record = json.loads((tmp_path / "made/report.json").read_text())
    base, arm = record["arms"]
    summary = json.loads((tmp_path / "runs/erase/summary.json").read_text())
    assert arm["ne"]["mid"] == summary["eval"]["ne"]
    assert arm["qps_p90"]["mid"] == summary["throughput"]["qps_p90"]
    assert set(arm["towers"]) == set(summary["towers"])
    assert [base["audit"], arm["audit"]] == ["passed", "passed"]
    assert "run.name=erase" in "\n".join(record["commands"])
    page = (tmp_path / "made/report.html").read_text()
    assert page.count("<svg") == 4
    assert page.count("data:image/png") == 2
    timeline = StepTimeline.read(tmp_path / "runs/erase")
    assert timeline is not None
    assert (timeline.step, timeline.rows) == (8, 250)
    assert {interval.op.kind for interval in timeline.intervals} >= {"forward", "early_backward", "update"}
    assert arm["accuracy"]["mid"] == summary["eval"]["accuracy"]
    assert 0 < arm["backward_ms"]["mid"] < arm["step_ms"]["mid"]
    assert "NE" in (tmp_path / "made/report.md").read_text()
    (tmp_path / "chart.png").write_bytes(b"\x89PNG, or so it begins")
    erase_rec(tmp_path, "report", "runs", "--out", "again.html", "--timeline", "erase=chart.png")
    chart = base64.b64encode((tmp_path / "chart.png").read_bytes()).decode()
    assert f'src="data:image/png;base64,{chart}"' in (tmp_path / "again.html").read_text()


def test_mistakes_end_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for arguments, message in (
        (("runs", "--out", "report.html"), "holds no run"),
        (("runs", "--out", "report.pdf"), "write --out report.html"),
    ):
        shown = erase_rec(tmp_path, "report", *arguments, expect=2).stderr
        assert shown.startswith("error: ")
        assert message in shown
        assert "Traceback" not in shown
