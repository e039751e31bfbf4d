"""Published protocols as configurations, on samples of their files, and what refuses other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from in_process import call

from data.dataset import build_datasets
from data.errors import DataError
from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.load import load_config
from erase_rec.config.schema import ExpectedConfig

ROWS = 400
PARTS = {"train": 300, "valid": 60, "test": 40}
OTHER_ROWS = "data.expected=null"


def written(folder: Path, table: pd.DataFrame) -> Path:
    """The table's rows as train, valid and test."""
    folder.mkdir(parents=True)
    start = 0
    for part, count in PARTS.items():
        table.iloc[start : start + count].to_csv(folder / f"{part}.csv", index=False)
        start += count
    return folder


def criteo(label: str) -> pd.DataFrame:
    generator = np.random.default_rng(1)
    numbers = {f"I{number}": generator.integers(-2, 3000, ROWS).astype(str) for number in range(1, 14)}
    numbers["I5"][::3] = ""
    hashes = {f"C{number}": generator.choice(["68fd1e64", "05db9164", "8cf07265"], ROWS) for number in range(1, 27)}
    return pd.DataFrame({label: (generator.random(ROWS) < 0.2562).astype(int), **numbers, **hashes})


def avazu() -> pd.DataFrame:
    generator = np.random.default_rng(1)
    names = ["C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"]
    names += ["device_id", "device_ip", "device_model", "device_type", "device_conn_type"]
    names += [f"C{number}" for number in range(14, 22)]
    times = generator.choice(["14102100", "14102523", "14110212"], ROWS)
    return pd.DataFrame(
        {
            "id": [str(10**19 + number) for number in range(ROWS)],
            "click": (generator.random(ROWS) < 0.1698).astype(int),
            "hour": times,
            **{name: generator.choice(["a99f214a", "1005", "0"], ROWS) for name in names},
        }
    )


def avazu_x1() -> pd.DataFrame:
    generator = np.random.default_rng(1)
    features = {f"feat_{number}": generator.integers(0, 9, ROWS) for number in range(1, 23)}
    return pd.DataFrame({"label": (generator.random(ROWS) < 0.1698).astype(int), **features})


SAMPLES = {
    "criteo_x4": criteo("Label"),
    "criteo_x1": criteo("label"),
    "avazu_x4": avazu(),
    "avazu_x1": avazu_x1(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_protocol_trains_on_a_sample_and_refuses_it_where_it_stands_for_the_whole(name: str, tmp_path: Path) -> None:
    written(tmp_path / f"datasets/{name}", SAMPLES[name])
    run = ("train", "--config", f"protocols/{name}.yaml", "train.epochs=1", "run.name=run", "train.device=cpu")
    refused = call(tmp_path, *run, expect=2).stderr
    assert "data.expected.train_rows: expected" in refused
    assert "training rows, found 300" in refused
    assert "data.expected.eval_rows: expected" in refused
    assert OTHER_ROWS in refused
    call(tmp_path, *run, OTHER_ROWS)
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())
    assert (summary["eval"]["rows"], summary["train"]["rows"]) == (PARTS["valid"], PARTS["train"])
    tested = call(tmp_path, "eval", "--checkpoint", "runs/run", f"data.eval=datasets/{name}/test.csv", "--json").stdout
    assert json.loads(tested)["eval"]["rows"] == PARTS["test"]


def test_the_protocols_features_are_those_of_bars() -> None:
    x4 = load_config("protocols/criteo_x4.yaml", [], catalog=ContentCatalog()).config
    assert [(each.name, each.derive, each.fill) for each in x4.features.sparse[:13]] == [
        (f"I{number}", "log_square", "0") for number in range(1, 14)
    ]
    assert (len(x4.features.sparse), x4.features.dense, x4.embedding.dim) == (39, (), 16)
    assert {each.min_count for each in x4.features.sparse} == {10}
    x1 = load_config("protocols/criteo_x1.yaml", [], catalog=ContentCatalog()).config
    assert ({each.transform for each in x1.features.dense}, len(x1.features.dense)) == ({"none"}, 13)
    avazu_x4 = load_config("protocols/avazu_x4.yaml", [], catalog=ContentCatalog()).config
    names = [each.name for each in avazu_x4.features.sparse]
    assert (len(names), "id" in names, {each.min_count for each in avazu_x4.features.sparse}) == (24, False, {2})


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ({"train_rows": 299}, ["train_rows: expected 299 training rows, found 300"]),
        ({"eval_rows": 61}, ["eval_rows: expected 61 held-out rows, found 60"]),
        ({"label_rate": 0.9}, ["label_rate: expected a share of clicks of 0.9000"]),
        ({"train_rows": 1, "label_rate": 0.9}, ["train_rows: expected 1 ", "label_rate: expected"]),
        ({"train_rows": 300, "eval_rows": 60}, []),
    ],
)
def test_every_number_that_is_not_as_expected_is_named(
    expected: dict[str, Any], wrong: list[str], tmp_path: Path
) -> None:
    folder = written(tmp_path / "files", SAMPLES["avazu_x1"])
    files = (f"data.train={folder / 'train.csv'}", f"data.eval={folder / 'valid.csv'}")
    config = load_config("protocols/avazu_x1.yaml", [OTHER_ROWS, *files], catalog=ContentCatalog()).config
    meant = ExpectedConfig.model_validate(expected)
    config = config.model_copy(update={"data": config.data.model_copy(update={"expected": meant})})
    if not wrong:
        assert build_datasets(config).train.num_rows == 300
        return
    with pytest.raises(DataError) as caught:
        build_datasets(config)
    assert str(caught.value).count("data.expected.") == len(wrong)
    assert all(sentence in str(caught.value) for sentence in wrong)
