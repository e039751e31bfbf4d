"""One pass over a source: its rows chunk by chunk, and what is to be known of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.ahead import in_order
from data.bad_rows import BadRow, BadRows, refuse_too_many
from data.errors import DataError
from data.features.cells import BadColumnError
from data.features.raw import CellCounts, RawRows, count_cells
from data.leaks import IdRun
from data.quarantine import count_reasons
from data.reading import Reading
from data.sources.source import Chunk, Source, Split, Unit

_JOINED_IDS = 1 << 20
"""Ids that are kept in memory before they are written to a file."""


@dataclass(frozen=True)
class ScannedChunk:
    """A chunk and its readable rows.

    Attributes:
        chunk: where they can be read again.
        rows: by split; one without rows is left out.
        counts: of the cells of all of them.
        bad: rows that could not be read.
        ids: of the rows, where a column names them.
        num_left_out: readable rows of neither split.
    """

    chunk: Chunk
    rows: dict[Split, RawRows]
    counts: CellCounts
    bad: list[BadRow]
    ids: list[IdRun]
    num_left_out: int = 0

    @property
    def num_rows(self) -> int:
        """Readable rows of the chunk."""
        return sum(rows.num_rows for rows in self.rows.values()) + self.num_left_out


class Scan:
    """A pass over a source. Everything but the rows adds up while it is iterated.

    Attributes:
        num_rows: readable rows so far.
        num_left_out: how many of them ``data.negative_sampling_rate`` left out.
        num_bad: bad rows so far.
        bad: these, under the policy ``quarantine``.
        reasons: how many of them are bad for each reason.
        counts: of cells.
        files: names of the files that had rows, by position among the source's files.
        unit: what numbers of rows count.
    """

    def __init__(self, reading: Reading, source: Source, *, workers: int, first_file: int = 0) -> None:
        """Reads nothing yet.

        Args:
            reading: how rows are read.
            source: where from.
            workers: threads that read chunks ahead; what is found does not depend on it.
            first_file: number of files of the sources before this one, for the places of ids.
        """
        self._reading, self._source, self._workers, self._first_file = reading, source, workers, first_file
        self.num_rows = self.num_left_out = self.num_bad = 0
        self.bad: list[BadRow] = []
        self.reasons: Counter[str] = Counter()
        self.counts = CellCounts.zero(reading.features)
        self.files: dict[int, str] = {}
        self.unit: Unit = "row"

    def __iter__(self) -> Iterator[ScannedChunk]:
        """The chunks in order.

        Raises:
            DataError: the source cannot be read, a row cannot under the policy ``error``, or too many cannot.
        """
        data = self._reading.data
        for found in in_order(self._read, self._source.chunks(), self._workers, "scan"):
            self.num_rows += found.num_rows
            self.num_left_out += found.num_left_out
            self.num_bad += len(found.bad)
            self.reasons.update(count_reasons(found.bad))
            refuse_too_many(self.num_bad, self.num_rows + self.num_bad, data.max_bad_share)
            if data.bad_rows == "quarantine":
                self.bad += found.bad
            self.counts += found.counts
            for rows in found.rows.values():
                self.files[self._first_file + rows.file_index] = rows.rows.file
                self.unit = rows.rows.unit
            yield found

    def _read(self, chunk: Chunk) -> ScannedChunk:
        bad = BadRows(self._reading.data.bad_rows)
        found = self._reading.read(chunk, bad)
        if found is None:
            return ScannedChunk(chunk, {}, CellCounts.zero(self._reading.features), bad.rows, [])
        splits: tuple[Split, ...] = ("train", "eval")
        rows = {split: part for split in splits if (part := found.part(split)) is not None}
        id_column = self._reading.data.row_id
        ids = [] if id_column is None else [self._ids(id_column, split, part) for split, part in rows.items()]
        counts = count_cells(self._reading.features, found.rows)
        return ScannedChunk(chunk, rows, counts, bad.rows, ids, found.num_left_out)

    def _ids(self, column: str, split: Split, rows: RawRows) -> IdRun:
        try:
            return IdRun.of(split, rows.extra[column], rows.rows, self._first_file + rows.file_index)
        except BadColumnError as error:
            raise DataError(f"{rows.rows.file}: column {column!r} of data.row_id: {error}") from None


class IdRuns:
    """Ids of rows, in memory or in files."""

    def __init__(self, folder: Path | None) -> None:
        """Takes a folder for the files; None: everything stays in memory."""
        self._folder = folder
        self._pending: dict[Split, list[IdRun]] = {"train": [], "eval": []}
        self._written: list[IdRun] = []

    def add(self, runs: list[IdRun]) -> None:
        """Takes the ids of a chunk."""
        for run in runs:
            pending = self._pending[run.split]
            pending.append(run)
            if self._folder is not None and sum(len(each.hashes) for each in pending) >= _JOINED_IDS:
                joined = IdRun.joined(run.split, pending)
                path = self._folder / f"ids-{len(self._written):05d}.npy"
                joined.write(path)
                self._written.append(IdRun.read(path, run.split, joined.missing))
                pending.clear()

    def all(self) -> list[IdRun]:
        """Every run, each ascending by hash."""
        return [*self._written, *self._pending["train"], *self._pending["eval"]]
