"""The run log as TensorBoard itself reads it: complete after any end, one value a step after a resume."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.dashboards import arm_hash, hyperparameters
from erase_rec.protocols import EvalResult
from erase_rec.run_log import FileRunLog, RunLog, eval_scalars, final_scalars
from erase_rec.summary import DataSummary, EvalSummary, Summary, ThroughputSummary, TrainSummary

SIZE_GUIDANCE = {"tensors": 0, "scalars": 0}


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance=SIZE_GUIDANCE)
    accumulator.Reload()
    return accumulator


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def log_steps(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.scalars(step, {"train/ne": step + 0.5, "lr": 0.25})


@pytest.mark.parametrize("steps", [3, 500])
def test_every_step_is_in_both_files_when_the_run_ends(tmp_path: Path, steps: int) -> None:
    with FileRunLog(tmp_path) as log:
        log_steps(log, 1, steps)
    assert curve(tmp_path, "train/ne") == [(step, step + 0.5) for step in range(1, steps + 1)]
    assert rows(tmp_path) == [{"step": s, "train/ne": s + 0.5, "lr": 0.25} for s in range(1, steps + 1)]


@pytest.mark.parametrize("error", [RuntimeError("forced"), KeyboardInterrupt()])
def test_every_finished_step_is_in_both_files_after_an_error(tmp_path: Path, error: BaseException) -> None:
    def run() -> None:
        with FileRunLog(tmp_path) as log:
            log_steps(log, 1, 3)
            raise error

    with pytest.raises(type(error)):
        run()
    assert [step for step, _ in curve(tmp_path, "train/ne")] == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_curves_do_not_fold_back_when_a_killed_run_is_resumed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from erase_rec.run_log import FileRunLog\n"
        "log = FileRunLog(Path(sys.argv[1]))\n"
        "for step in range(1, 16):\n"
        "    log.scalars(step, {'train/ne': -1.0, 'lr': 0.25})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert [step for step, _ in curve(tmp_path, "train/ne")] == list(range(1, 16))
    with FileRunLog(tmp_path, purge_step=11) as log:
        log_steps(log, 11, 30)
    for tag in ("train/ne", "lr"):
        assert [step for step, _ in curve(tmp_path, tag)] == list(range(1, 31))
    assert [value for _, value in curve(tmp_path, "train/ne")] == [-1.0] * 10 + [s + 0.5 for s in range(11, 31)]
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
    assert not list(tmp_path.glob("*.partial"))


def test_resumes_within_one_second_and_records_cut_short_are_read_in_order(tmp_path: Path) -> None:
    for resume in range(12):
        with FileRunLog(tmp_path, purge_step=resume * 2 + 1) as log:
            log_steps(log, resume * 2 + 1, resume * 2 + 4)
        newest = max(tmp_path.glob("events.*"))
        newest.write_bytes(newest.read_bytes()[:-5])
        jsonl = tmp_path / "metrics.jsonl"
        jsonl.write_text(jsonl.read_text(encoding="utf-8")[:-5], encoding="utf-8")
    with FileRunLog(tmp_path, purge_step=25) as log:
        log_steps(log, 25, 26)
    assert [step for step, _ in curve(tmp_path, "train/ne")] == list(range(1, 27))
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 27))


def test_calls_of_one_step_share_a_row_and_steps_never_decrease(tmp_path: Path) -> None:
    with FileRunLog(tmp_path) as log:
        log.scalars(5, {"train/ne": 0.5})
        log.scalars(5, {"eval/ne": 0.75})
        log.scalars(6, {"train/ne": 0.25})
        with pytest.raises(AssertionError, match="step 4 is logged after step 6"):
            log.scalars(4, {})
    assert rows(tmp_path) == [{"step": 5, "train/ne": 0.5, "eval/ne": 0.75}, {"step": 6, "train/ne": 0.25}]


def test_flush_publishes_the_open_step_while_the_log_stays_open(tmp_path: Path) -> None:
    with FileRunLog(tmp_path) as log:
        log.scalars(1, {"train/ne": 0.5})
        log.flush()
        assert rows(tmp_path) == [{"step": 1, "train/ne": 0.5}]
        assert curve(tmp_path, "train/ne") == [(1, 0.5)]


def test_undefined_values_are_null_in_json_and_nan_in_the_events(tmp_path: Path) -> None:
    with FileRunLog(tmp_path) as log:
        log.scalars(1, {"eval/auc": math.nan, "eval/logloss": math.inf})
    assert rows(tmp_path) == [{"step": 1, "eval/auc": None, "eval/logloss": None}]
    ((_, value),) = curve(tmp_path, "eval/auc")
    assert math.isnan(value)


def test_text_is_readable_by_the_text_plugin(tmp_path: Path) -> None:
    with FileRunLog(tmp_path) as log:
        log.text("config", "seed: 1 数据")
    accumulator = events(tmp_path)
    assert accumulator.PluginTagToContent("text").keys() == {"config"}
    (event,) = accumulator.Tensors("config")
    assert make_ndarray(event.tensor_proto).item().decode() == "seed: 1 数据"


def test_the_null_log_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunLog() as log:
        log.scalars(1, {"train/ne": 0.5})
        log.text("config", "seed: 1")
        log.flush()
    assert list(tmp_path.iterdir()) == []


def test_tags_of_an_evaluation() -> None:
    result = EvalResult(0.8, 0.7, 0.4, 1.1, 0.2, 10, {"deep": {"ne": 0.9, "auc": 0.6}}, extra={"accuracy": 0.5})
    assert eval_scalars(result) == {
        "eval/ne": 0.8,
        "eval/auc": 0.7,
        "eval/logloss": 0.4,
        "eval/calibration": 1.1,
        "eval/base_rate": 0.2,
        "eval/accuracy": 0.5,
        "eval/tower/deep/ne": 0.9,
        "eval/tower/deep/auc": 0.6,
    }


def shipped(*overrides: str) -> Config:
    return load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog()).config


def test_custom_scalars_show_ne_and_qps(tmp_path: Path) -> None:
    with FileRunLog(tmp_path) as log:
        log.scalars(1, {"train/ne": 1.0, "eval/tower/deep/ne": 1.0, "tower/deep/ne": 1.0, "tower/deep/norm": 1.0})
    (event,) = events(tmp_path).Tensors("custom_scalars__config__")
    layout = Layout.FromString(make_ndarray(event.tensor_proto).item())
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    assert [category.title for category in layout.category] == ["NE", "QPS (rows a second)"]
    logged = events(tmp_path).Tags()["scalars"]
    shown = {
        title: [tag for tag in logged if any(re.fullmatch(pattern, tag) for pattern in patterns)]
        for title, patterns in charts.items()
    }
    assert shown["towers' local logits, a window of training rows"] == ["tower/deep/ne"]
    assert shown["towers' local logits, held out"] == ["eval/tower/deep/ne"]


@pytest.mark.parametrize("error", [None, RuntimeError("forced")])
def test_hparams_are_of_the_run_itself_and_say_how_it_ended(tmp_path: Path, error: Exception | None) -> None:
    config = shipped("train.local_batch_size=64", "optimizer.dense.lr=0.25")

    def run() -> None:
        with FileRunLog(tmp_path / "a") as log:
            log.hparams(config)
            log.final(3, {"final/ne": 0.75})
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(RuntimeError):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    contents = events(tmp_path / "a").PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["dense_lr"].number_value == 0.25
    assert start.hparams["local_batch_size"].number_value == 64
    assert start.hparams["preset"].string_value == "erase"
    assert start.hparams["early_backward"].bool_value is True
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"]).experiment
    assert {info.name for info in experiment.hparam_infos} == set(start.hparams)
    assert "final/ne" in [info.name.tag for info in experiment.metric_infos]
    end = HParamsPluginData.FromString(contents["_hparams_/session_end_info"]).session_end_info
    assert end.status == (STATUS_SUCCESS if error is None else STATUS_FAILURE)
    assert curve(tmp_path / "a", "final/ne") == [(3, 0.75)]
    assert rows(tmp_path / "a") == []


def test_seeds_of_an_arm_are_one_group_of_the_hparams(tmp_path: Path) -> None:
    base, other_seed = shipped("seed=1", "run.name=x"), shipped("seed=2", "run.name=y")
    assert arm_hash(base) == arm_hash(other_seed)
    assert hyperparameters(base) == hyperparameters(other_seed)
    assert arm_hash(base) != arm_hash(shipped("optimizer.dense.lr=0.25"))


def test_undefined_results_are_no_final_scalars() -> None:
    summary = Summary(
        status="completed",
        eval=EvalSummary(ne=0.5),
        throughput=ThroughputSummary(qps_p90=200.0, qps_mean=100.0, global_batch_size=8),
        train=TrainSummary(steps=3, rows=24, ne=0.75),
        data=DataSummary(fingerprint="f", unseen_share=0.0),
    )
    known = {"final/ne": 0.5, "final/train_ne": 0.75, "final/qps_p90": 200.0, "final/qps_mean": 100.0}
    assert final_scalars(summary) == known
    assert final_scalars(summary, 2.5) == known | {"final/peak_memory_gib": 2.5}
