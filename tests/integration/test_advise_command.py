"""`erase-rec advise` as a user types it, on the CPU and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import call

SMALL = [
    "data.params={rows: 300, eval_rows: 0}",
    "features.sparse=[C1, C2]",
    "embedding.backend=torch",
    "embedding.dim=4",
    "train.device=cpu",
    "train.threads=1",
    "train.local_batch_size=32",
]


def test_a_tiny_model_gets_a_verdict_a_command_and_what_limits_it(tmp_path: Path) -> None:
    """What the numbers are is the machine's matter; that they hang together is ours."""
    arguments = ["--config", "ctr_erase.yaml", *SMALL, "--seconds", "1", "--out", "a.json"]
    shown = call(tmp_path, "advise", *arguments).stdout
    record = json.loads((tmp_path / "a.json").read_text())
    assert {"format", "date", "environment", "turns", "device", "sentences"} <= set(record)
    rows = {row["arm"]: row for row in record["rows"]}
    assert list(rows)[:2] == ["erase", "erase (A/A)"]
    ran = {name for name, row in rows.items() if row["refused"] is None}
    assert ran == {"erase", "erase (A/A)", "exact", "detached", "erase_threads"}
    assert all("graphs" in rows[name]["refused"] for name in rows if name.endswith("_graph"))
    assert record["configured"] == "erase"
    assert record["fastest_exact"] == "exact"
    assert record["recommended"] in {"exact", record["fastest_cut"]}
    assert record["gain_of_cutting"] == rows[record["fastest_cut"]]["ratio_to"]["exact"]
    assert (record["recommended"] == "exact") == (record["verdict"] != "cut_faster")
    assert record["bound"] in {"device-bound", "data-bound"}
    assert record["data"]["batches"] == 9
    assert record["data"]["alone_ms"] > 0
    assert all(memory["total_gib"] > 0 for memory in record["memory"])
    towers = record["limits"]["towers"]
    assert {tower["name"] for tower in towers} == {"dense_mlp", "interaction", "cross", "deep", "mask", "attention"}
    assert all(tower["chain_ms"] > 0 and tower["gain_if_gone"] >= 1 for tower in towers)
    # The way that is looked at may have a worker beside the main thread, so a tower may be on the path or beside it.
    assert record["limits"]["path_ms"] >= max(tower["path_without_ms"] for tower in towers) > 0
    for words in (record["command"], *record["sentences"], record["ne_commands"], "not run here", "wrote a.json"):
        assert words in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json"]  # nothing else is left behind


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "a.txt"], "--out: expected the name of a JSON file, found a.txt; write --out a.json"),
        (["--out", "none/a.json"], "--out: there is no folder none"),
        (["towers.deep.params.hiden=[8]"], "did you mean 'hidden'"),
        (["train.steps"], "expected key=value"),
        (["--runs", "none"], "none is not a folder"),
        (["train.local_batch_size=500"], "300 training rows do not fill a batch of train.local_batch_size: 500"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(tmp_path: Path, arguments: list[str], words: str) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    small = [each for each in SMALL if each.partition("=")[0] not in given]
    ended = call(tmp_path, "advise", "--config", "ctr_erase.yaml", *small, *arguments, expect=2)
    assert words in ended.stderr
    assert not any(tmp_path.iterdir())


def test_several_ranks_are_told_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchruns = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    ended = call(tmp_path, "advise", "--config", "ctr_erase.yaml", *SMALL, expect=2)
    assert "start it without torchrun, or use erase-rec bench there" in ended.stderr
