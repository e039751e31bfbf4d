"""What benchmarks/faults.py lets happen to a run, once of each kind: it goes on, and no row is lost or doubled."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_cases import faults

pytestmark = pytest.mark.timeout(600)


VARIANTS = list(faults.VARIANTS)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return faults.Suite(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_run_goes_on(suite: Any, kind: str) -> None:
    number = list(faults.KINDS).index(kind)
    found = suite.strike(kind, VARIANTS[0], random.Random(number), told=number % 2 == 1)
    assert found.wrong == [], found


def write(record: Path, rank: int, *steps: tuple[int, list[int]]) -> None:
    entries = [np.array([step, len(rows), *(row + faults.FIRST_ROW for row in rows)]) for step, rows in steps]
    Path(f"{record}-{rank}").write_bytes(np.concatenate(entries).astype(np.int64).tobytes())


def test_the_audit_sees_lost_and_doubled_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ROWS", 8)
    monkeypatch.setattr(faults, "EPOCHS", 1)
    first, again = tmp_path / "a-0", tmp_path / "a-1"
    write(first, 0, (0, [0, 1]), (1, [4, 5]))
    write(first, 1, (0, [2, 3]), (1, [6, 6]))
    assert faults.audit([first]) == ["epoch 1 lost 1 rows"]
    assert faults.audit([tmp_path / "a-2"]) == ["steps are missing: there are []"]
    write(again, 0, (1, [6, 7, 4, 5]))  # one rank goes on from a checkpoint after the first step
    assert faults.audit([first, again]) == []
    write(again, 0, (1, [6, 7, 4]))
    assert faults.audit([first, again]) == ["trained on 7 rows, expected 1 times 8"]
    write(again, 0, (2, [6, 7, 4, 5]))
    assert faults.audit([first, again]) == ["trained on 12 rows, expected 1 times 8"]
    os.remove(f"{first}-0")
    write(first, 1, (0, [2, 3]))
    assert faults.audit([first, again]) == ["steps are missing: there are [0, 2]"]
