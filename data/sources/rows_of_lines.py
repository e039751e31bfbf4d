"""Lines of delimited text as rows of text columns: no type is guessed, and what does not fit is named with its cause.

Arrow parses runs of lines at a time. It does not say which of its lines a run fails for, and a quote that is never
closed swallows the lines behind it; so where a run does not give one row a line, lines are tried apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from data.features.encoding import IntArray
from data.sources.dialect import CARRIAGE_RETURN, Dialect, count_fields, shorten
from data.sources.text_file import count_line_ends
from data.text_views import TextViews

_LINE_END = ord("\n")
_MARK = b"\xef\xbb\xbf"
"""A byte order mark at a file's start, and a character like any other elsewhere."""
_PIECE_BYTES = 64 << 10
"""Bytes that are cut at a time: what is found of them stays in the processor's cache."""
_TEXT = pa.string()


@dataclass(frozen=True)
class BadLine:
    """A line that is no row.

    Attributes:
        index: position among the lines.
        column: the column that cannot be read; empty where the line itself cannot be cut into columns.
        where: its field, for messages; empty where the line itself is bad.
        reason: what was found and expected, the likely cause and the way out.
        text: the start of the line.
    """

    index: int
    column: str
    where: str
    reason: str
    text: str


def joined(lines: Iterable[bytes]) -> bytes:
    """A run of ``lines``, which are without LF."""
    return b"".join(line + b"\n" for line in lines)


class LineParser:
    """Cuts lines with as many fields as there are columns."""

    def __init__(self, dialect: Dialect, names: Sequence[str], positions: Sequence[int]) -> None:
        """Takes all column names in the order of the fields, and the positions of the wanted ones."""
        self._dialect, self._names, self._positions = dialect, names, positions
        self._takes_all = list(positions) == list(range(len(names)))
        self._quote = dialect.quote.encode() if dialect.quote is not None else None
        self._delimiter = dialect.delimiter.encode()
        # A row by itself behind a run: a quote that is open at the run's end would swallow it.
        self._guard = b"\n" + (self._delimiter * (len(names) - 1) or b"x")

    def rows(self, run: bytes) -> pa.Table | None:
        """The wanted columns of ``run``, whole lines, as ``string_view``.

        None unless every line, and by itself, is a row.
        """
        if self._is_plain(run):
            return self._cut(run)
        if b"\0" in run or (b"\r" in run and run.count(b"\r") != run.count(b"\r\n")):
            return None
        count = count_line_ends(run) + (not run.endswith(b"\n"))
        guarded = self._quote is not None and self._quote in run
        try:
            table = self._parse(run.removesuffix(b"\n") + self._guard if guarded else run)
        except pa.ArrowInvalid:
            return None
        if table.num_rows != count + guarded:
            return None
        columns = [column.cast(pa.string_view()) for column in table.slice(0, count).columns]
        return pa.table(columns, names=[self._names[position] for position in self._positions])

    def plain_rows(self, content: bytes) -> pa.Table | None:
        """:meth:`rows` of more than a run; None also where a run at a time is the faster way, or may be."""
        return self._cut(content) if self._is_plain(content) else None

    def _is_plain(self, run: bytes) -> bool:
        """Whether fields are just what lies between delimiters: the common case, for which Arrow is not needed."""
        quoted = self._quote is not None and self._quote in run
        single = len(self._names) > 1 and len(self._delimiter) == 1
        return single and not quoted and run.isascii() and b"\r" not in run and b"\0" not in run

    def _cut(self, run: bytes) -> pa.Table | None:
        """:meth:`rows` of a plain run: twice as fast as Arrow's reader, which copies every text."""
        if not run.endswith(b"\n"):
            run += b"\n"
        content, fields = np.frombuffer(run, dtype=np.uint8), len(self._names)
        views = TextViews(len(self._positions), count_line_ends(run))
        start = first_row = 0
        while start < len(run):
            end = run.rfind(b"\n", start, start + _PIECE_BYTES) + 1 or run.index(b"\n", start) + 1
            piece = content[start:end]
            is_line_end = piece == _LINE_END
            ends = np.flatnonzero(is_line_end | (piece == ord(self._delimiter)))
            last = ends[fields - 1 :: fields]
            # Every so many fields a line ends, and no line besides.
            if len(ends) % fields or not is_line_end[last].all() or np.count_nonzero(is_line_end) != len(last):
                return None
            starts = np.empty_like(ends)
            starts[0], starts[1:] = 0, ends[:-1] + 1
            views.add(first_row, start, piece, self._wanted(starts), self._wanted(ends))
            start, first_row = end, first_row + len(last)
        return pa.table(views.columns(run), names=[self._names[position] for position in self._positions])

    def _wanted(self, bounds: IntArray) -> IntArray:
        """Of a bound for each field of each line those of the wanted columns, int64 [lines, wanted]."""
        lines = bounds.reshape(-1, len(self._names))
        return lines if self._takes_all else lines[:, self._positions]

    def bad_lines(self, lines: Sequence[bytes], *, cut_off: bool) -> list[BadLine]:
        """Those that are no rows by themselves, in order.

        Args:
            lines: without LF.
            cut_off: the file ends in the last line, without a line end.
        """
        bad: list[int] = []
        others: list[int] = []
        for index, line in enumerate(lines):
            if self._is_quoted(line):
                is_bad = self._is_suspicious(line) and self.rows(joined([line])) is None
            else:
                is_bad = self._is_plainly_bad(line.removesuffix(b"\r"))
            (bad if is_bad else others).append(index)
        bad += self._search(lines, others)
        last = len(lines) - 1
        return [self._explain(index, lines[index], cut_off=cut_off and index == last) for index in sorted(bad)]

    def _is_quoted(self, line: bytes) -> bool:
        return self._quote is not None and self._quote in line

    def _is_plainly_bad(self, content: bytes) -> bool:
        """Whether a line without quotes is no row: without Arrow, for there may be many."""
        if not content or b"\r" in content or b"\0" in content:
            return True
        if content.count(self._delimiter) != len(self._names) - 1:
            return True
        return not content.isascii() and self._undecodable(content.split(self._delimiter)) is not None

    def _is_suspicious(self, line: bytes) -> bool:
        """Whether a line with quotes may be no row. A guess: the others are tried together, and only then apart."""
        assert self._quote is not None
        parts = line.split(self._quote)
        outside = sum(part.count(self._delimiter) for part in parts[::2])
        return len(parts) % 2 == 0 or outside != len(self._names) - 1 or not line.isascii()

    def _undecodable(self, cells: Sequence[bytes]) -> tuple[int, UnicodeDecodeError] | None:
        """Position of the first wanted cell that is no UTF-8 text, and why: others are not looked at."""
        for position in sorted(self._positions):
            try:
                cells[position].decode()
            except UnicodeDecodeError as error:
                return position, error
        return None

    def _search(self, lines: Sequence[bytes], among: Sequence[int]) -> list[int]:
        """Finds bad lines by halving."""
        if not among or self.rows(joined(lines[index] for index in among)) is not None:
            return []
        if len(among) == 1:
            return list(among)
        middle = len(among) // 2
        return self._search(lines, among[:middle]) + self._search(lines, among[middle:])

    def _parse(
        self, run: bytes, refused: list[arrow_csv.InvalidRow] | None = None, *, kind: pa.DataType = _TEXT
    ) -> pa.Table:
        """Parses a run; with ``refused`` rows of a wrong number of fields are put there, instead of an error.

        The columns are called by their positions, since names may be there twice.
        """
        wanted = [str(position) for position in self._positions]

        def refuse(row: arrow_csv.InvalidRow) -> str:
            assert refused is not None
            refused.append(row)
            return "skip"

        if run.startswith(_MARK):
            run = _MARK + run  # Arrow takes one away from the start of whatever it is given, also inside a file
        return arrow_csv.read_csv(
            pa.BufferReader(run),
            read_options=arrow_csv.ReadOptions(
                column_names=[str(position) for position in range(len(self._names))],
                use_threads=False,
                block_size=len(run) + 1,  # one block: a line may be longer than the default block
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self._dialect.delimiter,
                quote_char=self._dialect.quote or False,
                ignore_empty_lines=True,  # else a blank line would be a row of empty fields
                invalid_row_handler=None if refused is None else refuse,
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, kind),
                include_columns=wanted,
                strings_can_be_null=False,
                null_values=[],
            ),
        )

    def _explain(self, index: int, line: bytes, *, cut_off: bool) -> BadLine:
        """Says why a line is no row."""
        content = line.removesuffix(b"\r")
        text = content.decode(errors="replace")
        if not content:
            reason = "the line is blank; remove it (only the file's end may have blank lines)"
        elif b"\r" in content:
            reason = CARRIAGE_RETURN
        elif b"\0" in content:
            reason = f"the line holds a NUL byte: {shorten(text)!r}. It is damaged, or no text; mend or remove it"
        elif (cells := self._cells(content, text)) is None:
            reason = self._open_quote(text)
        elif isinstance(cells, int):
            reason = self._wrong_count(text, cells, cut_off=cut_off)
        else:
            return self._not_utf8(index, cells)
        return BadLine(index, "", "", reason, shorten(text))

    def _cells(self, content: bytes, text: str) -> Sequence[bytes] | int | None:
        """The cells of a line; how many there are if that is wrong; None: a quote is left open.

        Of a line with quotes only the wanted cells; the others are empty.
        """
        if not self._is_quoted(content):
            cells = content.split(self._delimiter)
            return cells if len(cells) == len(self._names) else len(cells)
        refused: list[arrow_csv.InvalidRow] = []
        if self._parse(text.encode() + self._guard, refused).num_rows + len(refused) == 1:
            return None  # the guard's row was swallowed
        if refused:
            return int(refused[0].actual_columns)
        row = self._parse(content + self._guard, kind=pa.binary())
        wanted = self._positions
        return [row[str(index)][0].as_py() if index in wanted else b"" for index in range(len(self._names))]

    def _open_quote(self, text: str) -> str:
        return (
            f"a quote is opened and not closed on its line: {shorten(text)!r}. A row must be one line; where "
            f"{self._dialect.quote} is an ordinary character, set data.params.quote: none"
        )

    def _wrong_count(self, text: str, found: int, *, cut_off: bool) -> str:
        cause = self._dialect.suspect(text)
        if not cause and found > len(self._names):
            cause = (
                f"A field holds a {self._dialect.name()} that is not quoted, or two lines were joined; mend or remove "
                "the line"
            )
        elif not cause and cut_off:
            cause = "The file ends inside this line: it is probably cut off; copy or download it again"
        elif not cause:
            cause = "The line is incomplete; mend or remove it"
        return (
            f"found {count_fields(found)}, expected {len(self._names)} ({self._dialect.name()} separated): "
            f"{shorten(text)!r}. {cause}"
        )

    def _not_utf8(self, index: int, cells: Sequence[bytes]) -> BadLine:
        found = self._undecodable(cells)
        assert found is not None, "a line that can be cut and decoded is a row"
        position, error = found
        reason = f"byte 0x{cells[position][error.start]:02x} is not UTF-8 text; save the file as UTF-8"
        text = shorten(cells[position].decode(errors="replace"))
        return BadLine(index, self._names[position], f"field {position + 1}", reason, text)
