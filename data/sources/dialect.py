"""How a line of delimited text is cut into fields, and what its first line says."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import DataError
from data.sources import text_file
from data.sources.paths import File

DELIMITERS = {",": "comma", "\t": "TAB", ";": "semicolon", "|": "bar", " ": "space"}
CARRIAGE_RETURN = "a carriage return stands without a line feed; save the file with LF or CRLF line ends"
_QUOTED_CHARACTERS = 80


@dataclass(frozen=True)
class Dialect:
    """How a line is cut into fields.

    Attributes:
        delimiter: one character.
        quote: one character (doubled inside a quoted field), or None: quotes are ordinary characters.
    """

    delimiter: str
    quote: str | None

    def fields(self, line: str) -> list[str]:
        """The fields of one line."""
        if self.quote is None:
            return line.split(self.delimiter)
        try:
            return next(csv.reader([line], delimiter=self.delimiter, quotechar=self.quote)) or [""]
        except csv.Error:  # a field over the module's limit, or a carriage return: only ever in a message
            return line.split(self.delimiter)

    def suspect(self, line: str) -> str:
        """Names the delimiter that the line rather seems to have, as a sentence; empty when there is none."""
        counts = {other: line.count(other) for other in DELIMITERS if other not in (self.delimiter, " ")}
        likely = max(counts, key=lambda other: counts[other])
        if counts[likely] <= line.count(self.delimiter):
            return ""
        return (
            f"The line holds {counts[likely]} x {DELIMITERS[likely]} and {line.count(self.delimiter)} x "
            f"{self.name()}: the file is probably {DELIMITERS[likely]} separated, not {self.name()} separated"
        )

    def name(self) -> str:
        """The delimiter in words."""
        return DELIMITERS.get(self.delimiter, repr(self.delimiter))


def header(file: File, dialect: Dialect) -> list[str]:
    """Column names in a file's first line.

    Raises:
        DataError: an empty file, one that is no UTF-8 text, or a line that is blank or another delimiter must cut.
    """
    raw = next(iter(text_file.first_lines(file, 1)), None)
    if raw is None:
        raise DataError(f"{file.name}: the file is empty; expected a header line with the column names")
    if not raw:
        raise DataError(f"{file.name}, line 1: the line is blank; expected a header line with the column names")
    if b"\r" in raw:
        raise DataError(f"{file.name}, line 1: {CARRIAGE_RETURN}")
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.name}, line 1: the header is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from None
    names = dialect.fields(line)
    if len(names) == 1 and (suspicion := dialect.suspect(line)):
        raise DataError(
            f"{file.name}, line 1: the header has 1 column, {shorten(line)!r}. {suspicion}; set data.params.delimiter "
            "of data.kind: csv (Criteo's own files: data.kind: criteo)"
        )
    return names


def header_hint(names: Sequence[str], dialect: Dialect) -> str:
    """Why a column may be missing from a header; empty where nothing is suspicious."""
    if any(re.fullmatch(r"[-+]?\d[-+.\deE]*", name) for name in names):
        return "If the first line is data and not a header, list the column names in data.params.columns"
    return dialect.suspect(dialect.delimiter.join(names))


def shorten(text: str) -> str:
    """The start of ``text``, short enough for a message."""
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."


def count_fields(count: int) -> str:
    """``1 field``, ``2 fields``."""
    return f"{count} field" if count == 1 else f"{count} fields"
