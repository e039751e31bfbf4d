"""What a data source is: named columns of a click log, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import pyarrow as pa

from data.errors import DataError
from erase_rec.errors import nearest

MAX_BLOCK_ROWS = 65536

Split = Literal["train", "eval"]
"""Training files must hold rows; files to evaluate may be empty (their metrics are undefined)."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file, at most ``MAX_BLOCK_ROWS``.

    Attributes:
        columns: the requested columns, in the order asked for. Text files give ``string`` columns without nulls, in
            which the empty text means missing; typed sources give their own types.
        file: the file's name for messages.
        first_line: 1-based line or row number of row 0; row i is at ``first_line + i``.
        unit: what ``first_line`` counts: ``line`` of a text file (a header counts), or ``row``.
    """

    columns: pa.Table
    file: str
    first_line: int
    unit: Literal["line", "row"]


class Source(Protocol):
    """A click log. Reading it again gives the same blocks in the same order, in memory bounded by a block."""

    @property
    def label_column(self) -> str | None:
        """The column that this kind of log has its label in; None: the configuration must say."""
        ...

    def columns(self) -> list[str]:
        """Names of the available columns; reads no more than a header or a schema."""
        ...

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """The rows, with the named columns (at least one, each once).

        Raises:
            DataError: a column is not there, or a file cannot be read; names file and line.
        """
        ...

    def fingerprint(self) -> str:
        """Hex SHA-256 of the content, whatever the files are called. Reads the files once."""
        ...


def split_rows(columns: pa.Table, file: str, first_line: int, unit: Literal["line", "row"]) -> Iterator[Block]:
    """Cuts ``columns`` into blocks of at most ``MAX_BLOCK_ROWS`` without copying."""
    for start in range(0, columns.num_rows, MAX_BLOCK_ROWS):
        yield Block(columns.slice(start, MAX_BLOCK_ROWS), file, first_line + start, unit)


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
        shown = ", ".join(repr(name) for name in found[:50]) + (", ..." if len(found) > 50 else "")
        raise DataError(
            f"{file}: column {missing[0]!r} not found{nearest(missing[0], found)}"
            + (f" ({len(missing)} columns are missing: {', '.join(map(repr, missing[:10]))})" if missing[1:] else "")
            + f"; the file has {len(found)}: {shown}"
            + (f". {hint}" if hint else "")
        )
    for name in wanted:
        if found.count(name) > 1:
            raise DataError(f"{file}: {found.count(name)} columns are called {name!r}; rename or remove all but one")
    return [found.index(name) for name in wanted]
