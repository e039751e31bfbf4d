"""``erase-rec init``: what it finds in a file, and that what it writes trains as it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from in_process import call

QUICK = ["train.steps=3", "embedding.backend=torch", "train.threads=1", "train.device=cpu", "run.name=r"]


def written(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def features(path: Path) -> dict[str, dict[str, Any]]:
    """Settings of each feature, by column, with its kind."""
    found = written(path)["features"]
    return {
        entry.get("column", entry["name"]): {"kind": kind, **entry}
        for kind in ("dense", "sparse")
        for entry in found[kind]
    }


def comment(path: Path, start: str) -> str:
    """The comment of the line that begins so."""
    (line,) = [line for line in path.read_text().splitlines() if line.strip().startswith(start)]
    return line.split("#", 1)[1].strip()


def trains(folder: Path, config: str = "config.yaml") -> dict[str, Any]:
    call(folder, "train", "--config", config, *QUICK)
    summary: dict[str, Any] = json.loads((folder / "runs" / "r" / "summary.json").read_text())
    assert summary["status"] == "completed"
    return summary


def log(count: int = 3000) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    clicked = rng.integers(0, 2, count)
    return pd.DataFrame(
        {
            "row": np.arange(count),
            "token": [f"{number:016x}" for number in rng.permutation(count) * 7919],
            "clicked": clicked,
            "outcome": np.where(clicked == 1, "win", "loss"),
            "shown": pd.date_range("2024-01-01", periods=count, freq="min").astype(str),
            "version": "v1",
            "nothing": "",
            "weight": np.round(rng.normal(50, 9, count), 3),
            "income": np.where(rng.random(count) < 0.7, 0, rng.integers(1, 10**6, count)),
            "hour": rng.integers(0, 24, count) % 12,
            "user": rng.integers(10**6, 10**9, 2000)[rng.integers(0, 2000, count)],
            "remapped": rng.permutation(np.arange(count) % 700),
            "zip code": [f"{number:05d}" for number in rng.integers(0, 300, count)],
            "city, state": rng.choice(["Rome", "Oslo", "?"], count),
            "tags": ["|".join(rng.choice(["a", "b", "c"], rng.integers(0, 4))) for _ in range(count)],
            "größe": rng.choice(["S", "M", "L"], count),
        }
    )


@pytest.fixture
def text_log(tmp_path: Path) -> Path:
    log().to_csv(tmp_path / "log.csv", index=False)
    return tmp_path


def test_each_column_is_what_it_looks_like(text_log: Path) -> None:
    result = call(text_log, "init", "log.csv", "--label", "clicked")
    assert "3,000 rows; label 'clicked': 0 and 1 as they are" in result.stdout
    config = text_log / "config.yaml"
    found = features(config)
    assert {name: entry["kind"] for name, entry in found.items()} == {
        "weight": "dense",
        "income": "dense",
        "hour": "sparse",
        "user": "sparse",
        "remapped": "sparse",
        "zip code": "sparse",
        "city, state": "sparse",
        "tags": "sparse",
        "größe": "sparse",
    }
    assert found["weight"]["transform"] == "standardize"
    assert found["income"]["transform"] == "log"
    assert found["city, state"]["missing_values"] == ["?"]
    assert found["user"]["min_count"] == 2
    assert found["hour"]["min_count"] == 1
    tags = found["tags"]
    assert (tags["multi_valued"], tags["separator"]) == (True, "|")
    for column, reason in {
        "row": "names the rows",
        "token": "names the rows",
        "outcome": "each of its values goes with one label only",
        "shown": "times: make features",
        "version": "constant: 'v1'",
        "nothing": "empty in every row",
    }.items():
        assert comment(config, f"#   {column}:").startswith(f"{column}: {reason}")
    assert written(config)["embedding"] == {"dim": 16}
    assert written(config)["train"] == {"epochs": 2, "local_batch_size": 256, "log_every_steps": 1}
    summary = trains(text_log)
    assert summary["train"]["steps"] == 3
    assert 200 < summary["eval"]["rows"] < 400


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    frame = log(400).drop(columns=["row", "token", "outcome", "tags"])
    frame["tags"] = [list("ab"[: number % 3]) for number in range(400)]
    frame["vector"] = [[0.5, 1.5]] * 400
    frame["seen"] = pd.to_datetime(frame["shown"])
    frame["new"] = frame["hour"] > 5
    frame["ratio"] = np.where(frame["hour"] == 3, np.inf, frame["weight"])
    frame["maker"] = np.where(frame["hour"] < 2, np.nan, frame["hour"].astype(float))
    frame["size"] = frame.pop("größe").astype("category")
    frame.to_parquet(tmp_path / "log.parquet")
    call(tmp_path, "init", "log.parquet", "--label", "clicked", "--out", "c.yaml")
    found = features(tmp_path / "c.yaml")
    assert {name: found[name]["kind"] for name in ("tags", "new", "size")} == dict.fromkeys(
        ("tags", "new", "size"), "sparse"
    )
    assert found["tags"]["multi_valued"]
    assert "separator" not in found["tags"]
    assert "which no feature reads" in comment(tmp_path / "c.yaml", "#   vector:")
    assert "seen" not in found
    assert (found["ratio"]["kind"], found["ratio"]["transform"]) == ("dense", "log")
    assert found["maker"]["kind"] == "sparse"
    assert "missing" in comment(tmp_path / "c.yaml", "- {name: maker")
    trains(tmp_path, "c.yaml")


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from data.sources import parquet
    from erase_rec.api import init_facts

    monkeypatch.setattr(parquet, "MAX_CHUNK_ROWS", 500)
    monkeypatch.setattr(init_facts, "SAMPLE_ROWS", 1000)
    log(3000).to_parquet(tmp_path / "log.parquet", row_group_size=500)
    result = call(tmp_path, "init", "log.parquet", "--label", "clicked")
    assert "3,000 rows (the first 1,000 were looked at)" in result.stdout
    assert "the first 1,000 of about 3,000 rows." in (tmp_path / "config.yaml").read_text()
    assert "about 2," in comment(tmp_path / "config.yaml", "- {name: user,"), "new users go on coming"
    assert "epoch" in comment(tmp_path / "config.yaml", "local_batch_size: 256")


@pytest.mark.parametrize(
    ("values", "options", "rule"),
    [
        (["-1", "1"], [], {"positive": ["1"], "negative": ["-1"]}),
        (["no", "yes"], [], {"positive": ["yes"], "negative": ["no"]}),
        (["false", "true"], [], {}),
        (["3", "5"], ["--at-least", "4"], {"at_least": 4.0}),
        (["seen", "bought"], ["--positive", "bought"], {"positive": ["bought"]}),
    ],
)
def test_how_the_label_is_read(tmp_path: Path, values: list[str], options: list[str], rule: dict[str, Any]) -> None:
    frame = pd.DataFrame({"label": np.tile(values, 50), "city": np.repeat(["a", "b", "c", "d"], 25)})
    frame.to_csv(tmp_path / "log.csv", index=False)
    call(tmp_path, "init", "log.csv", "--label", "label", *options)
    assert written(tmp_path / "config.yaml")["data"]["label"] == {"column": "label", **rule}
    assert 40 < trains(tmp_path)["eval"]["rows"] + 90 < 130


def test_the_rarer_of_two_words_is_a_click(tmp_path: Path) -> None:
    frame = pd.DataFrame({"label": np.where(np.arange(90) % 9, "b", "a"), "city": np.repeat(["x", "y", "z"], 30)})
    frame.to_csv(tmp_path / "log.csv", index=False)
    call(tmp_path, "init", "log.csv", "--label", "label")
    assert written(tmp_path / "config.yaml")["data"]["label"]["positive"] == ["a"]
    assert "taken from the rarer one" in comment(tmp_path / "config.yaml", "label:")


def test_only_numbers_still_train(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"label": rng.integers(0, 2, 200), "a": rng.random(200), "b": rng.integers(0, 60, 200) / 2})
    frame.to_csv(tmp_path / "log.tsv", index=False, sep="\t")
    call(tmp_path, "init", "log.tsv", "--label", "label")
    assert written(tmp_path / "config.yaml")["data"]["params"] == {"delimiter": "tab"}
    assert features(tmp_path / "config.yaml")["b"]["kind"] == "sparse"
    trains(tmp_path)


def test_odd_names_and_rows(tmp_path: Path) -> None:
    rows = [f"{number},{number % 2},{'abc'[number % 3]},{number % 5},x,y" for number in range(400)]
    rows[7] = "7,1"
    (tmp_path / "log.csv").write_text("\n".join([",label,a: b,101,twice,twice", *rows]) + "\n")
    call(tmp_path, "init", "log.csv", "--label", "label")
    config = tmp_path / "config.yaml"
    assert set(features(config)) == {"a: b", "101"}
    assert written(config)["data"]["bad_rows"] == "skip"
    assert "line 9: found 2 fields" in comment(config, "bad_rows:")
    assert "several columns have this name" in comment(config, "#   twice:")
    assert comment(config, "#   (nameless):").startswith("(nameless): names the rows")
    trains(tmp_path)


def test_a_file_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("".join(f"{n % 2};{'abc'[n % 3]};{n % 7}\n" for n in range(100)))
    refused = call(tmp_path, "init", "log.txt", "--label", "y", expect=2)
    assert "--columns NAME,NAME" in refused.stderr
    call(tmp_path, "init", "log.txt", "--label", "y", "--columns", "y,a,b")
    assert written(tmp_path / "config.yaml")["data"]["params"] == {"delimiter": ";", "columns": ["y", "a", "b"]}
    trains(tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("label,a\n1,x\n3,y\n5,x\n", [], "is no click label: expected 0 and 1, or two values, found 3: '1' (1 rows)"),
        ("label,a\n1,x\n3,y\n5,x\n", [], "--at-least NUMBER, or --positive '5'"),
        ("label,a\nx,x\ny,y\nz,x\n", [], "say which mean a click: --positive 'z'"),
        ("label,a\n0,x\n0,y\n", [], "all of the first 2 rows have label 0, so there is nothing to learn"),
        ("label,a\n0,x\n,y\n1,y\n", [], "1 of the first 3 rows have no label"),
        ("label,a\n0,x\n1,y\n", ["--positive", "2"], "--positive: '2' is not in column 'label'; it holds '0' (1 rows)"),
        ("label,a\n0,x\n1,y\n", ["--positive", "1", "--at-least", "1"], "one rule makes the label"),
        ("label,a\nx,x\n1,y\n", ["--at-least", "1"], "column 'label': found 'x', expected a number"),
        ("lable,a\n0,x\n1,y\n", [], "column 'label' not found; did you mean 'lable'?"),
        ("label,a\n0,x\n1,x\n", [], "no column is left to learn from: 'a' constant: 'x' in every row"),
        ("label,a\n0,x\n1\n0,y\n", [], "1 of the first 3 rows cannot be read; line 3: found 1 field"),
        ("label,a\n", [], "the file holds a header and no rows"),
        ("", [], "the file is empty"),
        ("label\n0\n1\n", [], "its first line has no TAB, comma, semicolon or bar: 'label'"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: str, options: list[str], message: str) -> None:
    (tmp_path / "log.csv").write_text(content)
    assert message in call(tmp_path, "init", "log.csv", "--label", "label", *options, expect=2).stderr
    assert not (tmp_path / "config.yaml").exists()


def test_files_are_named_and_kept(text_log: Path) -> None:
    assert "not found" in call(text_log, "init", "no.csv", "--label", "clicked", expect=2).stderr
    (text_log / "config.yaml").write_text("mine")
    start = ["init", "log.csv", "--label", "clicked"]
    assert (
        "config.yaml exists; name another file, or replace it with --force" in call(text_log, *start, expect=2).stderr
    )
    assert (text_log / "config.yaml").read_text() == "mine"
    assert "--out: cannot write no/c.yaml" in call(text_log, *start, "--out", "no/c.yaml", expect=2).stderr
    call(text_log, *start, "--force")
    assert written(text_log / "config.yaml")["data"]["kind"] == "csv"


@pytest.mark.parametrize(
    ("file", "options", "dense", "sparse"),
    [
        ("adult_parquet/adult.parquet.brotli", ["--label", "income"], {"age", "capital-gain"}, {"native-country"}),
        ("avazu_first9k/train.csv", ["--label", "click"], set(), {"C14", "device_ip", "site_id"}),
        ("taobao_tiny/train_sample.csv", ["--label", "clk"], {"price"}, {"click_sequence", "cate_id"}),
        ("taobao_tiny/train.parquet", ["--label", "clk"], set(), {"cate_id"}),
        ("open_bandit/bts_all/all.csv.gz", ["--label", "click"], {"propensity_score"}, {"item_id", "position"}),
        ("sparrow_movie_ctr/testSamples.csv.gz", ["--label", "label"], {"movieAvgRating"}, {"userId", "userGenre1"}),
        ("porto_10k/train.csv", ["--label", "target"], {"ps_reg_01"}, {"ps_car_11_cat"}),
        ("kuaishou_multihot/dataset1.csv.gz", ["--label", "label"], set(), {"multi", "device_type"}),
        ("aliccp_sample/ali_ccp_train_sample.csv", ["--label", "click"], set(), set()),
        ("talkingdata_10k/train_sample.csv", ["--label", "is_attributed"], set(), {"ip", "app", "channel"}),
        ("movielens_quoted/movielens_sample.txt", ["--label", "rating", "--at-least", "4"], set(), {"genres"}),
        ("criteo_tiny_csv/train.tiny.csv", ["--label", "Label"], {"I2", "I5"}, {"C1", "C26"}),
    ],
)
def test_real_logs(
    real_data: Path, tmp_path: Path, file: str, options: list[str], dense: set[str], sparse: set[str]
) -> None:
    call(tmp_path, "init", str(real_data / file), *options)
    found = features(tmp_path / "config.yaml")
    assert dense <= {name for name, entry in found.items() if entry["kind"] == "dense"}
    assert sparse <= {name for name, entry in found.items() if entry["kind"] == "sparse"}
    assert options[1] not in found
    trains(tmp_path)


def test_a_label_of_minus_one_in_a_real_log(real_data: Path, tmp_path: Path) -> None:
    with gzip.open(real_data / "frappe_libfm" / "frappe.validation.libfm.gz", "rt") as file:
        rows = [line.replace(":1", "").split() for line in file][:6000]
    pd.DataFrame(rows, columns=["label", *(f"f{field}" for field in range(10))]).to_csv(
        tmp_path / "frappe.csv", index=False
    )
    call(tmp_path, "init", "frappe.csv", "--label", "label")
    assert written(tmp_path / "config.yaml")["data"]["label"]["positive"] == ["1"]
    trains(tmp_path)


def test_from_a_file_to_predictions_of_another_without_labels(real_data: Path, tmp_path: Path) -> None:
    """A newcomer's way: init, doctor, train, predict; ``test.csv`` has no column ``target``."""
    folder = real_data / "porto_10k"
    call(tmp_path, "init", str(folder / "train.csv"), "--label", "target")
    assert "problem" not in call(tmp_path, "doctor", "--config", "config.yaml").stdout
    trains(tmp_path)
    files = ["--input", str(folder / "test.csv"), "--keep", "id", "--out", "scores.parquet"]
    call(tmp_path, "predict", "--checkpoint", "runs/r", *files)
    found = pd.read_parquet(tmp_path / "scores.parquet")
    assert found["id"].tolist() == pd.read_csv(folder / "test.csv", dtype=str)["id"].tolist()
    assert found["prediction"].between(0, 1, inclusive="neither").all()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["init", "log.csv", "--label", "label", "--force", "--out", "."], "--out: . is a folder; name a file in it"),
        (["init", "log.csv", "--label", "label", "--out", "x" * 300], ": File name too long"),
        (["synth", "--rows", "5", "--out", "x" * 300], "File name too long"),
        (["dashboard", "x" * 300], "is not a folder"),
    ],
)
def test_names_that_nothing_can_have(tmp_path: Path, command: list[str], message: str) -> None:
    (tmp_path / "log.csv").write_text("label,a\n1,x\n0,y\n1,y\n0,x\n")
    assert message in call(tmp_path, *command, expect=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]
