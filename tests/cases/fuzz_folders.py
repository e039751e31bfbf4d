"""Fuzz targets: folders that this program wrote and reads again. What is damaged is refused, or reads the same."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_mutations import any_bytes
from fuzz_rows import FEATURES, LOG
from fuzz_target import Folder, Opened, Target
from hypothesis import strategies as st
from prepared_cases import Silent
from report_cases import Planted, make_run, make_sweep

from data.bad_rows import BadRows
from data.digests import digest_of_json
from data.features.fitted import Features, needs_fit
from data.features.read import read_rows
from data.prepared.manifest import DIGEST, Manifest
from data.prepared.prepare import Options, prepare
from data.prepared.store import open_prepared
from data.registry import open_source
from erase_rec import checkpoint
from erase_rec.checkpoint import CheckpointManager
from erase_rec.config.schema import Config
from eval.report.analysis import analyse
from eval.report.records import collect
from eval.report.sentences import sentences
from eval.report.tables import results

JSON_TOKENS = (
    *(b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"-0", b'"\\u0000"', b"NaN", b"Infinity", b"1e400"),
    *(b'"../../../etc/passwd"', b'"/etc/passwd"', b'"format"', b'"version"', b'"sha256"', b"9" * 30, b'[{"a":'),
)
ARROW_TOKENS = (b"ARROW1", b"\xff\xff\xff\xff", b"\x00" * 16, b"\xff" * 16, b"\x7f\xff\xff\xff")
PICKLE = b"cos\nsystem\n(S'touch pwned'\ntR."
"""Writes a file where it is loaded."""


def _config(path: Path) -> Config:
    return Config.model_validate(
        {
            "seed": 1,
            "data": {"kind": "csv", "train": [str(path)], "label": {"column": "label"}, "eval_fraction": 0.25},
            "features": FEATURES,
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": 5},
        }
    )


def _log(folder: Path) -> Path:
    path = folder / "log.csv"
    path.write_bytes(LOG)
    return path


def _arrays(store: Any) -> list[np.ndarray[Any, Any]]:
    found: list[np.ndarray[Any, Any]] = []
    for number in range(len(store.block_rows)):
        block = store.read(number)
        found += [*block.dense, *block.ids, block.label, block.rows.numbers]
        for bag in block.bags.values():
            found += [bag.values, bag.offsets]
    return [np.array(array) for array in found]


def _prepared_rows(folder: Path, config: Config) -> list[np.ndarray[Any, Any]]:
    opened = open_prepared(folder, config)
    assert opened.eval is not None
    return [*_arrays(opened.train), *_arrays(opened.eval), opened.missing, opened.cells, opened.unseen, opened.values]


def _prepared(folder: Path) -> Opened:
    config = _config(_log(folder))
    prepare(config, folder / "valid", Options(1, 8 << 30, force=False), Silent())
    files = Folder(folder / "valid", folder / "copy")
    expected = _prepared_rows(folder / "valid", config)

    def read(content: bytes) -> None:
        found = _prepared_rows(files.with_input(content), config)
        assert len(found) == len(expected), "another number of blocks"
        same = [
            one.dtype == other.dtype and np.array_equal(one, other) for one, other in zip(found, expected, strict=True)
        ]
        assert all(same), "other rows than were prepared, and no message"

    return Opened(files.inputs((*ARROW_TOKENS, *JSON_TOKENS)), read, [files.valid_input()])


def _manifest(folder: Path) -> Opened:
    """A manifest that somebody changed and signed again: any content, but nothing outside the folder, and no crash."""
    config = _config(_log(folder))
    prepare(config, folder / "valid", Options(1, 8 << 30, force=False), Silent())
    files = Folder(folder / "valid", folder / "copy")
    text = files.files["manifest.json"]

    def read(content: bytes) -> None:
        try:
            changed = json.loads(content)
            changed.pop(DIGEST, None)
            signed = json.dumps(changed | {DIGEST: digest_of_json(changed)}).encode()
        except (ValueError, AttributeError, TypeError, RecursionError):
            signed = content
        copy = files.with_input(b"manifest.json\0" + signed)
        for file in Manifest.read(copy).all_files():
            assert (copy / file.name).resolve().is_relative_to(copy.resolve()), f"{file.name} is outside the folder"
        opened = open_prepared(copy, config)
        for store in (opened.train, opened.eval):
            for number in range(0 if store is None else min(len(store.block_rows), 10)):
                block = store.read(number)
                assert len(block.label) == store.block_rows[number], "a block of another length than the manifest says"

    return Opened(any_bytes([text], JSON_TOKENS), read, (text, text.replace(b'"train/part', b'"../valid/train/part')))


def _features(folder: Path) -> Opened:
    config = _config(_log(folder))
    prepare(config, folder / "prepared", Options(1, 8 << 30, force=False), Silent())
    files = Folder(folder / "prepared" / "features", folder / "copy")
    columns = ["x", "s", "v", "h", "i", "m", "label"]
    source = open_source("csv", [str(folder / "log.csv")])
    block = next(block for chunk in source.chunks() for block in chunk.blocks(columns, BadRows()))
    assert needs_fit(config.features) is True
    raw = read_rows(config.features, "label", config.data.label, block, BadRows())

    def encoded(features: Features) -> list[np.ndarray[Any, Any]]:
        rows = features.encode(raw)
        bags = [array for bag in rows.bags.values() for array in (bag.values, bag.offsets)]
        return [*rows.dense, *rows.ids, *bags]

    expected = encoded(Features.load(files.valid))

    def read(content: bytes) -> None:
        found = encoded(Features.load(files.with_input(content)))
        same = [np.array_equal(one, other) for one, other in zip(found, expected, strict=True)]
        assert all(same), "other ids than the features were fitted to, and no message"

    return Opened(files.inputs((*ARROW_TOKENS, *JSON_TOKENS)), read, [files.valid_input()])


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((4, 3), value),
        "tables/b": torch.arange(10, dtype=torch.float64).reshape(2, 5) * value,
        "rng/cpu": torch.full((6,), int(value), dtype=torch.uint8),
    }


def _checkpoint(folder: Path) -> Opened:
    manager = CheckpointManager(folder / "valid", keep=2)
    state = {"position": {"step": 3, "epoch": 1}, "best": {"value": 0.5}, "evaluated_step": 3, "ranks": 1}
    manager.save(3, _tensors(3.0), state, is_best=True)
    files = Folder(folder / "valid", folder / "copy")
    expected = _tensors(3.0)

    def read(content: bytes) -> None:
        copy = files.with_input(content)
        opened = CheckpointManager(copy, keep=2)
        opened.best()
        path = copy / "step_00000003"
        into = _tensors(9.0)
        checkpoint.load(path, into)
        assert all(torch.equal(into[name], expected[name]) for name in expected), "other tensors, and no message"
        assert checkpoint.read_state(path) == state, "another state, and no message"
        assert opened.latest()[0] == path

    index = "step_00000003/.metadata"
    hostile = tuple(f"{index}\0".encode() + content for content in (PICKLE, b"", b"\x80\x05" + b"(" * 3000 + b"."))
    tokens = (*JSON_TOKENS, PICKLE, b"PK\x03\x04", b"\x80\x05", b"(", b"R", b".")
    return Opened(files.inputs(tokens), read, (files.valid_input(), *hostile))


def _index(folder: Path) -> Opened:
    """An index of tensors that somebody changed, whose checksum was put right: it is a pickle, and runs no code."""
    manager = CheckpointManager(folder / "valid", keep=2)
    manager.save(3, _tensors(3.0), {}, is_best=False)
    path = folder / "valid" / "step_00000003"
    valid = (path / ".metadata").read_bytes()
    record = json.loads((path / "state.json").read_bytes())
    marker = Path("pwned")

    def read(content: bytes) -> None:
        (path / ".metadata").write_bytes(content)
        record["files"][".metadata"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
        (path / "state.json").write_bytes(json.dumps(checkpoint.sealed(record)).encode())
        try:
            checkpoint.load(path, _tensors(9.0))
        finally:
            assert not marker.exists(), "code in the index was run"

    numpy_code = b'cbuiltins\nexec\n(S\'open("pwned", "w")\'\ntR.'
    hostile = (valid, PICKLE, numpy_code, b"", b"\x80\x02]" + b"(" * 3000 + b".", b"I1\n.", b"\x80\x05K\x01.")
    return Opened(
        any_bytes([valid], (PICKLE, numpy_code, b"c", b"R", b"(", b"t", b".", b"\x93", b"\x8c\x02os")), read, hostile
    )


def _run_folder(folder: Path) -> Opened:
    make_sweep(
        folder / "valid",
        {"baseline": {1: Planted(ne=0.8), 2: Planted(ne=0.81)}, "erase": {1: Planted(preset="erase")}},
        failed=[("erase", 2, "out of memory")],
    )
    files = Folder(folder / "valid", folder / "copy")
    alone = Folder(make_run(folder / "run", 1, Planted()), folder / "alone")

    def read(content: bytes) -> None:
        holder = files if content.partition(b"\0")[0].decode(errors="replace") in files.files else alone
        report = analyse(collect([holder.with_input(content)]), None)
        assert math.isfinite(len(sentences(report)) + len(results(report).rich().columns))

    return Opened(
        st.one_of(files.inputs(JSON_TOKENS), alone.inputs(JSON_TOKENS)),
        read,
        (files.valid_input(), b"metrics.jsonl\0[]\n"),
    )


TARGETS = (
    Target("prepared", "prepared folders with one damaged file; the same rows, or a message", _prepared),
    Target(
        "manifest", "manifests of prepared folders, changed and signed again; nothing outside the folder", _manifest
    ),
    Target("features", "fitted features and vocabularies; the same ids, or a message", _features),
    Target("checkpoint", "checkpoints with one damaged file; the same tensors and state, or a message", _checkpoint),
    Target("index", "pickled index of a checkpoint, changed and signed again; no code is run", _index),
    Target("run_folder", "run folders and sweeps as the report reads them", _run_folder),
)
