"""Bad rows in a file of their own, and counted by reason."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from data.bad_rows import BadRow
from data.errors import DataError
from data.quarantine import MAX_REASONS, OTHER, count_reasons, fewer, write_quarantine


def bad(number: int, column: str = "x", reason: str = "found 'abc', expected a number", value: str = "abc") -> BadRow:
    return BadRow("log.csv", "line", number, column, value, reason)


def test_a_line_a_row(tmp_path: Path) -> None:
    rows = [bad(2), bad(7, value='数据 "q"\n'), bad(9, column="", reason="41 fields")]
    assert write_quarantine(tmp_path / "quarantine.jsonl", iter(rows)) == 3
    lines = (tmp_path / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [asdict(row) for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["quarantine.jsonl"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"quarantine\.jsonl: cannot be written: No such file"):
        write_quarantine(tmp_path / "gone" / "quarantine.jsonl", [bad(1)])


def test_reasons_are_counted_without_what_was_found() -> None:
    rows = [
        bad(1),
        bad(2, reason="found 'it\\'s', expected a number"),
        bad(3, reason='found "it\'s", expected a number'),
        bad(4, column="y"),
        bad(5, column="", reason="found 41 fields, expected 40: 'a,b,c'"),
    ]
    assert count_reasons(rows) == {
        "column x: found '...', expected a number": 3,
        "column y: found '...', expected a number": 1,
        "found 41 fields, expected 40: '...'": 1,
    }


def test_few_reasons_are_listed() -> None:
    reasons = count_reasons(bad(number, column=f"c{number:03d}") for number in range(MAX_REASONS + 7))
    reasons.update(count_reasons([bad(1, column="often")] * 5))
    shown = fewer(reasons)
    assert next(iter(shown.items())) == ("column often: found '...', expected a number", 5)
    assert shown[OTHER] == 8
    assert len(shown) == MAX_REASONS + 1
    assert sum(shown.values()) == MAX_REASONS + 12
