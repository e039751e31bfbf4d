"""The comparison of objectives: what it runs and chooses on validation rows, trains anew, and says of test rows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.load import load_config
from eval.metrics import ClickSums, click_sums, normalized_entropy

ROOT = Path(__file__).parents[2]
ROWS = 400


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    """The scripts, which import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        names = ("objectives_runs", "objectives", "objectives_page", "objectives_data")
        found = {name: __import__(name) for name in names}
        yield found
        for name in names:
            del sys.modules[name]


def result(
    benchmarks: dict[str, ModuleType], arm: str, variant: str, ne: tuple[float, ...], seed: int = 1, **job: Any
) -> Any:
    runs = benchmarks["objectives_runs"]
    evals = tuple((40 * number, value, 0.7) for number, value in enumerate(ne, start=1))
    made = runs.Job("frappe", arm, variant, seed, "c.yaml", (f"towers=of {arm}", "train.epochs=6"), **job)
    return runs.Result(made, evals, rows_per_s=1000.0 * seed)


def test_the_points_of_a_search_are_those_of_the_sweep_and_a_cut_falls_on_all_arms(
    benchmarks: dict[str, ModuleType],
) -> None:
    jobs = benchmarks["objectives"].search_jobs("frappe")
    arms = {job.arm for job in jobs}
    assert len({job.name for job in jobs}) == len(jobs) == 168
    for start in range(0, len(jobs), len(arms)):
        row = jobs[start : start + len(arms)]
        assert {job.arm for job in row} == arms
        assert len({job.variant for job in row}) == 1
    config = load_config(jobs[-1].config, jobs[-1].overrides, catalog=ContentCatalog()).config
    assert (config.optimizer.sparse.kind, config.optimizer.sparse.lr, config.train.threads) == (
        "rowwise_adagrad",
        0.1,
        1,
    )


def test_the_best_point_of_each_arm_is_trained_anew_and_scores_the_test_rows(
    benchmarks: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Of the points that every arm has: the last one, best for ``joint``, is of a search that was cut short."""
    objectives = benchmarks["objectives"]
    found = [
        result(benchmarks, "exact", "one", (0.8, 0.7, 0.75)),
        result(benchmarks, "joint", "one", (0.65, 0.66)),
        result(benchmarks, "exact", "two", (0.9, 0.8, 0.69)),
        result(benchmarks, "joint", "two", (0.7, 0.66)),
        result(benchmarks, "joint", "three", (0.1,)),
    ]
    chosen = objectives.choose(found, "frappe")
    assert [(each.arm, each.variant, each.ne) for each in chosen] == [("exact", "two", 0.69), ("joint", "one", 0.65)]
    jobs = objectives.final_jobs("frappe", chosen, 2, tmp_path)
    assert [(job.arm, job.seed) for job in jobs] == [("exact", 1), ("joint", 1), ("exact", 2), ("joint", 2)]
    assert jobs[0].overrides == ("towers=of exact", "train.epochs=6"), "as it was found, with the set's validation rows"
    assert {job.test for job in jobs} == {"datasets/objectives/frappe/test.parquet"}
    assert [each.arm for each in objectives.only(chosen, ["joint"])] == ["joint"]
    with pytest.raises(SystemExit, match="no arm owl"):
        objectives.only(chosen, ["owl", "joint"])
    with pytest.raises(SystemExit, match="no point that every arm has finished"):
        objectives.choose([*found[-2:], result(benchmarks, "own", "one", (0.5,))], "frappe")


def test_synthetic_logs_are_trained_on_for_an_epoch_with_what_another_log_chose(
    benchmarks: dict[str, ModuleType], tmp_path: Path
) -> None:
    objectives = benchmarks["objectives"]
    jobs = objectives.search_jobs(objectives.searched("synthetic_20m"))
    found = [benchmarks["objectives_runs"].Result(job, ((488, 0.8, 0.7),)) for job in jobs]
    final = objectives.final_jobs("synthetic_20m", objectives.choose(found, "synthetic_20m"), 2, tmp_path)
    assert {job.config.rpartition("/")[2] for job in final} == {"synthetic_20m.yaml"}
    assert len({job.name for job in final}) == len(final) == 22
    for job in final:
        config = load_config(job.config, job.overrides, catalog=ContentCatalog()).config
        assert (config.train.epochs, config.train.steps, config.schedule.cuda_graph) == (1, None, "step")
        assert config.data.train == ("datasets/synthetic_20m/train-*.parquet",)
        assert any(tower.detach for tower in config.towers) != job.arm.startswith("exact")


def test_runs_are_kept_line_by_line_and_gone_on_with(benchmarks: dict[str, ModuleType], tmp_path: Path) -> None:
    """Real runs in processes of the pool: one is right, one is a mistake and is tried again, one was there already."""
    runs, file = benchmarks["objectives_runs"], tmp_path / "runs.jsonl"
    small = ("data.params.rows=600", "data.params.eval_rows=200", "train.local_batch_size=100", "train.device=cpu")
    jobs = [
        runs.Job("made", "joint", "", 1, "ctr_erase.yaml", small, str(tmp_path / "scores/joint-1.npy")),
        runs.Job("made", "wrong", "", 1, "ctr_erase.yaml", ("train.epochs=none",)),
        runs.Job("made", "there", "", 1, "no such file", ()),
    ]
    there = json.dumps(asdict(runs.Result(jobs[2], ((1, 0.5, 0.5),))))
    file.write_text(there + "\n" + there[:40])
    found = runs.run_all(jobs, file, processes=1, limit_s=600)
    assert [each.job for each in found] == [jobs[2], jobs[0]], "equal after the way through the file"
    assert [step for step, _, _ in found[1].evals] == [6]
    lines = file.read_text().splitlines()
    assert len(lines) == 3
    assert "train.epochs" in json.loads(lines[2])["error"]
    logit, label = (np.load(tmp_path / "scores" / name) for name in ("joint-1.npy", "label.npy"))
    assert (logit.dtype, len(logit), len(label)) == (np.float32, 200, 200)
    assert found[1].best()[0] == pytest.approx(
        normalized_entropy(ClickSums(*click_sums(*map(torch.from_numpy, (logit, label))).tolist()))
    )
    assert runs.run_all(jobs[1:2], file, processes=1, limit_s=-1.0) == found, "no time is left to try again"


def test_test_rows_are_scored_with_the_best_checkpoint(benchmarks: dict[str, ModuleType], tmp_path: Path) -> None:
    """The best is one in the middle: afterwards the model learns its rows by heart."""
    runs, generator = benchmarks["objectives_runs"], np.random.default_rng(1)
    for part, rows in (("train", 400), ("valid", 100), ("test", 50)):
        label = generator.integers(0, 2, rows)
        columns = {"label": label, "x": label + generator.normal(size=rows), "c": generator.integers(0, 200, rows)}
        pd.DataFrame(columns).to_parquet(tmp_path / f"{part}.parquet")
    config = tmp_path / "small.yaml"
    config.write_text(
        f"data: {{kind: parquet, train: {tmp_path}/train.parquet, eval: {tmp_path}/valid.parquet, "
        "label: {column: label}}\n"
        "features: {dense: [x], sparse: [{name: c, encoding: vocabulary}]}\n"
        "towers: [{name: deep, kind: mlp, params: {hidden: [8], out_dim: 4}}]\n"
        "optimizer: {dense: {lr: 2e-2}, sparse: {kind: adam, lr: 3e-1}}\n"
        "train: {epochs: 3, local_batch_size: 40, keep_checkpoints: 1}\n"
    )
    job = runs.Job("s", "a", "", 1, str(config), (), str(tmp_path / "a.npy"), str(tmp_path / "test.parquet"))
    longer = runs.run(job)
    until = runs.run(replace(job, overrides=("train.epochs=2",), scores=str(tmp_path / "b.npy")))
    assert (longer.error, until.error, len(longer.evals)) == (None, None, 3)
    assert longer.best() == until.best() == (longer.evals[1][1], 20)
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    assert len(np.load(tmp_path / "label.npy")) == 50


def test_sets_take_turns_in_proportion(benchmarks: dict[str, ModuleType]) -> None:
    assert "".join(benchmarks["objectives"].spread({"long": "aaaa", "short": "bb"})) == "abaaba"


def scored(benchmarks: dict[str, ModuleType], chosen: list[Any], folder: Path, noise: dict[str, float]) -> list[Any]:
    """Runs of three seeds, and one of another choice, which is not to count."""
    generator = np.random.default_rng(1)
    logit = generator.normal(size=ROWS)
    label = generator.random(ROWS) < 1 / (1 + np.exp(-logit))
    np.save(folder / "label.npy", label.astype(np.int8))
    found = []
    for each in chosen:
        for seed in (1, 2, 3):
            path = folder / f"{each.arm}-{seed}.npy"
            np.save(path, (logit + noise[each.arm] * generator.normal(size=ROWS)).astype(np.float32))
            found.append(result(benchmarks, each.arm, each.variant, (0.5,), seed, scores=str(path)))
    return [*found, result(benchmarks, "joint", "another choice", (0.5,), 4, scores="none")]


def test_gaps_are_to_the_exact_arm_that_was_best_on_validation_rows(
    benchmarks: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Even where another exact arm is better on the test rows."""
    noise = {"exact": 0.4, "exact_additive": 0.0, "joint": 0.8}
    ne = {"exact": 0.7, "exact_additive": 0.8, "joint": 0.6}
    chosen = [benchmarks["objectives"].Chosen(arm, "v", ne[arm], ()) for arm in noise]
    tested = scored(benchmarks, chosen, tmp_path, noise)
    page = benchmarks["objectives_page"]
    page.write_report({"frappe": chosen, "adult": chosen}, tested, tmp_path / "gap")
    rows = json.loads((tmp_path / "gap.json").read_text())
    elsewhere = [row | {"dataset": "synthetic_20m", "ci_high_pct": 0.01} for row in rows]
    page.write_report({}, [], tmp_path / "more", more=elsewhere, measured="on another machine")
    text = (tmp_path / "more.md").read_text()
    assert "on another machine" in text
    assert "| +0.010, 0.02: met |" in text
    assert json.loads((tmp_path / "more.json").read_text()) == elsewhere
    (tmp_path / "more.md").write_text("Read by people.\n" + text[text.index(page.MARK) :])
    page.write_report({}, [], tmp_path / "more", more=elsewhere)
    assert (tmp_path / "more.md").read_text().startswith(f"Read by people.\n{page.MARK}\n"), "text above stays"
    found = {row["arm"]: row for row in rows}
    assert {(row["dataset"], row["reference"]) for row in rows} == {("frappe", "exact")}, "adult has no runs"
    assert found["exact"]["gap_pct"] == 0
    assert found["exact_additive"]["gap_pct"] < 0 < found["joint"]["gap_pct"]
    assert found["joint"]["ci_low_pct"] < found["joint"]["gap_pct"] < found["joint"]["ci_high_pct"]
    assert (found["joint"]["seeds"], found["joint"]["rows"], found["joint"]["rows_per_s"]) == (3, ROWS, 2000)
    assert all(math.isfinite(row["ne"]) for row in rows)
    text = (tmp_path / "gap.md").read_text()
    table = text.partition("## frappe")[2]
    assert table.index("| exact_additive |") < table.index("| exact |") < table.index("| joint |")
    assert "3 seeds, 400 test rows, against `exact`" in text
    assert "0.1: not met" in text
    assert (tmp_path / "gap-frappe.png").stat().st_size > 0
    table1 = json.loads(page.TABLE_1.read_text())["arms"]
    assert all(f"| {arm['name']} | " in text for arm in table1), "the gap of every row of Table 1"


def test_the_split_is_of_all_rows_once_and_the_same_each_time(benchmarks: dict[str, ModuleType]) -> None:
    table, split = pd.DataFrame({"label": range(1000)}), benchmarks["objectives_data"].split
    parts = split(table)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 700, "valid": 100, "test": 200}
    assert sorted(value for rows in parts.values() for value in rows["label"]) == list(range(1000))
    assert all(rows.equals(split(table)[name]) for name, rows in parts.items())
