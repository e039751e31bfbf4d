"""The main job on public click logs as their owners wrote them, its numbers against scikit-learn's.

Skipped where ERASE_REC_DATA names no folder with the logs. Each run is the command that a user types.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from in_process import Ended
from sklearn.metrics import log_loss, roc_auc_score

from data.shuffle import held_out

COMMON = ["run.name=r", "embedding.backend=torch", "train.threads=1", "eval.scores=true"]


def call(cwd: Path, *arguments: str) -> Ended:
    """Runs ``erase-rec train``, or ``erase-rec eval`` where that is the first argument, and expects exit code 0."""
    return in_process.call(cwd, *(() if arguments[0] == "eval" else ("train",)), *arguments)


def train(checkout: Path, cwd: Path, config: str, *overrides: str) -> dict[str, Any]:
    """Trains and returns ``summary.json``, whose metrics were compared with scikit-learn's on the dumped scores."""
    call(cwd, "--config", config, *COMMON, *overrides)
    summary: dict[str, Any] = json.loads((cwd / "runs" / "r" / "summary.json").read_text())
    assert summary["status"] == "completed"
    rows = scores(cwd)
    assert len(rows) == summary["eval"]["rows"]
    expected = reference(rows["label"], rows["prediction"])
    assert np.isfinite(list(expected.values())).all()
    assert {name: summary["eval"][name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert len(summary["towers"]) == 6
    for name, found in summary["towers"].items():
        # rel: scikit-learn takes log(1 - p), which loses digits where a tower is saturated
        tower = reference(rows["label"], 1 / (1 + np.exp(-rows[f"tower_{name}"].astype(float))))
        for metric in ("ne", "auc"):
            assert found[metric] == pytest.approx(tower[metric], rel=1e-6), name
    return summary


def reference(label: pd.Series[int], prediction: pd.Series[float]) -> dict[str, float]:
    """The metrics by their definitions."""
    base_rate = label.mean()
    cross_entropy = log_loss(label, prediction)
    return {
        "logloss": cross_entropy,
        "ne": cross_entropy / log_loss(label, np.full(len(label), base_rate)),
        "auc": roc_auc_score(label, prediction),
        "calibration": prediction.mean() / base_rate,
        "base_rate": base_rate,
    }


def scores(cwd: Path) -> pd.DataFrame:
    return pq.read_table(cwd / "runs" / "r" / "scores.parquet").to_pandas()


def assert_labels(cwd: Path, expected: pd.Series[Any]) -> None:
    """The dumped labels are those of the file's held-out rows, in their order."""
    rows = scores(cwd)
    assert rows["row_id"].is_unique
    config = yaml.safe_load((cwd / "runs" / "r" / "config.yaml").read_text())
    fraction = config["data"]["eval_fraction"]
    labels = expected.to_numpy()
    if fraction is not None:
        labels = labels[held_out(np.arange(len(labels)), seed=config["seed"], fraction=fraction)]
    assert len(labels) == len(rows)
    assert (labels[rows["row_id"]] == rows["label"]).all()


def write_yaml(cwd: Path, base: Path, body: str) -> str:
    """A configuration of the user's own, on top of a shipped one."""
    path = cwd / "own.yaml"
    path.write_text(f"_base_: {base}\n{body}")
    return path.name


def test_criteo(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "criteo_first8k"
    files = [f"data.train={folder / 'train.csv'}", f"data.eval={folder / 'dev.csv'}"]
    summary = train(checkout, tmp_path, "ctr_criteo.yaml", *files)
    assert summary["train"]["rows"] == 7200
    assert summary["eval"]["rows"] == 409
    assert summary["eval"]["auc"] > 0.6
    assert_labels(tmp_path, pd.read_csv(folder / "dev.csv", sep="\t", header=None)[0])


def test_avazu(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """Also: other files scored with the checkpoint, where the share of unseen categories is said."""
    folder = real_data / "avazu_first9k"
    path = folder / "train.csv"
    summary = train(checkout, tmp_path, "ctr_avazu.yaml", f"data.train={path}", "data.eval_fraction=0.1")
    assert summary["train"]["rows"] + summary["eval"]["rows"] == 8087
    assert_labels(tmp_path, pd.read_csv(path, usecols=["click"])["click"])
    other = f"data.eval={folder / 'deepctr_avazu_sample.txt'}"
    result = call(tmp_path, "eval", "--json", "--checkpoint", "runs/r", other)
    assert json.loads(result.stdout)["eval"]["rows"] == 100
    assert "of the held-out categorical values are unseen: device_ip" in result.stderr


def test_frappe(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """From libfm to a table of ten id columns; the label is -1 or 1."""
    with gzip.open(real_data / "frappe_libfm" / "frappe.validation.libfm.gz", "rt") as file:
        rows = [line.replace(":1", "").split() for line in file][:8000]
    frame = pd.DataFrame(rows, columns=["label", *(f"f{field}" for field in range(10))])
    frame.to_csv(tmp_path / "frappe.csv", index=False)
    body = """
data: {kind: csv, train: frappe.csv, eval_fraction: 0.1, label: {column: label, positive: ["1"], negative: ["-1"]}}
features:
  sparse_defaults: {encoding: id, num_embeddings: 5382, min_count: null}
  sparse: [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9]
"""
    summary = train(checkout, tmp_path, write_yaml(tmp_path, checkout / "configs" / "ctr_avazu.yaml", body))
    assert summary["eval"]["auc"] > 0.8
    assert_labels(tmp_path, (frame["label"] == "1").astype(int))


def test_movielens(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """Joined from ratings, users and films as Parquet with lists, then the shipped configuration with a rating rule."""
    folder = real_data / "movielens_parquet"
    ratings, users, films = (
        pd.read_parquet(folder / f"MovieLens100k_{part}.parquet.brotli") for part in ("data", "users", "items")
    )
    flags = films.loc[:, "unknown":"Western"]
    films["genres"] = [flags.columns[row].tolist() for row in flags.to_numpy(dtype=bool)]
    films["release_year"] = pd.to_numeric(films["release_date"].str[-4:]).astype("Int64")
    joined = ratings.sort_values("timestamp", kind="stable").merge(users, on="user_id").merge(films, on="movie_id")
    joined = joined.rename(columns={"movie_id": "item_id"})
    place = tmp_path / "datasets" / "movielens-100k"
    place.mkdir(parents=True)
    joined[:10000].to_parquet(place / "train.parquet", compression="brotli")
    joined[10000:12000].to_parquet(place / "eval.parquet", compression="brotli")
    label = ["data.label.column=rating", "data.label.at_least=4"]
    summary = train(checkout, tmp_path, "ctr_movielens.yaml", *label)
    assert summary["train"]["rows"] == 20000, "two epochs"
    assert summary["eval"]["auc"] > 0.6
    assert_labels(tmp_path, (joined["rating"][10000:12000] >= 4).astype(int))


def test_adult(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """Brotli-compressed Parquet whose name does not say so, a text label, ``?`` for missing, ``-`` in names."""
    path = real_data / "adult_parquet" / "adult.parquet.brotli"
    part = tmp_path / "adult.brotli"
    pq.write_table(pq.read_table(path).slice(0, 8000), part, compression="brotli")
    summary = train(checkout, tmp_path, "ctr_parquet.yaml", f"data.train={part}", "data.eval_fraction=0.1")
    assert summary["eval"]["auc"] > 0.8
    assert_labels(tmp_path, (pd.read_parquet(part)["income"] == ">50K").astype(int))


def test_open_bandit(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """A gzipped CSV with a nameless first column, 42 clicks in 10,000 rows, columns that are nearly all zero."""
    path = real_data / "open_bandit" / "bts_all" / "all.csv.gz"
    body = f"""
data: {{kind: csv, train: {path}, eval_fraction: 0.2, label: {{column: click}}, params: null}}
features:
  dense_defaults: {{transform: standardize}}
  dense: [propensity_score, {", ".join(f"user-item_affinity_{item}" for item in range(80))}]
  sparse: [item_id, position, user_feature_0, user_feature_1, user_feature_2, user_feature_3]
train: {{local_batch_size: 500, log_every_steps: 1}}
"""
    summary = train(checkout, tmp_path, write_yaml(tmp_path, checkout / "configs" / "ctr_erase.yaml", body))
    log = [json.loads(line) for line in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    windows = [row["train/ne"] for row in log if "train/ne" in row]
    assert None in windows, "a window without clicks has no NE"
    assert any(ne is not None for ne in windows)
    assert np.isfinite(summary["train"]["ne"])
    assert_labels(tmp_path, pd.read_csv(path, usecols=["click"])["click"])
