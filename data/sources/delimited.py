"""Rows of delimited text as text columns: no type is guessed, and what does not fit is named by line and cause."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import csv as arrow_csv

from data.errors import DataError
from data.sources import text_file
from data.sources.source import Block, positions_of, split_rows
from data.sources.text_file import Lines

DELIMITERS = {",": "comma", "\t": "TAB", ";": "semicolon", "|": "bar", " ": "space"}
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


def header(path: Path, dialect: Dialect) -> list[str]:
    """Column names in a file's first line.

    Raises:
        DataError: an empty file, one that is no UTF-8 text, or a line that another delimiter must cut.
    """
    raw = text_file.first_line(path)
    if not raw:
        raise DataError(f"{path}: the file is empty; expected a header line with the column names")
    if b"\r" in raw:
        raise DataError(f"{path}, line 1: {_CARRIAGE_RETURN}")
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line 1: the header is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    names = dialect.fields(line)
    if len(names) == 1 and (suspicion := dialect.suspect(line)):
        raise DataError(
            f"{path}, line 1: the header has 1 column, {shorten(line)!r}. {suspicion}; set data.params.delimiter of "
            "data.kind: csv (Criteo's own files: data.kind: criteo)"
        )
    return names


def blocks(
    path: Path, dialect: Dialect, names: Sequence[str], columns: Sequence[str], *, has_header: bool
) -> Iterator[Block]:
    """Rows of one file as ``string`` columns; the empty text means missing.

    Args:
        path: the file.
        dialect: how lines are cut.
        names: all columns of the file, in order.
        columns: those wanted.
        has_header: the first line is no row.

    Raises:
        DataError: a line has too many or too few fields, is blank, holds a line break, or is no UTF-8 text.
    """
    positions = positions_of(columns, names, str(path), _header_hint(names, dialect) if has_header else "")
    for run in text_file.lines(path, skip_first=has_header):
        try:
            table = _parse(run, dialect, len(names), positions)
        except pa.ArrowInvalid as error:
            raise _diagnosis(run, path, dialect, len(names), error) from error
        if table.num_rows != run.count():
            raise _line_break(run, path, dialect)
        yield from split_rows(table.rename_columns(list(columns)), str(path), run.first_line, "line")


def shorten(text: str) -> str:
    """The start of ``text``, short enough for a message."""
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."


def count_fields(count: int) -> str:
    """``1 field``, ``2 fields``."""
    return f"{count} field" if count == 1 else f"{count} fields"


def _parse(
    run: Lines,
    dialect: Dialect,
    num_columns: int,
    positions: Sequence[int],
    bad_rows: list[arrow_csv.InvalidRow] | None = None,
) -> pa.Table:
    """Parses a run; with ``bad_rows`` in one thread, which numbers the rows it refuses."""

    def refuse(row: arrow_csv.InvalidRow) -> str:
        assert bad_rows is not None
        bad_rows.append(row)
        return "error"

    every = [str(position) for position in range(num_columns)]
    wanted = [str(position) for position in positions]
    return arrow_csv.read_csv(
        pa.BufferReader(run.body),
        read_options=arrow_csv.ReadOptions(
            column_names=every,
            use_threads=bad_rows is None,
            block_size=len(run.body) + 1,  # one block: a line may be longer than the default block
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=dialect.quote or False,
            ignore_empty_lines=False,
            invalid_row_handler=None if bad_rows is None else refuse,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={name: pa.string() for name in wanted},
            include_columns=wanted,
            strings_can_be_null=False,
            null_values=[],
        ),
    )


_CARRIAGE_RETURN = "a carriage return stands without a line feed; save the file with LF or CRLF line ends"


def _diagnosis(run: Lines, path: Path, dialect: Dialect, num_columns: int, error: pa.ArrowInvalid) -> DataError:
    """Says which line of a run that Arrow refused is wrong, and why."""
    try:
        run.body.decode()
    except UnicodeDecodeError as found:
        return _not_utf8(run, path, dialect, found)
    bad_rows: list[arrow_csv.InvalidRow] = []
    with contextlib.suppress(pa.ArrowInvalid):  # the handler keeps the row
        _parse(run, dialect, num_columns, [0], bad_rows)
    if not bad_rows:
        return DataError(f"{path}, from line {run.first_line}: {error}")
    row = bad_rows[0]
    if "\n" in row.text or "\r" in row.text:
        return _line_break(run, path, dialect)
    line = run.first_line + row.number - 1
    last = line == run.first_line + run.count() - 1
    cause = dialect.suspect(row.text)
    if not cause and row.actual_columns > num_columns:
        cause = (
            f"A field holds a {dialect.name()} that is not quoted, or two lines were joined; mend or remove the line"
        )
    elif not cause and last and run.cut_off:
        cause = "The file ends inside this line: it is probably cut off; copy or download it again"
    elif not cause:
        cause = "The line is incomplete; mend or remove it"
    return DataError(
        f"{path}, line {line}: found {count_fields(row.actual_columns)}, expected {num_columns} ({dialect.name()} "
        f"separated): {shorten(row.text)!r}. {cause}"
    )


def _not_utf8(run: Lines, path: Path, dialect: Dialect, error: UnicodeDecodeError) -> DataError:
    start = run.body.rfind(b"\n", 0, error.start) + 1
    column = len(dialect.fields(run.body[start : error.start].decode()))
    line = run.first_line + run.body.count(b"\n", 0, error.start)
    found = run.body[error.start : error.start + 1].hex()
    return DataError(f"{path}, line {line}, field {column}: byte 0x{found} is not UTF-8 text; save the file as UTF-8")


def _line_break(run: Lines, path: Path, dialect: Dialect) -> DataError:
    """More lines than rows, or fewer: a quoted field with a line break, a quote never closed, or bare CRs."""
    bare = re.search(rb"\r(?!\n)", run.body)
    if bare is not None:
        line = run.first_line + run.body.count(b"\n", 0, bare.start())
        return DataError(f"{path}, line {line}: {_CARRIAGE_RETURN}")
    index = _first_open_quote(run, dialect)
    return DataError(
        f"{path}, line {run.first_line + index}: a quote is opened and not closed on its line: "
        f"{shorten(run.line(index).decode(errors='replace'))!r}. A row must be one line; where {dialect.quote} is an "
        f"ordinary character, set data.params.quote: none"
    )


def _first_open_quote(run: Lines, dialect: Dialect) -> int:
    """Index of the first line that a quoted field goes on from."""
    assert dialect.quote is not None, "without quotes every line end ends a row"
    text = io.StringIO(run.body.decode(errors="replace"), newline="")
    reader = csv.reader(text, delimiter=dialect.delimiter, quotechar=dialect.quote)
    row_starts_at = 0
    try:
        for _ in reader:
            if reader.line_num > row_starts_at + 1:
                break
            row_starts_at = reader.line_num
    except csv.Error:
        pass  # the field that never ends exceeds the module's limit: it started in this row
    return row_starts_at


def _header_hint(names: Sequence[str], dialect: Dialect) -> str:
    """Why a column may be missing from a header."""
    if any(re.fullmatch(r"[-+]?\d[-+.\deE]*", name) for name in names):
        return "If the first line is data and not a header, list the column names in data.params.columns"
    return dialect.suspect(dialect.delimiter.join(names))
