"""Delimited text read slowly, a line and a character at a time: what the readers' rows are compared with."""

from __future__ import annotations

from collections.abc import Sequence

OPEN_QUESTION = "?"
"""Stands for a line whose quotes are not plainly right or wrong: any reading of it, or none, will do."""


def lines_of(content: bytes) -> list[bytes]:
    """Lines without their ends, blank ones at the end left out."""
    text = content.removeprefix(b"\xef\xbb\xbf")
    lines = text.split(b"\n")
    while lines and not lines[-1].strip(b"\r"):
        lines.pop()
    return lines


def row_of(line: bytes, delimiter: bytes, quote: bytes | None, fields: int, wanted: Sequence[int]) -> list[str] | str:
    """The wanted cells of a line, an empty text if it is no row, or ``OPEN_QUESTION``."""
    content = line.removesuffix(b"\r")
    if not content or b"\r" in content or b"\0" in content:
        return ""
    cells = content.split(delimiter) if quote is None or quote not in content else _quoted(content, delimiter, quote)
    if cells is None:
        return OPEN_QUESTION
    if len(cells) != fields:
        return ""
    try:
        return [cells[position].decode() for position in wanted]
    except UnicodeDecodeError:
        return ""


def _quoted(content: bytes, delimiter: bytes, quote: bytes) -> list[bytes] | None:
    """Cells where each quote opens or closes a whole field, or is doubled inside one; else None."""
    cells, at = [], 0
    while True:
        cell = b""
        if content[at : at + 1] == quote:
            at += 1
            while True:
                close = content.find(quote, at)
                if close < 0:
                    return None
                cell += content[at:close]
                at = close + 1
                if content[at : at + 1] != quote:
                    break
                cell += quote
                at += 1
            if content[at : at + 1] not in (delimiter, b""):
                return None
        else:
            end = content.find(delimiter, at)
            cell = content[at:] if end < 0 else content[at:end]
            if quote in cell:
                return None
            at += len(cell)
        cells.append(cell)
        if at >= len(content):
            return cells
        at += 1
