"""A small log with every kind of feature, and a run on it, for the tests of exports and of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from in_process import call

CONFIG = """
data: {kind: parquet, train: train.parquet, eval: held_out.parquet, label: {column: clicked}}
features:
  dense:
    - {name: age, transform: standardize}
    - {name: price, fill: 3.5, missing_values: ["-1"]}
    - {name: clicks before, column: before, transform: none}
  sparse:
    - {name: city, encoding: vocabulary, min_count: 2, missing_values: [nowhere]}
    - {name: device, encoding: hash, num_embeddings: 50, fill: phone}
    - {name: slot, encoding: id, num_embeddings: 5}
    - {name: tags, encoding: vocabulary, multi_valued: true, separator: "|", max_length: 3, pooling: mean}
    - {name: terms, encoding: hash, num_embeddings: 20, multi_valued: true, weights: shares}
embedding: {dim: 4, backend: torch}
towers:
  - {name: deep, kind: mlp, params: {hidden: [8]}}
train: {epochs: 3, local_batch_size: 64, device: cpu, threads: 1}
optimizer: {dense: {lr: 0.01}}
eval: {scores: true, local_batch_size: 50}
run: {name: r}
"""
CITIES = ["Rome", "Oslo", "Bonn", "Zürich, the long name of it", "nowhere"]


def rows(seed: int, count: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    terms = [rng.choice(["x", "y", "z", "longer than eight"], rng.integers(0, 4)).tolist() for _ in range(count)]
    city = rng.integers(0, len(CITIES), count)
    return pd.DataFrame(
        {
            "clicked": (rng.random(count) < (city + 1) / 6).astype(np.int64),
            "age": np.where(rng.random(count) < 0.1, np.nan, rng.integers(18, 80, count)),
            "price": rng.choice([-1.0, 0.5, 12.25, 1e7], count),
            "before": rng.integers(-5, 5, count),
            "city": np.array(CITIES)[city],
            "device": rng.choice(["phone", "desk", ""], count),
            "slot": rng.integers(0, 5, count),
            "tags": ["|".join(rng.choice(["a", "b", "c"], rng.integers(0, 5))) for _ in range(count)],
            "terms": terms,
            "shares": [rng.random(len(bag)).tolist() for bag in terms],
            "time": rng.choice(["14102100", "14102523", "14110212", ""], count),
        }
    )


def json_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as a client of the server sends them; the label stays out."""
    plain = frame.drop(columns="clicked").astype(object)
    return [
        {name: None if value is None or value != value else value for name, value in row.items()}
        for row in plain.to_dict("records")
    ]


def train(folder: Path, *overrides: str) -> Path:
    """A run of ``CONFIG``; its folder."""
    if not (folder / "small.yaml").exists():
        rows(1, 400).to_parquet(folder / "train.parquet", index=False)
        rows(2, 300).to_parquet(folder / "held_out.parquet", index=False)
        (folder / "small.yaml").write_text(CONFIG, encoding="utf-8")
    call(folder, "train", "--config", "small.yaml", *overrides)
    return folder / "runs" / "r"
