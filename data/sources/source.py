"""What a data source is: named columns of a click log, read chunk by chunk, in any process and as often as needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa

from data.bad_rows import BadRows
from data.errors import DataError
from data.features.cells import without_views
from data.features.encoding import BoolArray, IntArray
from erase_rec.errors import nearest

MAX_CHUNK_ROWS = 65536
"""Rows of a chunk of a typed source, at most; a chunk of text is cut by its bytes before it has many more."""

Split = Literal["train", "eval"]
"""Training files must hold rows; files to evaluate may be empty (their metrics are undefined)."""

Unit = Literal["line", "row"]


@dataclass(frozen=True)
class Block:
    """R rows of one file as they were read, before the features; R is at least 1.

    Attributes:
        columns: the requested columns, in the order asked for. Text files give ``string_view`` columns without nulls,
            in which the empty text means missing; typed sources give their own types.
        file: the file's name for messages.
        file_index: its position among the source's files.
        unit: what messages count: a ``line`` of a text file (a header counts), or a ``row``.
        row_numbers: int64 [R], ascending: 0-based position of each row in its file; bad rows count, a header does not.
        first_number: 1-based line or row number of the file's row 0: row i is at ``first_number + row_numbers[i]``.
    """

    columns: pa.Table
    file: str
    file_index: int
    unit: Unit
    row_numbers: IntArray
    first_number: int

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_numbers)

    @property
    def numbers(self) -> IntArray:
        """1-based line or row number of each row, int64 [R]."""
        return self.row_numbers + self.first_number

    def place(self, row: int) -> str:
        """``file:line``, or ``file row n``."""
        number = self.first_number + int(self.row_numbers[row])
        return f"{self.file}:{number}" if self.unit == "line" else f"{self.file} row {number}"

    def select(self, keep: BoolArray) -> Block:
        """The rows at which ``keep``, bool [R], is true."""
        columns = without_views(self.columns).filter(pa.array(keep))
        return Block(columns, self.file, self.file_index, self.unit, self.row_numbers[keep], self.first_number)


class Chunk(Protocol):
    """Consecutive rows of one file: picklable, and cheap to pickle unless its bytes travel inside."""

    @property
    def num_bytes(self) -> int:
        """Its share of :meth:`Source.num_bytes`, for progress."""
        ...

    @property
    def rereadable(self) -> bool:
        """False where the bytes travel inside, so that keeping all chunks keeps the whole file in memory."""
        ...

    def blocks(self, columns: Sequence[str], bad: BadRows) -> Iterator[Block]:
        """The rows in blocks, with the named columns (at least one, each once).

        Rows that cannot be cut into columns are handed to ``bad`` and left out. Threads may read chunks side by side.

        Raises:
            DataError: a column is not there (in this file or another of the source), or the file cannot be read;
                names file and line.
        """
        ...


@dataclass(frozen=True)
class InputFile:
    """A file that a source reads.

    Attributes:
        name: for messages; a path, or a URL.
        num_bytes: size.
        version: another text once the file was written anew.
    """

    name: str
    num_bytes: int
    version: str


class Source(Protocol):
    """A click log."""

    @property
    def label_column(self) -> str | None:
        """The column that this kind of log has its label in; None: the configuration must say."""
        ...

    def columns(self) -> list[str]:
        """Names of the available columns; reads no more than a header or a schema."""
        ...

    def inputs(self) -> list[InputFile]:
        """The files, in the order in which they are read; none where rows are made up. Reads no content."""
        ...

    def num_bytes(self) -> int:
        """Size of the whole input: the sum over its chunks. Reads no more than headers and schemas."""
        ...

    def chunks(self) -> Iterator[Chunk]:
        """The rows in chunks, file by file, lazily: the same ones each time, since they follow from the content alone.

        All headers and schemas are read before the first chunk. Text is read once here, to find its lines.

        Raises:
            DataError: a file cannot be read, is in another format, or has no rows to train on.
        """
        ...

    def fingerprint(self) -> str:
        """Hex SHA-256 of the content, whatever the files are called. Reads nothing after ``chunks`` was exhausted."""
        ...


def consecutive(
    columns: pa.Table, *, file: str, file_index: int, unit: Unit, first_row: int, first_number: int = 1
) -> Block:
    """A block of rows without a gap: row i of ``columns`` is row ``first_row + i`` of its file."""
    numbers = np.arange(first_row, first_row + columns.num_rows, dtype=np.int64)
    return Block(columns, file, file_index, unit, numbers, first_number)


def refuse_faulty(columns: Sequence[str], faults: Mapping[str, str]) -> None:
    """Refuses columns that another file of the source lacks or has otherwise, before any row is read.

    Args:
        columns: those wanted.
        faults: message by column name.

    Raises:
        DataError: the message of the first wanted column that has one.
    """
    for name in columns:
        if name in faults:
            raise DataError(faults[name])


def positions_of(wanted: Sequence[str], found: Sequence[str], file: str, hint: str = "") -> list[int]:
    """Where each wanted column stands among a file's.

    Args:
        wanted: column names.
        found: the file's column names.
        file: the file, for the message.
        hint: likely cause of a missing column, a sentence.

    Raises:
        DataError: a column is not there, or is there twice.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        lacking = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        shown = ", ".join(repr(name) for name in found[:50]) + (", ..." if len(found) > 50 else "")
        raise DataError(
            f"{file}: column {missing[0]!r} not found{nearest(missing[0], found)}"
            + (f" ({len(missing)} columns are missing: {lacking})" if missing[1:] else "")
            + f"; found {len(found)}: {shown}"
            + (f". {hint}" if hint else "")
        )
    for name in wanted:
        if found.count(name) > 1:
            raise DataError(f"{file}: {found.count(name)} columns are called {name!r}; rename or remove all but one")
    return [found.index(name) for name in wanted]
