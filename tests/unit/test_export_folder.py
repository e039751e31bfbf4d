"""The manifest holds the transforms whole: a program that only has the export makes the trainer's inputs from it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from export_cases import CITIES, rows

from data.bad_rows import BadRows
from data.features.columns import columns_of, features_of
from data.features.fit import FeaturesFit, merge_fits
from data.features.fitted import Features
from data.features.read import read_rows
from data.frames import FrameSource
from erase_rec.cli.export_folder import (
    MANIFEST,
    ExportFolder,
    Manifest,
    Origin,
    hashes_of_texts,
    read_manifest,
    record,
    special_rows,
    tensors_of,
    write_features,
)
from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.config.schema import FeaturesConfig, LabelConfig
from erase_rec.errors import UserError

FEATURES = FeaturesConfig.model_validate(
    {
        "dense": [
            {"name": "age", "transform": "standardize"},
            {"name": "price", "fill": 3.5, "missing_values": ["-1"]},
            {"name": "clicks before", "column": "before", "transform": "none"},
        ],
        "sparse": [
            {"name": "city", "encoding": "vocabulary", "min_count": 2, "missing_values": ["nowhere"]},
            {"name": "device", "num_embeddings": 50, "fill": "phone"},
            {"name": "slot", "encoding": "id", "num_embeddings": 5},
            {
                "name": "tags", "encoding": "vocabulary", "multi_valued": True, "separator": "|", "max_length": 3,
                "fill": "none",
            },
            {"name": "terms", "num_embeddings": 20, "multi_valued": True, "weights": "shares"},
            {"name": "spend", "column": "price", "encoding": "vocabulary", "derive": "log_square"},
            {"name": "weekday", "column": "time", "encoding": "vocabulary", "derive": "weekday", "fill": "0"},
        ],
    }
)  # fmt: skip


def raw_rows(frame: pd.DataFrame) -> Any:
    (chunk,) = FrameSource(frame).chunks()
    columns = ["clicked", *columns_of(*features_of(FEATURES))]
    (block,) = chunk.blocks(columns, BadRows())
    return read_rows(FEATURES, "clicked", LabelConfig(), block, BadRows())


@pytest.fixture(scope="module")
def fitted() -> Features:
    fit = FeaturesFit(FEATURES)
    fit.add(raw_rows(rows(1, 300)))
    return merge_fits(FEATURES, [fit])


@pytest.fixture
def folder(fitted: Features, tmp_path: Path) -> Path:
    """An export without a program."""
    dense, sparse = write_features(tmp_path, fitted, [4] * 7)
    inputs, outputs = tensors_of(FEATURES)
    origin = {name: "" for name in Origin.model_fields}
    manifest = Manifest(
        origin=Origin(**origin),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dense=tuple(dense),
        sparse=tuple(sparse),
        special_rows=special_rows(),
        hashes=hashes_of_texts(),
        checks=(),
        files=tuple(record(tmp_path, file.name) for file in sorted(tmp_path.iterdir())),
    )
    (tmp_path / MANIFEST).write_text(manifest.model_dump_json())
    return tmp_path


def unlike_training() -> pd.DataFrame:
    """Rows with values that training had not, and some that it had; the last has none at all."""
    frame = rows(9, 60)
    frame.loc[0:9, "city"] = ["Nome", "", CITIES[3], "nowhere", "Rome", "Oslo ", "rome", "0", "x" * 40, "Bonn"]
    frame.loc[0:4, "device"] = ["never seen", "desk", "", "tablet", "tv"]
    frame.loc[0:3, "tags"] = ["a|new|b|c", "", "|a", "zzz"]
    frame["time"] = np.where(np.arange(60) % 5 == 0, "14102210", frame["time"])
    frame["price"] = np.where(np.arange(60) % 7 == 0, np.nan, np.where(np.arange(60) % 7 == 1, 33.5, frame["price"]))
    return frame


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(value: int) -> int:
    """SplitMix64's finalizer, as docs/export.md has it."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def text_hash(text: str) -> int:
    content = text.encode()
    padded = content + b"\0" * (-len(content) % 8 if content else 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    total = words[0] + sum(mixed((word + at * GOLDEN) & MASK) for at, word in enumerate(words[1:], start=1))
    return mixed(((len(content) * GOLDEN) & MASK) ^ (total & MASK))


def plain_dense(entry: Mapping[str, Any], value: Any) -> float:
    config = entry["config"]
    number = math.nan if value is None else float(value)
    if math.isnan(number) or number in [float(text) for text in config["missing_values"]]:
        number = config["fill"]
    if config["transform"] == "log":
        return math.copysign(math.log1p(abs(number)), number)
    return (number - entry["mean"]) / entry["std"] if config["transform"] == "standardize" else number


def derived(kind: str, number: float) -> str:
    if kind == "log_square":
        return str(math.floor(math.log(number) ** 2) if number > 2 else int(number))
    written = f"{int(number):08d}"
    day = datetime.strptime(written, "%y%m%d%H")
    return {"hour": str(day.hour), "weekday": day.strftime("%w"), "weekend": str(int(day.weekday() > 4))}[kind]


class PlainCategories:
    """A sparse feature's categories, from the manifest and the feature's file."""

    def __init__(self, folder: Path, entry: Mapping[str, Any]) -> None:
        self.config = entry["config"]
        file = entry["file"] and folder / entry["file"]
        self.rows: dict[str, int] = {}
        if self.config["encoding"] == "vocabulary":
            categories = pq.read_table(file)["category"].to_pylist()
            self.rows = {category: position + 2 for position, category in enumerate(categories)}
        elif self.config["encoding"] == "hash":
            self.seen = file.read_bytes()

    def row(self, value: Any) -> int:
        text = "" if value is None else str(value)
        if text == "" or text in self.config["missing_values"]:
            if not self.config["fill"]:
                return 0
            text = self.config["fill"]
        elif self.config["derive"]:
            text = derived(self.config["derive"], float(text))
        if self.config["encoding"] == "id":
            return int(text) + 2
        if self.config["encoding"] == "vocabulary":
            return self.rows.get(text, 1)
        row = text_hash(text) % self.config["num_embeddings"] + 2
        return row if self.seen[row // 8] >> row % 8 & 1 else 1

    def bag(self, value: Any) -> list[int]:
        if isinstance(value, str):
            value = value.split(self.config["separator"]) if value else []
        found = [self.row(each) for each in list(value)[: self.config["max_length"]]]
        return found or ([self.row(None)] if self.config["fill"] else [])


def test_another_program_makes_the_same_inputs(fitted: Features, folder: Path) -> None:
    frame = unlike_training()
    expected = ModelInputs.of(fitted.encode(raw_rows(frame)))
    manifest = json.loads((folder / MANIFEST).read_text())
    table = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for position, entry in enumerate(manifest["dense"]):
        column = entry["config"]["column"] or entry["config"]["name"]
        found = [plain_dense(entry, row[column]) for row in table]
        assert expected.dense[:, position].tolist() == pytest.approx(found, rel=1e-6)
    single, bags = iter(expected.ids.unbind(dim=1)), iter(expected.bags)
    for entry in manifest["sparse"]:
        config, categories = entry["config"], PlainCategories(folder, entry)
        cells = [row[config["column"] or config["name"]] for row in table]
        if not config["multi_valued"]:
            found = [categories.row(cell) for cell in cells]
            assert next(single).tolist() == found
            assert config["encoding"] == "id" or 1 in found, f"nothing was unseen: {config['name']}"
            continue
        values, lengths, *weights = next(bags)
        assert values.tolist() == [row for cell in cells for row in categories.bag(cell)]
        assert lengths.tolist() == [len(categories.bag(cell)) for cell in cells]
        if config["weights"]:
            given = [weight for row in table for weight in row[config["weights"]]]
            assert weights[0].tolist() == pytest.approx(given)


def test_hashes_of_the_manifest_are_those_of_the_page() -> None:
    assert hashes_of_texts() == {text: f"{text_hash(text):016x}" for text in hashes_of_texts()}


def test_the_reader_gives_the_features_back(fitted: Features, folder: Path) -> None:
    opened = ExportFolder.open(folder)
    assert opened.features.config == fitted.config
    block = raw_rows(unlike_training())
    for found, expected in zip(
        ModelInputs.of(opened.features.encode(block)).flat(),
        ModelInputs.of(fitted.encode(block)).flat(),
        strict=True,
    ):
        assert found.equal(expected)


def test_inputs_are_named_in_order() -> None:
    inputs, outputs = tensors_of(FEATURES)
    assert [(each.name, each.shape) for each in inputs] == [
        ("dense", ("rows", 3)),
        ("ids", ("rows", 5)),
        ("bag_0_rows", ("values_0",)),
        ("bag_0_lengths", ("rows",)),
        ("bag_1_rows", ("values_1",)),
        ("bag_1_lengths", ("rows",)),
        ("bag_1_weights", ("values_1",)),
    ]
    assert [each.name for each in outputs] == ["probability", "logit"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"format": None}, "format None, this version reads 1"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"files": [{"name": "../secret", "bytes": 1, "sha256": ""}]}, "files.0.name: .*a file inside the folder"),
        ({"files": [{"name": "a\0b", "bytes": 1, "sha256": ""}]}, "files.0.name: .*a file inside the folder"),
        ({"files": [{"name": "/etc/passwd", "bytes": 1, "sha256": ""}]}, "files.0.name: .*a file inside the folder"),
        ({"files": [{"name": "gone.bin", "bytes": 1, "sha256": ""}]}, "gone.bin: cannot be read"),
        ({"dense": [{"config": {"name": "a"}, "std": 0}]}, "dense.0.std: Input should be greater than 0"),
    ],
)
def test_a_manifest_that_is_none_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    content = json.loads((folder / MANIFEST).read_text()) | change
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        ExportFolder.open(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "[" * 100_000, '"\\ud800"'])
def test_text_that_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(UserError, match=MANIFEST):
        read_manifest(folder)


def test_every_file_is_compared_with_its_checksum(folder: Path) -> None:
    for file in sorted(folder.glob("[sv]*")):
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(UserError, match=f"{file.name}: not the file that was written"):
            ExportFolder.open(folder)
        file.write_bytes(content)
    ExportFolder.open(folder)


def test_features_that_do_not_fit_their_files_are_refused(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    content["sparse"][1]["table_rows"] += 800
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the features cannot be read \(feature 'device': 7 bytes of buckets"):
        ExportFolder.open(folder)


def test_not_a_folder_of_an_export(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no export: manifest.json cannot be read .*; write one with: erase-rec"):
        ExportFolder.open(tmp_path)
