"""The Python API: one path with the command line, callbacks, history, resuming, and a process that stays as it was."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from in_process import call

import erase_rec
from erase_rec import (
    Callback,
    CallbackError,
    Config,
    ConfigError,
    DataConfig,
    DenseFeatureConfig,
    EmbeddingConfig,
    EvalResult,
    FeaturesConfig,
    LabelConfig,
    LossConfig,
    Predictor,
    RunState,
    ScheduleConfig,
    SparseFeatureConfig,
    Summary,
    TowerConfig,
    TrainConfig,
    Trainer,
    UserError,
    read_history,
)

YAML = """
data: {kind: pandas, eval_fraction: 0.25, label: {column: clicked}}
features:
  dense: [{name: age, transform: standardize}]
  sparse: [{name: city, encoding: vocabulary}]
embedding: {dim: 4}
towers:
  - {name: deep, kind: mlp, params: {hidden: [8]}, loss: {kind: bce}}
  - {name: wide, kind: mlp, params: {hidden: [4]}, loss: {kind: bce}}
schedule: {preset: erase}
train: {epochs: 2, local_batch_size: 64, device: cpu, log_every_steps: 4}
"""


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(2)
    city = rng.choice(["Rome", "Oslo", "Bonn"], 600)
    clicked = (rng.random(600) < np.where(city == "Rome", 0.6, 0.2)).astype(int)
    return pd.DataFrame({"clicked": clicked, "age": rng.integers(18, 80, 600), "city": city})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    Path("frame.yaml").write_text(YAML)
    return Config.from_yaml("frame.yaml")


class Diary(Callback):
    """Writes down what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def on_start(self, run: RunState) -> None:
        self.told.append(("start", run.step))
        assert run.total_steps > 0

    def on_step(self, run: RunState) -> None:
        self.told.append(("step", run.step))
        if run.step == self.stop_at:
            run.stop("it is enough")

    def on_log(self, run: RunState, values: Mapping[str, float]) -> None:
        self.told.append(("log", run.step))
        assert {"train/ne", "tower/deep/ne", "lr/dense"} <= set(values)

    def on_eval(self, run: RunState, result: EvalResult) -> None:
        self.told.append(("eval", run.step))
        assert 0 < result.ne < 3

    def on_checkpoint(self, run: RunState, path: Path) -> None:
        self.told.append(("checkpoint", run.step))
        assert path.is_dir()
        assert path.parent.parent == run.folder

    def on_end(self, run: RunState, summary: Summary) -> None:
        self.told.append((f"end {summary.status}", run.step))
        assert (run.folder / "summary.json").is_file()


class Broken(Callback):
    def on_log(self, run: RunState, values: Mapping[str, float]) -> None:
        raise ZeroDivisionError("of the user's own")


def test_importing_costs_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, erase_rec; erase_rec.__version__; dir(erase_rec)\n"
        "heavy = {'torch', 'pandas', 'numpy', 'pydantic', 'yaml'} & set(sys.modules); assert not heavy, heavy\n"
        "from erase_rec import UserError; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in erase_rec.__all__:
        assert name == "__version__" or getattr(erase_rec, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        erase_rec.Trainr  # type: ignore[attr-defined]  # noqa: B018


def test_a_trainer_and_the_command_line_come_to_the_same(
    config: Config, frame: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame.to_parquet("rows.parquet")
    files = config.override("data.kind=parquet", "data.train=rows.parquet")
    Path("files.yaml").write_text(files.to_yaml())
    call(tmp_path, "train", "--config", "files.yaml", "run.name=typed")
    trainer = Trainer(files, progress=False)
    assert capsys.readouterr().out == ""
    found = trainer.fit()
    assert capsys.readouterr().out == "", "progress=False shows nothing"
    typed = Summary.read(Path("runs/typed"))
    assert (found.eval, found.train, found.data) == (typed.eval, typed.train, typed.data)
    history = trainer.history
    history = history[[tag for tag in history if tag.startswith(("step", "train/", "tower/", "eval/", "lr/"))]]
    assert history.shape[1] > 20
    pd.testing.assert_frame_equal(history, read_history(Path("runs/typed"))[history.columns])
    assert trainer.evaluate().eval == found.eval


def test_history_has_a_row_a_logged_step(config: Config, frame: pd.DataFrame) -> None:
    trainer = Trainer(config, train=frame)
    trainer.fit()
    history = trainer.history
    assert history["step"].tolist() == [4, 8, 12, 14] or history["step"].is_monotonic_increasing
    wanted = [
        "train/ne",
        "train/logloss",
        "tower/deep/ne",
        "tower/wide/ne",
        "throughput/qps_mean",
        "lr/dense",
        "eval/ne",
    ]
    assert set(wanted) <= set(history)
    assert history["train/ne"].notna().sum() >= 3
    assert history["eval/ne"].iloc[-1] == trainer.summary.eval.ne


def test_a_process_stays_as_it_was(config: Config, frame: pd.DataFrame) -> None:
    """Threads, precision, generators, signals, log and environment, after two runs and predictions in one process."""
    import os

    def settings() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        drawn = torch.random.get_rng_state().tolist()
        precision = torch.get_float32_matmul_precision()
        return torch.get_num_threads(), precision, drawn, handlers, logging.root.manager.disable, dict(os.environ)

    torch.set_float32_matmul_precision("medium")
    try:
        before = settings()
        trainer = Trainer(config.override("train.threads=2"), train=frame)
        trainer.fit()
        first = trainer.summary, trainer.folder
        trainer.predict(frame.drop(columns="clicked"))
        trainer.fit()
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert trainer.folder != first[1]
    assert (trainer.summary.eval, trainer.summary.train) == (first[0].eval, first[0].train)


def test_callbacks_are_told_of_everything_in_order(config: Config, frame: pd.DataFrame) -> None:
    diary = Diary()
    Trainer(config.override("train.steps=6", "train.eval_every_steps=3"), train=frame, callbacks=[diary]).fit()
    steps = [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("eval", 3),
        ("checkpoint", 3),
        ("step", 3),
        ("log", 4),
        ("step", 4),
    ]
    end = [("step", 5), ("log", 6), ("eval", 6), ("checkpoint", 6), ("step", 6), ("end completed", 6)]
    assert diary.told == steps + end


def test_a_callback_stops_the_run_with_an_evaluation_and_a_checkpoint(
    config: Config, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    diary = Diary(stop_at=3)
    trainer = Trainer(config, train=frame, callbacks=[diary])
    assert trainer.fit().status == "stopped_early"
    assert trainer.summary.train.steps == 3
    assert diary.told[-4:] == [("step", 3), ("eval", 3), ("checkpoint", 3), ("end stopped_early", 3)]
    assert "stopped at step 3: it is enough" in capsys.readouterr().out


def test_a_broken_callback_ends_the_run_and_names_itself_and_the_run_goes_on(
    config: Config, frame: pd.DataFrame
) -> None:
    diary = Diary()
    trainer = Trainer(config, train=frame, callbacks=[Broken(), diary])
    with pytest.raises(
        CallbackError, match=r"callback Broken\.on_log raised ZeroDivisionError at step 4: of the"
    ) as caught:
        trainer.fit()
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert trainer.summary.status == "failed"
    assert diary.told[-1] == ("end failed", 4)
    assert [path.name for path in (trainer.folder / "checkpoints").glob("step_*")] == ["step_00000004"]
    resumed = Trainer.resume(trainer.folder, train=frame)
    resumed.fit()
    whole = Trainer(config, train=frame)
    whole.fit()
    assert resumed.folder == trainer.folder
    assert (resumed.summary.eval, resumed.summary.towers) == (whole.summary.eval, whole.summary.towers)


def test_what_an_on_end_raises_comes_after_the_summary(config: Config, frame: pd.DataFrame) -> None:
    class Late(Callback):
        def on_end(self, run: RunState, summary: Summary) -> None:
            raise KeyError("late")

    diary = Diary()
    trainer = Trainer(config.override("train.steps=2"), train=frame, callbacks=[Late(), diary])
    with pytest.raises(CallbackError, match=r"callback Late\.on_end raised KeyError"):
        trainer.fit()
    assert trainer.summary.status == "completed"
    assert diary.told[-1] == ("end completed", 2)


def test_what_an_on_end_raises_does_not_stand_in_for_what_ended_the_run(config: Config, frame: pd.DataFrame) -> None:
    class Twice(Broken):
        def on_end(self, run: RunState, summary: Summary) -> None:
            raise KeyError("late")

    with pytest.raises(CallbackError, match=r"callback Twice\.on_log raised ZeroDivisionError") as caught:
        Trainer(config, train=frame, callbacks=[Twice()]).fit()
    (note,) = caught.value.__notes__
    assert note.startswith("callback Twice.on_end raised KeyError")


def test_a_call_that_begins_no_run_leaves_the_one_before_it(config: Config, frame: pd.DataFrame) -> None:
    trainer = Trainer(config.override("train.steps=2", "run.name=once"), train=frame)
    first = trainer.fit()
    with pytest.raises(UserError, match="once"):
        trainer.fit()
    assert (trainer.summary, trainer.folder.name) == (first, "once")


def test_other_rows_do_not_resume_a_run(config: Config, frame: pd.DataFrame) -> None:
    trainer = Trainer(config.override("train.steps=2"), train=frame)
    trainer.fit()
    with pytest.raises(UserError, match="the data are not those of the run"):
        Trainer.resume(trainer.folder, ["train.steps=4"], train=frame[:500]).fit()
    with pytest.raises(UserError, match="cannot change in a resumed run"):
        Trainer.resume(trainer.folder, ["seed=4"], train=frame).fit()


def test_frames_are_evaluated_and_predicted(config: Config, frame: pd.DataFrame) -> None:
    trainer = Trainer(config, train=frame)
    trainer.fit()
    assert trainer.evaluate().eval == trainer.summary.eval, "the rows that were held out"
    everything = trainer.evaluate(frame)
    assert everything.eval.rows == 600
    assert set(everything.towers) == {"deep", "wide"}
    unlabelled = frame.drop(columns="clicked")
    found = trainer.predict(unlabelled, keep=["city"])
    assert list(found) == ["city", "prediction", "logit"]
    pd.testing.assert_frame_equal(found, Predictor.load(trainer.folder).predict(unlabelled, keep=["city"]))


def test_a_trainer_without_a_run_says_so(config: Config, frame: pd.DataFrame) -> None:
    trainer = Trainer(config.override("data.label.column=clikced"), train=frame)
    for use in (lambda: trainer.summary, lambda: trainer.history, trainer.evaluate, lambda: trainer.predict(frame)):
        with pytest.raises(UserError, match=r"no run yet; call fit\(\) first"):
            use()
    with pytest.raises(UserError, match="clikced"):
        trainer.fit()
    assert not Path("runs").exists(), "a mistake leaves no folder"


def test_a_configuration_is_the_same_from_yaml_a_dictionary_and_sections(config: Config) -> None:
    import yaml

    built = Config(
        data=DataConfig(kind="pandas", eval_fraction=0.25, label=LabelConfig(column="clicked")),
        features=FeaturesConfig(
            dense=(DenseFeatureConfig(name="age", transform="standardize"),),
            sparse=(SparseFeatureConfig(name="city", encoding="vocabulary"),),
        ),
        embedding=EmbeddingConfig(dim=4),
        towers=(
            TowerConfig(name="deep", kind="mlp", params={"hidden": [8]}, loss=LossConfig(kind="bce")),
            TowerConfig(name="wide", kind="mlp", params={"hidden": [4]}, loss=LossConfig(kind="bce")),
        ),
        schedule=ScheduleConfig(preset="erase"),
        train=TrainConfig(epochs=2, local_batch_size=64, device="cpu", log_every_steps=4),
    )
    plain = Config.from_dict(yaml.safe_load(YAML))
    assert built.resolved() == plain.resolved() == config.resolved()
    Path("again.yaml").write_text(config.to_yaml())
    assert Config.from_yaml("again.yaml") == config == Config.from_dict(yaml.safe_load(config.to_yaml()))
    assert built.model_copy(update={"seed": 5}).resolved().seed == 5


def test_an_override_is_checked_and_leaves_the_original(config: Config) -> None:
    changed = config.override("towers.deep.params.hidden=[4, 4]", "schedule.preset=detached")
    assert changed.resolved().towers[0].params["hidden"] == [4, 4]
    assert changed.resolved().schedule.early_backward is False
    assert config.resolved().schedule.early_backward is True
    with pytest.raises(ConfigError, match=r"override 'train\.step=1': train\.step: unknown key; did you mean 'steps'"):
        config.override("train.step=1")
    with pytest.raises(ConfigError, match=r"Config: towers\.deep\.kind: no tower is called 'mpl'; did you mean 'mlp'"):
        Config.from_dict({**config.model_dump(exclude_unset=True), "towers": [{"name": "deep", "kind": "mpl"}]})
    with pytest.raises(ConfigError, match="found set"):
        Config.from_dict({"seed": {1}})


def test_a_configuration_from_a_look_at_a_frame_trains(frame: pd.DataFrame, tmp_path: Path) -> None:
    config = Config.from_frame(frame, "clicked", overrides=["train.epochs=1", f"run.dir={tmp_path}"])
    assert config.resolved().data.kind == "pandas"
    assert {each.name for each in config.resolved().features.sparse} == {"city"}
    trainer = Trainer(config, train=frame)
    assert trainer.fit().status == "completed"
    assert trainer.folder.name.startswith("frame-")
    with pytest.raises(UserError, match="clicks"):
        Config.from_frame(frame, "clicks")


def test_a_notebook_sees_a_line_that_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    from erase_rec.progress import LineProgress, NotebookProgress, show_progress

    shown: list[str] = []

    class Handle:
        def update(self, line: Mapping[str, str], *, raw: bool) -> None:
            shown.append("again " + line["text/plain"])

    def display(line: Mapping[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(line["text/plain"])
        return Handle()

    assert type(show_progress(10)) is LineProgress
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    progress = show_progress(10)
    assert isinstance(progress, NotebookProgress)
    progress.message("run folder x")
    progress.report(5, {"train/ne": 0.5})
    progress.report(10, {"train/ne": 0.25})
    assert capsys.readouterr().out == "run folder x\n"
    assert [line.partition("  ETA")[0] for line in shown] == ["step 5/10  NE 0.50000", "again step 10/10  NE 0.25000"]
