"""``erase-rec doctor``: a configuration is judged with its data, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from in_process import call

CONFIG = """
data: {kind: parquet, train: log.parquet, eval_fraction: 0.2, label: {column: clicked}}
features:
  sparse:
    - {name: item, encoding: id, num_embeddings: 100}
    - {name: tags, encoding: id, num_embeddings: 10, multi_valued: true}
    - {name: city, encoding: vocabulary}
embedding: {dim: 4, backend: torch}
towers: [{name: deep, kind: mlp, params: {hidden: [8]}}]
train: {epochs: 1, local_batch_size: 64, device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    frame = pd.DataFrame({"clicked": np.arange(200) % 2, "item": np.arange(200) % 100, "city": "Rome"})
    frame["tags"] = [[number % 10, 3] for number in range(200)]
    frame.to_parquet(tmp_path / "log.parquet")
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def checks(folder: Path, *arguments: str, expect: int = 0) -> dict[str, dict[str, Any]]:
    """The checks by name; of several with one name the first."""
    record = json.loads(call(folder, "doctor", "--json", *arguments, expect=expect).stdout)
    assert list(record) == ["format", "ok", "counts", "checks"]
    assert record["format"] == 1
    assert record["ok"] == (expect == 0)
    assert sum(record["counts"].values()) == len(record["checks"])
    found: dict[str, dict[str, Any]] = {}
    for check in record["checks"]:
        assert list(check) == ["name", "level", "found", "way_out"]
        assert (check["way_out"] == "") == (check["level"] == "ok"), check
        found.setdefault(check["name"], check)
    return found


def test_a_machine_alone(tmp_path: Path) -> None:
    result = call(tmp_path, "doctor")
    assert result.stdout.startswith("ok       python")
    assert "GiB free at" in result.stdout


def test_a_configuration_that_trains(folder: Path) -> None:
    found = checks(folder, "--config", "c.yaml")
    names = ["config", "device", "backend", "data.train", "data.eval", "tables", "ids"]
    assert list(found)[-7:] == names
    assert {name: found[name]["level"] for name in names} == dict.fromkeys(names, "ok")
    assert found["data.train"]["found"].startswith("1 file, 0.0 MiB; all columns are there")
    assert found["data.eval"]["found"] == "20% of the training rows, by row"
    assert found["ids"]["found"] == "within their tables: item 0 to 99, tags 0 to 9"
    # 102 and 12 rows of 4 weights and one number of row-wise Adagrad's state
    assert "1 vocabularies whose size the data will tell (city)" in found["tables"]["found"]


@pytest.mark.parametrize(
    ("change", "name", "level", "text"),
    [
        ("data.train=log.parqet", "data.train", "problem", "'log.parqet' not found; did you mean 'log.parquet'"),
        ("data.label.column=click", "data.train", "problem", "column 'click' not found; did you mean 'clicked'?"),
        ("features.sparse.item.num_embeddings=50", "ids", "problem", "holds ids from 0 to 99, expected 0 to 49"),
        ("features.sparse.tags.num_embeddings=9", "ids", "problem", "'tags' holds ids from 0 to 9, expected 0 to 8"),
        ("embedding.dim=400000000", "tables", "problem", "are free in memory"),
        ("data.eval_fraction=null", "data.eval", "warning", "no rows are held out"),
        ("train.precision=bf16", "device", "warning", "bf16 is slow"),
        ("data.prepared=nowhere", "data", "problem", "there is no folder 'nowhere'"),
        ("towers.deep.params.hiden=[3]", "config", "problem", "hiden"),
    ],
)
def test_what_is_amiss(folder: Path, change: str, name: str, level: str, text: str) -> None:
    found = checks(folder, "--config", "c.yaml", change, expect=1 if level == "problem" else 0)
    assert found[name]["level"] == level
    assert text in f"{found[name]['found']}; {found[name]['way_out']}"


def test_all_problems_of_a_configuration_are_listed(folder: Path) -> None:
    result = call(folder, "doctor", "--config", "c.yaml", "train.epochs=no", "embedding.dimm=3", expect=1)
    assert result.stdout.count("problem  config") == 2


def test_a_prepared_folder_knows_its_tables(folder: Path) -> None:
    call(folder, "prepare", "--config", "c.yaml", "--out", "prepared", "--workers", "1")
    found = checks(folder, "--config", "c.yaml", "data.prepared=prepared")
    rows = found["data"]["found"]
    assert rows.startswith("prepared: ")
    assert rows.endswith("held out")
    assert "vocabularies" not in found["tables"]["found"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "no.yaml"], "configuration 'no.yaml' not found"),
        (["train.steps=3"], "train.steps=3: changes a configuration; name it with --config"),
    ],
)
def test_mistakes_are_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in call(tmp_path, "doctor", *arguments, expect=2).stderr
