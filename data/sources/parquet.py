"""Parquet files: any compression that Arrow reads, lists, dictionary columns; columns keep their types."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import parquet as pq

from data.bad_rows import BadRows
from data.errors import DataError
from data.sources.content import HashedStream, InputFiles
from data.sources.paths import File, resolve
from data.sources.source import (
    MAX_CHUNK_ROWS,
    Block,
    Chunk,
    InputFile,
    Split,
    consecutive,
    positions_of,
    refuse_faulty,
)
from erase_rec.config.types import Params

BLOCK_ROWS = 16384
_READ_AHEAD_BYTES = 1 << 20


class ParquetSource:
    """Rows of Parquet files, whatever their names; columns are matched by name and keep one type over all files."""

    class Config(Params):
        """Nothing to configure: the files describe themselves."""

    label_column: str | None = None

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self._files = InputFiles(resolve(paths))
        self._split = split

    def columns(self) -> list[str]:
        """Top-level column names of the first file."""
        with _opened(self._files.files[0]) as file:
            names: list[str] = file.schema_arrow.names
        return names

    def inputs(self) -> list[InputFile]:
        """The files."""
        return self._files.inputs()

    def num_bytes(self) -> int:
        """Size of the files."""
        return self._files.num_bytes()

    def chunks(self) -> Iterator[Chunk]:
        """Small row groups joined, and large ones cut, to at most ``MAX_CHUNK_ROWS``; all schemas are read first."""
        faults = self._faults()
        rows = 0
        for index, file in enumerate(self._files.files):
            for chunk in self._file_chunks(index, file, faults):
                rows += chunk.num_rows
                yield chunk
        if not rows and self._split == "train":
            names = ", ".join(file.name for file in self._files.files)
            raise DataError(f"{names}: there are no rows to train on")

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return self._files.fingerprint()

    def _file_chunks(self, index: int, file: File, faults: Mapping[str, str]) -> Iterator[ParquetChunk]:
        """Hashes the file alongside, which brings it into the page cache before its chunks are read."""
        with _opened(file) as parquet:
            metadata = parquet.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        num_bytes, total, first = file.info().num_bytes, sum(sizes), 0
        with file.open() as stream:
            raw = None if self._files.is_recorded(index) else HashedStream(stream, file.name)
            for groups, skipped, num_rows in _cut(sizes):
                start, end = (num_bytes * row // total for row in (first, first + num_rows))
                if raw is not None:
                    raw.read_to(end)
                yield ParquetChunk(file, index, groups, skipped, first, num_rows, end - start, faults)
                first += num_rows
            if raw is not None:
                self._files.record(index, raw.finish())

    def _faults(self) -> dict[str, str]:
        """What is wrong with the columns that the files do not all have, or not with one type."""
        faults: dict[str, str] = {}
        known: dict[str, tuple[pa.DataType, str]] = {}
        schemas = []
        for file in self._files.files:
            with _opened(file) as parquet:
                schemas.append(parquet.schema_arrow)
        every = list(dict.fromkeys(name for schema in schemas for name in schema.names))
        for file, schema in zip(self._files.files, schemas, strict=True):
            for name in every:
                if fault := _fault(name, schema, file.name, known):
                    faults.setdefault(name, fault)
        return faults


@dataclass(frozen=True)
class ParquetChunk:
    """Consecutive rows of a Parquet file: whole row groups, or a part of one.

    Attributes:
        file: where they are read from.
        file_index: the file's position among the source's.
        groups: first row group, and the one behind the last.
        skipped: rows of the first group that are not the chunk's.
        first_row: rows of the file before the chunk.
        num_rows: its rows.
        num_bytes: its share of the file's size.
        faults: columns that the source's files do not all have, or not with one type, with a message each.
    """

    file: File
    file_index: int
    groups: tuple[int, int]
    skipped: int
    first_row: int
    num_rows: int
    num_bytes: int
    faults: Mapping[str, str]

    @property
    def rereadable(self) -> bool:
        """Always."""
        return True

    def blocks(self, columns: Sequence[str], bad: BadRows) -> Iterator[Block]:
        """Rows with the file's own types; none of them can be bad.

        A part of a row group is decoded from the group's start: read in order, from where this thread stopped before;
        in any other order, with all that lies before it.
        """
        refuse_faulty(columns, self.faults)
        reader = _Reader.at(self.file, self.groups, columns, self.skipped)
        first_row, end = self.first_row, self.first_row + self.num_rows
        for table in reader.read(self.num_rows):
            yield consecutive(table, file=self.file.name, file_index=self.file_index, unit="row", first_row=first_row)
            first_row += table.num_rows
        if first_row != end:
            raise DataError(f"{self.file.name}: the file was changed while it was being read; start again")
        reader.release()


class _Stopped(threading.local):
    """The reader that a thread goes on with."""

    reader: _Reader | None = None


_STOPPED = _Stopped()


class _Reader:
    """Reads row groups from their start."""

    def __init__(self, file: File, groups: tuple[int, int], columns: Sequence[str]) -> None:
        self._file, self._columns = file, list(columns)
        self._key = _Reader._key_of(file, groups, columns)
        self._parquet = _open(file)
        positions_of(columns, self._parquet.schema_arrow.names, file.name)
        self._row = 0
        self._num_rows = sum(self._parquet.metadata.row_group(group).num_rows for group in range(*groups))
        self._rest: pa.Table | None = None
        self._batches = self._parquet.iter_batches(BLOCK_ROWS, row_groups=list(range(*groups)), columns=self._columns)

    @classmethod
    def at(cls, file: File, groups: tuple[int, int], columns: Sequence[str], row: int) -> _Reader:
        """A reader whose next row is row ``row`` of the groups; the one that this thread kept, if it can be that."""
        kept, _STOPPED.reader = _STOPPED.reader, None
        if kept is not None and (kept._key != cls._key_of(file, groups, columns) or kept._row > row):
            kept.close()
            kept = None
        reader = cls(file, groups, columns) if kept is None else kept
        for _ in reader.read(row - reader._row):
            pass
        return reader

    @staticmethod
    def _key_of(file: File, groups: tuple[int, int], columns: Sequence[str]) -> tuple[object, ...]:
        # a forked process must not share its parent's place in the file
        return (os.getpid(), file.name, groups, tuple(columns))

    def read(self, num_rows: int) -> Iterator[pa.Table]:
        """The next ``num_rows`` rows, or those that are left, in tables of at most ``BLOCK_ROWS``."""
        while num_rows:
            table = self._rest
            if table is None:
                with _readable(self._file):
                    batch = next(self._batches, None)
                if batch is None:
                    return
                # select: Parquet's own selection goes by prefix, so "a" brings a column "a.b" along
                table = pa.Table.from_batches([batch]).select(self._columns)
            part, rest = table.slice(0, num_rows), table.slice(num_rows)
            self._rest = rest if rest.num_rows else None
            self._row += part.num_rows
            num_rows -= part.num_rows
            if part.num_rows:
                yield part

    def release(self) -> None:
        """Leaves the reader, where it has rows left, to the thread's next chunk."""
        if self._row < self._num_rows:
            _STOPPED.reader = self
        else:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        self._parquet.close(force=True)


def _cut(group_rows: Sequence[int]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Chunks of a file as (first row group and the one behind the last, rows skipped in it, rows).

    Small groups are joined while they fit; a group that does not fit alone is cut into parts of about one size, which
    are whole blocks.
    """
    start, joined = 0, 0
    for group, num_rows in enumerate(group_rows):
        if joined and joined + num_rows > MAX_CHUNK_ROWS:
            yield (start, group), 0, joined
            joined = 0
        if not joined:
            start = group
        if num_rows <= MAX_CHUNK_ROWS:
            joined += num_rows
            continue
        parts = -(-num_rows // MAX_CHUNK_ROWS)
        size = -(-num_rows // parts // BLOCK_ROWS) * BLOCK_ROWS
        for first in range(0, num_rows, size):
            yield (group, group + 1), first, min(size, num_rows - first)
    if joined:
        yield (start, len(group_rows)), 0, joined


def _fault(name: str, schema: pa.Schema, file: str, known: dict[str, tuple[pa.DataType, str]]) -> str:
    """What is wrong with a column of one file, or an empty text; ``known`` collects types and where they were seen."""
    try:
        (position,) = positions_of([name], schema.names, file)
    except DataError as error:
        return str(error)
    found = _logical(schema.field(position).type)
    if pa.types.is_null(found):
        return ""  # a file in which the column is all null says nothing about its type
    expected, first = known.setdefault(name, (found, file))
    if found == expected:
        return ""
    return f"column {name!r} is {expected} in {first} and {found} in {file}; write both files with one type"


def _logical(kind: pa.DataType) -> pa.DataType:
    """The type without its storage: dictionaries and 64-bit offsets hold the same values."""
    if pa.types.is_dictionary(kind):
        return _logical(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_logical(kind.value_type))
    return kind


@contextmanager
def _opened(file: File) -> Iterator[pq.ParquetFile]:
    parquet = _open(file)
    try:
        with _readable(file):
            yield parquet
    finally:
        parquet.close(force=True)


def _open(file: File) -> pq.ParquetFile:
    if not file.info().num_bytes:
        raise DataError(f"{file.name}: the file is empty; expected a Parquet file")
    with _readable(file):
        if file.remote is not None:
            # few large requests: the wanted columns of a row group are fetched at once
            return pq.ParquetFile(file.open(), page_checksum_verification=True)
        # pages are read as they are needed: a row group may be larger than the memory
        return pq.ParquetFile(
            file.path, page_checksum_verification=True, pre_buffer=False, buffer_size=_READ_AHEAD_BYTES
        )


@contextmanager
def _readable(file: File) -> Iterator[None]:
    """Turns what Arrow says about a file's content into a user's error."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = (
            "it is no Parquet file, or was cut off; for text use data.kind: csv (erase-rec predict: --kind csv)"
            if "magic bytes" in str(error) or "footer" in str(error).lower()
            else "it is damaged; copy or write it again"
        )
        raise DataError(f"{file.name}: not readable as Parquet ({str(error).splitlines()[0]}): {cause}") from error
