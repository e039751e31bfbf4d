"""docs/data.md: its program that reads a prepared folder without this package does so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import call

from data.synth import Spec, write_files
from data.synth_rows import Synth

NUM_ROWS = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """Holds ``prepared``, made from the first made-up rows."""
    folder = tmp_path_factory.mktemp("page")
    write_files(Spec(NUM_ROWS, 0, 1, "criteo"), folder, workers=1, on_rows=lambda rows: None)
    config = str(checkout / "configs" / "ctr_criteo.yaml")
    settings = ("data.train=train-00000.tsv", "features.dense_defaults.transform=none")
    call(folder, "prepare", "--config", config, "--out", "prepared", *settings)
    return folder


def test_the_reading_program(folder: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (checkout / "docs" / "data.md").read_text()
    program = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "manifest" in block)
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(program, found)
    block = Synth(1).block("train", 0, NUM_ROWS)
    np.testing.assert_array_equal(found["lines"], np.arange(1, NUM_ROWS + 1))
    np.testing.assert_array_equal(found["label"], block.label)
    values = Synth(1).values[0][block.positions[0]]
    np.testing.assert_array_equal(found["i1"], np.where(block.dense_missing[0], 0, values))
    names, counts = np.unique(block.names[0], return_counts=True)
    often = {f"{name:08x}": count for name, count in zip(names, counts, strict=True) if count >= 2}
    categories = found["categories"].to_pylist()
    assert categories == sorted(often, key=lambda text: (-often[text], text))
    shown = ["unseen" if row == 1 else categories[row - 2] for row in found["c1"]]
    assert shown == [text if (text := f"{name:08x}") in often else "unseen" for name in block.names[0]]
