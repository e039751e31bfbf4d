"""summary.json: the documented keys, valid JSON for undefined values, atomic, readable back."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from erase_rec.errors import UserError
from erase_rec.protocols import EvalResult
from erase_rec.summary import (
    DataSummary,
    Summary,
    ThroughputSummary,
    TrainSummary,
    summarize_eval,
)
from erase_rec.throughput import Throughput

RESULT = EvalResult(
    ne=0.8,
    auc=math.nan,
    logloss=0.4,
    calibration=1.1,
    base_rate=0.2,
    rows=1234,
    towers={
        "deep": {"ne": 0.9, "auc": 0.6, "share": 0.25, "ne_without": 0.82, "correlation": 0.5},
        "cross": {"ne": math.nan, "auc": 0.7},
    },
    most_like={"deep": "cross"},
    extra={"accuracy": 0.75, "prediction_std": math.inf, "ne_base_rate": 0.3},
)


def summary(result: EvalResult = RESULT) -> Summary:
    model, towers = summarize_eval(result, {"deep": 0.125})
    throughput = Throughput(1.0, 2.0, 3.0, 2.5, steps=7, step_ms=1.0, data_wait_ms=0.25)
    return Summary(
        status="completed",
        eval=model,
        towers=towers,
        throughput=ThroughputSummary.of(throughput, global_batch_size=64, ranks=2),
        train=TrainSummary(steps=9, rows=500, ne=0.85),
        data=DataSummary(fingerprint="abc", unseen_share=0.01, bad_rows=4),
    )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{prefix}.{name}").items()}


def test_the_file_holds_the_documented_keys_and_null_for_undefined(tmp_path: Path) -> None:
    found = flat(json.loads(summary().write(tmp_path).read_text(encoding="utf-8")))
    assert found == {
        ".status": "completed",
        ".eval.ne": 0.8,
        ".eval.auc": None,
        ".eval.logloss": 0.4,
        ".eval.calibration": 1.1,
        ".eval.base_rate": 0.2,
        ".eval.ne_base_rate": 0.3,
        ".eval.rows": 1234,
        ".eval.accuracy": 0.75,
        ".eval.prediction_std": None,
        ".towers.deep.ne": 0.9,
        ".towers.deep.auc": 0.6,
        ".towers.deep.share": 0.25,
        ".towers.deep.ne_without": 0.82,
        ".towers.deep.correlation": 0.5,
        ".towers.deep.most_like": "cross",
        ".towers.deep.grad_norm": 0.125,
        ".towers.cross.ne": None,
        ".towers.cross.auc": 0.7,
        ".towers.cross.share": None,
        ".towers.cross.ne_without": None,
        ".towers.cross.correlation": None,
        ".towers.cross.most_like": None,
        ".towers.cross.grad_norm": None,
        ".throughput.qps_p10": 1.0,
        ".throughput.qps_p50": 2.0,
        ".throughput.qps_p90": 3.0,
        ".throughput.qps_mean": 2.5,
        ".throughput.data_wait_share": 0.25,
        ".throughput.steps": 7,
        ".throughput.global_batch_size": 64,
        ".throughput.ranks": 2,
        ".train.steps": 9,
        ".train.rows": 500,
        ".train.ne": 0.85,
        ".data.fingerprint": "abc",
        ".data.unseen_share": 0.01,
        ".data.bad_rows": 4,
    }


def test_the_documentation_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "summary.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = set()
    for cell in cells:
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = section if name.startswith(".") else name.rpartition(".")[0]
            documented.add(f".{section}{name}" if name.startswith(".") else f".{name}")
    keys = flat(summary().model_dump())
    assert {re.sub(r"towers\.\w+", "towers.<name>", key) for key in keys} == documented - {".eval.<name>"}


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    written = summary(EvalResult(0.8, 0.7, 0.4, 1.1, 0.2, 10, extra={"accuracy": 0.5}))
    written.write(tmp_path)
    assert Summary.read(tmp_path) == written
    summary().write(tmp_path)
    again = Summary.read(tmp_path)
    assert math.isnan(again.eval.auc)
    assert math.isnan(again.towers["cross"].ne)
    assert math.isnan(again.eval.model_extra["prediction_std"])


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = summary().write(tmp_path).read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        summary(EvalResult(0.1, 0.1, 0.1, 0.1, 0.1, 1)).write(tmp_path)
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "the file: Invalid JSON"),
        ('{"status": "great"}', "status: Input should be 'completed'"),
    ],
)
def test_a_file_that_is_no_summary_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"summary\.json") as caught:
        Summary.read(tmp_path)
    assert message in str(caught.value)


def test_the_table_shows_each_tower_the_model_and_the_speed() -> None:
    file = io.StringIO()
    Console(file=file, width=120).print(summary().table())
    text = file.getvalue()
    assert re.search(r"deep\s+│\s+0\.90000\s+│\s+0\.60000\s+│\s+│\s+│\s+25\.0%\s+│\s+0\.82000", text)
    assert re.search(r"cross\s+│\s+-\s+│\s+0\.70000", text)
    assert re.search(r"model\s+│\s+0\.80000\s+│\s+-", text)
    assert "QPS mean 2, p10 1, p50 2, p90 3 over 7 steps of 64 rows" in " ".join(text.split())
    assert "25.0% of the time waiting for data" in " ".join(text.split())
