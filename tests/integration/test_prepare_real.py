"""Public click logs, prepared and read without preparation: the same batches, the hard columns among them.

Skipped where ERASE_REC_DATA names no folder with the logs.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_cases import assert_same_rows, run

from data.errors import DataError
from erase_rec.config.schema import Config

VOCABULARY = {"encoding": "vocabulary"}
HASH = {"num_embeddings": 5000}


def features(dense: str = "", vocabulary: str = "", hashed: str = "", **standardize: Any) -> dict[str, Any]:
    """Features by blank-separated names."""
    return {
        "dense": [{"name": name} | standardize for name in dense.split()],
        "sparse": [{"name": name} | VOCABULARY for name in vocabulary.split()]
        + [{"name": name} | HASH for name in hashed.split()],
    }


def names(letter: str, count: int) -> str:
    return " ".join(f"{letter}{number}" for number in range(1, count + 1))


def config_of(data: dict[str, Any], columns: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "data": {"kind": "csv"} | data,
            "features": columns,
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": 256},
        }
    )


def frappe(real: Path, tmp: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Labels are -1 and 1: the configuration says what they mean."""
    with gzip.open(real / "frappe_libfm" / "frappe.validation.libfm.gz", "rt") as file:
        rows = [line.replace(":1", "").split() for line in file][:8000]
    header = ["label", *(f"f{field}" for field in range(10))]
    (tmp / "frappe.csv").write_text("\n".join(map(",".join, [header, *rows])) + "\n")
    data = {
        "train": str(tmp / "frappe.csv"),
        "eval_fraction": 0.1,
        "label": {"column": "label", "positive": "1", "negative": "-1"},
    }
    return data, {"sparse": [{"name": name, "encoding": "id", "num_embeddings": 5382} for name in header[1:]]}


def slots(real: Path, tmp: Path) -> list[dict[str, Any]]:
    """Label and bags of unsigned 64-bit hashes by slot, ``id:slot`` pairs in the file."""
    rows = []
    for line in (real / "paddle_slots" / "slot_dnn_demo_10.txt").read_text().splitlines():
        bags: dict[str, list[str]] = defaultdict(list)
        for pair in line.split():
            value, slot = pair.split(":")
            bags[slot].append(value)
        (label,) = bags.pop("1")
        rows.append({"label": label, **{f"s{slot}": bags[slot] for slot in ("3", "29", "64", "105")}})
    return rows


def slots_as_csv(real: Path, tmp: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = slots(real, tmp)
    lines = [",".join(rows[0]), *(",".join([row["label"], *map("|".join, list(row.values())[1:])]) for row in rows)]
    (tmp / "slots.csv").write_text("\n".join(lines) + "\n")
    bag = {"multi_valued": True, "separator": "|"}
    sparse = [{"name": "s3", **bag, **HASH}, {"name": "s29", **bag, **VOCABULARY}, {"name": "s64", **bag, **HASH}]
    return {"train": str(tmp / "slots.csv"), "label": {"column": "label"}}, {"sparse": sparse}


def slots_as_parquet(real: Path, tmp: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = slots(real, tmp)
    table = pa.table(
        {"label": [int(row["label"]) for row in rows]}
        | {
            name: pa.array([list(map(int, row[name])) for row in rows], pa.list_(pa.uint64()))
            for name in ("s29", "s105")
        }
    )
    pq.write_table(table, tmp / "slots.parquet")
    bag = {"multi_valued": True}
    sparse = [{"name": "s29", **bag, **HASH}, {"name": "s105", **bag, **VOCABULARY}]
    return {"kind": "parquet", "train": str(tmp / "slots.parquet"), "label": {"column": "label"}}, {"sparse": sparse}


def of(
    path: str, columns: dict[str, Any], **data: Any
) -> Callable[[Path, Path], tuple[dict[str, Any], dict[str, Any]]]:
    """A log that is read as it is; ``eval`` is a file of the same folder."""

    def make(real: Path, tmp: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        files = {"train": str(real / path)}
        if "eval" in data:
            files["eval"] = str(real / data["eval"])
        return data | files, columns

    return make


ADULT = "workclass education marital-status occupation"
LOGS = {
    "criteo": of(
        "criteo_first8k/train.csv",
        features(names("I", 13), names("C", 13), "C14 C20 C26"),
        kind="criteo",
        eval="criteo_first8k/dev.csv",
    ),
    "criteo, CRLF and a header": of(
        "criteo_tiny_csv/train.tiny.csv",
        features(names("I", 13), "", names("C", 26)),
        label={"column": "Label"},
        row_id="Id",
        eval_fraction=0.2,
    ),
    "criteo, scaled": of(
        "criteo_small_samples/openembedding_train100.csv", features(names("I", 13), "C1 C26"), label={"column": "label"}
    ),
    "avazu, ids past 2 ** 63": of(
        "avazu_first9k/train.csv",
        features("", "hour C1 device_model", "device_ip device_id C20"),
        kind="avazu",
        row_id="id",
        eval_fraction=0.1,
    ),
    "taobao Parquet": of(
        "taobao_tiny/train.parquet",
        features("age_level", "userid adgroup_id", "brand"),
        kind="parquet",
        label={"column": "clk"},
        eval="taobao_tiny/valid.parquet",
    ),
    "taobao CSV, an empty column and lists": of(
        "taobao_tiny/train_sample.csv",
        {
            "dense": ["price"],
            "sparse": [
                {"name": "new_user_class_level", **VOCABULARY},
                {"name": "click_sequence", "multi_valued": True, "separator": "^", **VOCABULARY},
                {"name": "pid", **HASH},
            ],
        },
        label={"column": "clk"},
        eval="taobao_tiny/valid_sample.csv",
    ),
    "adult, brotli and text labels": of(
        "adult_parquet/adult.parquet.brotli",
        features("age capital-gain", ADULT, "native-country", transform="standardize"),
        kind="parquet",
        label={"column": "income", "positive": ">50K"},
        split={"by": "column", "column": "race", "values": ["Other"]},
    ),
    "open bandit, a nameless column and times with a zone": of(
        "open_bandit/bts_all/all.csv.gz",
        features("propensity_score user-item_affinity_0", "item_id position", "user_feature_0"),
        label={"column": "click"},
        row_id="",
        split={"by": "time", "column": "timestamp", "since": "2019-11-28"},
    ),
    "talking data, by time": of(
        "talkingdata_10k/train_sample.csv",
        features("", "app device os channel", "ip"),
        label={"column": "is_attributed"},
        split={"by": "time", "column": "click_time", "since": "2017-11-09"},
    ),
    "ali-ccp, numbers as names": of(
        "aliccp_sample/ali_ccp_train_sample.csv", features("D109_14", "101 853", "205"), label={"column": "click"}
    ),
    "kuaishou, lists with repeats": of(
        "kuaishou_multihot/dataset1.csv.gz",
        {
            "dense": ["all_launch_count"],
            "sparse": [
                {"name": "multi", "multi_valued": True, "separator": "|", "pooling": "mean", **VOCABULARY},
                {"name": "device_type", **HASH},
            ],
        },
        label={"column": "label"},
        eval_fraction=0.2,
        split={"by": "hash", "column": "user_id"},
    ),
    "movielens, quoted": of(
        "movielens_quoted/movielens_sample.txt",
        {
            "sparse": [
                {"name": "title", **VOCABULARY},
                {"name": "genres", "multi_valued": True, "separator": "|", **HASH},
            ]
        },
        label={"column": "rating", "at_least": 4},
        eval_fraction=0.3,
    ),
    "porto, -1 for missing": of(
        "porto_10k/train.csv",
        {
            "dense": [{"name": "ps_reg_03", "missing_values": "-1", "transform": "standardize"}],
            "sparse": [{"name": "ps_car_03_cat", "missing_values": "-1", **VOCABULARY}],
        },
        label={"column": "target"},
        eval_fraction=0.2,
        row_id="id",
    ),
    "frappe, -1 and 1": frappe,
    "paddle, unsigned hashes as text": slots_as_csv,
    "paddle, unsigned hashes as lists": slots_as_parquet,
}


@pytest.mark.parametrize("name", LOGS)
def test_a_public_log_is_the_same_prepared(real_data: Path, tmp_path: Path, name: str) -> None:
    config = config_of(*LOGS[name](real_data, tmp_path))
    manifest = run(config, tmp_path / "out")
    assert manifest.rows_read == sum(split.rows for split in manifest.splits.values())
    assert all(split.rows for split in manifest.splits.values())
    assert_same_rows(config, tmp_path / "out")


def test_labels_that_nothing_explains_are_refused(real_data: Path, tmp_path: Path) -> None:
    data, columns = frappe(real_data, tmp_path)
    with pytest.raises(DataError, match=r"frappe\.csv:\d+: label column 'label': found label '-1', expected 0 or 1"):
        run(config_of(data | {"label": {"column": "label"}}, columns), tmp_path / "out")
