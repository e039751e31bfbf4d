"""The file that bad rows are written to under ``data.bad_rows: quarantine``: one JSON object a line."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from data.bad_rows import BadRow
from data.errors import DataError

FILE = "quarantine.jsonl"
"""Its name in a prepared folder and in a run folder."""
MAX_REASONS = 50
OTHER = "other reasons"


def write_quarantine(path: Path, rows: Iterable[BadRow]) -> int:
    """Writes ``file``, ``unit``, ``number``, ``column``, ``value`` and ``reason`` of each row; replaces the file.

    Returns:
        How many rows were written.

    Raises:
        DataError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as stream:
            for row in rows:
                stream.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
                count += 1
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror or error}; make room, or bad_rows: skip"
        ) from error
    return count


def count_reasons(rows: Iterable[BadRow]) -> Counter[str]:
    """How many rows are bad for each reason; what was found in them is left out of the reasons."""
    return Counter(_kind(row) for row in rows)


def fewer(reasons: Counter[str]) -> dict[str, int]:
    """The ``MAX_REASONS`` most frequent ones first, then the count of all others."""
    common = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    shown = dict(common[:MAX_REASONS])
    if common[MAX_REASONS:]:
        shown[OTHER] = sum(count for _, count in common[MAX_REASONS:])
    return shown


def _kind(row: BadRow) -> str:
    reason = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "'...'", row.reason)
    return f"column {row.column}: {reason}" if row.column else reason
