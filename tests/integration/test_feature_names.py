"""Names that module dictionaries, file systems or YAML refuse, or take for their own, through all commands."""

from __future__ import annotations

import json
from pathlib import Path

import in_process
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml

NAMES = [
    *("type", "name", "keys", "forward", "a.b", "user-item_affinity_0", "101", "性别", "a b"),
    *("a/b", "..", "dense", "label", "train", "null", "on"),
]


def call(folder: Path, *arguments: str) -> str:
    return in_process.call(folder, *arguments).stdout


@pytest.mark.timeout(300)
def test_any_name_prepares_trains_and_reloads_to_the_same_predictions(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    columns = {name: rng.integers(0, 9 + number, 600) for number, name in enumerate(NAMES)}
    pd.DataFrame({"click": rng.integers(0, 2, 600)} | columns).to_csv(tmp_path / "log.csv", index_label="")
    config = {
        "data": {
            "kind": "csv",
            "train": "log.csv",
            "label": {"column": "click"},
            "eval_fraction": 0.3,
            "row_id": "",
        },
        "features": {
            "dense": [{"name": f"dense {name}", "column": name} for name in NAMES],
            "sparse": [
                {"name": name, "encoding": "vocabulary" if number % 2 else "hash", "num_embeddings": 50}
                for number, name in enumerate(NAMES)
            ]
            + [{"name": "nameless", "column": "", "encoding": "id", "num_embeddings": 600}],
        },
        "embedding": {"dim": 4, "backend": "torch"},
        "towers": [{"name": "deep", "kind": "mlp"}],
        "train": {"steps": 5, "local_batch_size": 64, "device": "cpu", "threads": 1},
        "eval": {"scores": True},
        "run": {"name": "r"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    call(tmp_path, "prepare", "--config", "config.yaml", "--out", "prepared", "--workers", "1")
    call(tmp_path, "train", "--config", "config.yaml", "data.prepared=prepared")
    trained = pq.read_table(tmp_path / "runs" / "r" / "scores.parquet")
    assert len(trained) == json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())["eval"]["rows"] > 100
    call(tmp_path, "eval", "--checkpoint", "runs/r", "data.eval_fraction=0.3", "--scores", "files.parquet")
    call(tmp_path, "eval", "--checkpoint", "runs/r", "--scores", "prepared.parquet")
    for name in ("files", "prepared"):
        assert pq.read_table(tmp_path / f"{name}.parquet").equals(trained), name
