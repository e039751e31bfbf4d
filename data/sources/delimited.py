"""Delimited text files in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.bad_rows import BadRow, BadRows
from data.errors import DataError
from data.features.encoding import IntArray
from data.sources import text_file
from data.sources.content import HashedStream, InputFiles
from data.sources.dialect import Dialect, header_hint
from data.sources.paths import File
from data.sources.rows_of_lines import BadLine, LineParser, joined
from data.sources.source import Block, Chunk, Split, positions_of, refuse_faulty
from data.sources.text_file import Stretch

RUN_BYTES = 1 << 20
"""Bytes parsed at a time, and that a bad line makes slow."""


@dataclass(frozen=True)
class Layout:
    """What the lines of one file hold.

    Attributes:
        dialect: how lines are cut.
        names: all columns of the file, in order.
        has_header: the first line is no row.
    """

    dialect: Dialect
    names: tuple[str, ...]
    has_header: bool

    @property
    def first_number(self) -> int:
        """Line number of row 0."""
        return 2 if self.has_header else 1

    def positions_of(self, columns: Sequence[str], file: str) -> list[int]:
        """As :func:`data.sources.source.positions_of`."""
        return positions_of(columns, self.names, file, header_hint(self.names, self.dialect) if self.has_header else "")


@dataclass(frozen=True)
class TextChunk:
    """A stretch of a delimited text file.

    Attributes:
        file: where it is read from.
        file_index: the file's position among the source's.
        layout: what its lines hold.
        stretch: its lines.
        faults: columns that the source's files do not all have, with a message each.
    """

    file: File
    file_index: int
    layout: Layout
    stretch: Stretch
    faults: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Share of the file's size."""
        return self.stretch.num_bytes

    @property
    def rereadable(self) -> bool:
        """Plain text is."""
        return self.stretch.content is None

    def blocks(self, columns: Sequence[str], bad: BadRows) -> Iterator[Block]:
        """Rows as ``string_view`` columns; the empty text means missing.

        A line is a bad row if it has too many or too few fields, is blank, holds a line break, a NUL byte or a quote
        that is not closed, or is no UTF-8 text in one of ``columns``.

        Raises:
            DataError: a column is not there, the file cannot be read, or a row is bad and ``bad`` refuses it.
        """
        positions = self.layout.positions_of(columns, self.file.name)
        refuse_faulty(columns, self.faults)
        parser = LineParser(self.layout.dialect, self.layout.names, positions)
        first_row, content = self.stretch.first_row, self._content()
        plain = parser.plain_rows(content)
        if plain is not None:
            yield self._block([plain], [np.arange(first_row, first_row + plain.num_rows, dtype=np.int64)])
            return
        tables: list[pa.Table] = []
        numbers: list[IntArray] = []
        for run, is_last in _runs(content):
            table = parser.rows(run)
            if table is not None:
                numbers.append(np.arange(first_row, first_row + table.num_rows, dtype=np.int64))
                first_row += table.num_rows
            else:
                if tables:
                    yield self._block(tables, numbers)  # what is bad in its cells comes before these lines
                    tables, numbers = [], []
                lines = run.removesuffix(b"\n").split(b"\n")
                found = parser.bad_lines(lines, cut_off=is_last and self.stretch.cut_off)
                for line in found:
                    self._report(line, first_row + line.index, bad)
                left = np.delete(np.arange(first_row, first_row + len(lines)), [line.index for line in found])
                first_row += len(lines)
                if not len(left):
                    continue
                numbers.append(left)
                table = parser.rows(_without(lines, found))
                assert table is not None, "lines that are rows by themselves are rows together"
            tables.append(table)
        if tables:
            yield self._block(tables, numbers)

    def _block(self, tables: Sequence[pa.Table], numbers: Sequence[IntArray]) -> Block:
        columns, row_numbers = pa.concat_tables(tables), np.concatenate(numbers)
        return Block(columns, self.file.name, self.file_index, "line", row_numbers, self.layout.first_number)

    def _content(self) -> bytes:
        stretch = self.stretch
        return self.file.read(stretch.start, stretch.length) if stretch.content is None else stretch.content

    def _report(self, line: BadLine, row_number: int, bad: BadRows) -> None:
        number = self.layout.first_number + row_number
        where = f"{self.file.name}, line {number}" + (f", {line.where}" if line.where else "")
        row = BadRow(self.file.name, "line", number, line.column, line.text, line.reason)
        bad.add(row, DataError(f"{where}: {line.reason}"))


def text_chunks(files: InputFiles, layouts: Sequence[Layout], split: Split) -> Iterator[Chunk]:
    """The files in chunks; each is read, and its digest recorded, as its chunks are asked for.

    Raises:
        DataError: a file cannot be read, or has no rows to train on.
    """
    faults = _faults(files, layouts)
    for index, (file, layout) in enumerate(zip(files.files, layouts, strict=True)):
        with file.open() as stream:
            raw = HashedStream(stream, file.name)
            empty = True
            for stretch in text_file.stretches(file, raw, skip_first=layout.has_header):
                empty = False
                yield TextChunk(file, index, layout, stretch, faults)
            files.record(index, raw.finish())
        if empty and split == "train":
            what = "holds a header and no rows" if layout.has_header else "is empty"
            raise DataError(f"{file.name}: the file {what}; remove it")


def _faults(files: InputFiles, layouts: Sequence[Layout]) -> dict[str, str]:
    """What is wrong with the columns that one of the files lacks or has twice: found before any file is read."""
    faults: dict[str, str] = {}
    if len({layout.names for layout in layouts}) == 1:
        return faults  # then each chunk finds all there is to find
    every = list(dict.fromkeys(name for layout in layouts for name in layout.names))
    for file, layout in zip(files.files, layouts, strict=True):
        counts = Counter(layout.names)
        for name in every:
            if counts[name] != 1 and name not in faults:
                try:
                    layout.positions_of([name], file.name)
                except DataError as error:
                    faults[name] = str(error)
    return faults


def _runs(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Whole lines, about ``RUN_BYTES`` at a time, and whether they are the last."""
    start = 0
    while start < len(content):
        end = content.rfind(b"\n", start, start + RUN_BYTES) + 1
        if not end:
            end = content.find(b"\n", start + RUN_BYTES) + 1 or len(content)
        yield content[start:end], end == len(content)
        start = end


def _without(lines: Sequence[bytes], bad: Sequence[BadLine]) -> bytes:
    """The other lines as a run."""
    left_out = {line.index for line in bad}
    return joined(line for index, line in enumerate(lines) if index not in left_out)
