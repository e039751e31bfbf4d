"""What the preparation notes of each finished group of chunks, so that a second run goes on behind it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from data.bad_rows import BadRow
from data.prepared.files import publish_text
from data.prepared.manifest import BlocksRecord, FileRecord, PartRecord
from data.prepared.part import PartInfo
from data.sources.source import Split, Unit

RAW, FIT, IDS = "raw", "fit", "ids"


class Published(BaseModel):
    """A note that appears when all that it is about is finished."""

    model_config = ConfigDict(extra="forbid")

    def publish(self, path: Path) -> None:
        """Notes that the group is finished."""
        publish_text(path, self.model_dump_json() + "\n")

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """What was noted; None: nothing, or nothing legible."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, ValidationError):
            return None


class BadRowRecord(BaseModel):
    """A :class:`data.bad_rows.BadRow`."""

    model_config = ConfigDict(extra="forbid")

    file: str
    unit: Unit
    number: int
    column: str
    value: str
    reason: str

    @classmethod
    def of(cls, row: BadRow) -> Self:
        """The record of a row."""
        return cls(**asdict(row))

    def row(self) -> BadRow:
        """The row of a record."""
        return BadRow(**self.model_dump())


class EncodedRecord(Published):
    """A part file that was written.

    Attributes:
        split: the side of its rows.
        number: position of their group.
        part: the file.
        rows: rows.
        positives: how many of them have label 1.
        blocks: its blocks.
        unseen: unseen values of each sparse feature.
        values: all values of them.
    """

    split: Split
    number: int
    part: FileRecord
    rows: int
    positives: int
    blocks: BlocksRecord
    unseen: list[int]
    values: list[int]

    @classmethod
    def of(cls, split: Split, number: int, name: str, info: PartInfo) -> Self:
        """Of a written part."""
        return cls(
            split=split,
            number=number,
            part=FileRecord(name=name, num_bytes=info.num_bytes, sha256=info.sha256),
            rows=sum(info.block_rows),
            positives=sum(info.block_positives),
            blocks=BlocksRecord(
                rows=info.block_rows,
                positives=info.block_positives,
                files=info.block_files,
                firsts=info.block_firsts,
                crc32=info.block_crcs,
            ),
            unseen=info.unseen,
            values=info.values,
        )

    def part_record(self) -> PartRecord:
        """For the manifest."""
        return PartRecord(
            file=self.part,
            rows=self.rows,
            positives=self.positives,
            blocks=self.blocks,
        )


class IdsRecord(BaseModel):
    """Row ids of the group's rows on one side of the split."""

    model_config = ConfigDict(extra="forbid")

    split: Split
    file: FileRecord
    missing: int


class GroupRecord(Published):
    """A group of chunks that was read.

    Attributes:
        source: whose chunks they are.
        number: position among the groups of that source.
        input_bytes: the chunks' share of the input.
        files: names of the files that its readable rows came from, by position among all files.
        unit: what numbers in them count; None: there is no readable row.
        rows_read: rows in the chunks, bad ones counted.
        bad: rows left out, in file order.
        cells: cells of each feature, see :class:`data.features.raw.CellCounts`.
        missing: missing ones.
        clipped: clipped ones, of each dense feature.
        encoded: the training rows' part, where it could be written at once.
        raw: rows still to be encoded, a file a chunk, by split.
        fit: what the training rows say of the features.
        ids: row ids.
    """

    source: Split
    number: int
    input_bytes: int
    files: dict[int, str]
    unit: Unit | None
    rows_read: int
    bad: list[BadRowRecord]
    cells: list[int]
    missing: list[int]
    clipped: list[int]
    encoded: EncodedRecord | None
    raw: dict[Split, list[FileRecord]]
    fit: FileRecord | None
    ids: list[IdsRecord]
