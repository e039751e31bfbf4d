"""``manifest.json`` of a prepared folder: all that is known of it without reading a part file. Written last.

The folder: ``manifest.json``; ``features/``, the fitted features; ``train/part-00000.arrow`` and so on (see
:mod:`data.prepared.part`; numbers of parts without rows are left out); ``eval/part-00000.arrow`` and so on where rows
are held out; ``quarantine.jsonl`` where bad rows were put aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from data.digests import digest_of, digest_of_json
from data.errors import DataError
from data.prepared.files import publish_text, sync_path
from data.quarantine import FILE as QUARANTINE

FORMAT = "erase-rec prepared"
VERSION = 2
FILE = "manifest.json"
DIGEST = "sha256"
"""Key of the manifest's own digest: of its rows and blocks nothing else would tell that they were changed."""
FEATURES = "features"
SHOWN_REASONS = 5
SPLITS: tuple[Literal["train", "eval"], ...] = ("train", "eval")


def _inside(name: str) -> str:
    """A manifest may come from anywhere: it names files of its own folder and no others."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file inside the folder")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
"""Of a file below the folder that a manifest is in."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """A file of the folder, by its name there."""

    name: FileName
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, name: str) -> Self:
        """Of a file that was just written."""
        return cls(name=name, num_bytes=(folder / name).stat().st_size, sha256=digest_of(folder / name))

    def is_whole(self, folder: Path) -> bool:
        """Whether the file is there as it was written; reads all of it."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.num_bytes and digest_of(path) == self.sha256


class InputRecord(_Record):
    """A file that was read: its name, its size, and a text that is another one once the file was written anew."""

    name: str
    num_bytes: int
    version: str


class BlocksRecord(_Record):
    """The blocks of a part, a list item a block.

    Attributes:
        rows: rows of the block.
        positives: how many of them have label 1.
        files: position of its file in :attr:`Manifest.files`.
        firsts: 1-based line or row number of its first row.
        crc32: checksum of its rows, see :func:`data.prepared.part.checksum`.
    """

    rows: list[int]
    positives: list[int]
    files: list[int]
    firsts: list[int]
    crc32: list[int]


class PartRecord(_Record):
    """A part file."""

    file: FileRecord
    rows: int
    positives: int
    blocks: BlocksRecord


class SplitRecord(_Record):
    """The rows of a split. ``label_rate`` is null without rows.

    ``unseen`` and ``values``: unseen values and all values of each sparse feature, by name.
    """

    rows: int
    positives: int
    label_rate: float | None
    unseen: dict[str, int]
    values: dict[str, int]
    parts: list[PartRecord]


class FeatureRecord(_Record):
    """A feature as it lies in the part files.

    Attributes:
        name: the columns are ``dense/NAME``, or ``sparse/NAME`` and perhaps ``weights/NAME``.
        kind: a number, one table row, or a bag of them.
        table_rows: rows of the embedding table: 0 is missing, 1 unseen, categories follow; null for a number.
        known: categories (of ``hash``: buckets) that training rows had often enough for a row of their own; null where
            every row counts as known.
        cells: cells in the rows of ``data.train``, held out or not; an empty bag counts as one.
        missing: how many of them were missing.
        clipped: numbers clipped to float32's range; null for a category.
    """

    name: str
    kind: Literal["dense", "single", "bag"]
    table_rows: int | None
    known: int | None
    cells: int
    missing: int
    clipped: int | None


class BadRowsRecord(_Record):
    """Rows that could not be read; ``reasons`` counts them without what was found there."""

    policy: Literal["error", "skip", "quarantine"]
    count: int
    reasons: dict[str, int]


class RowIdsRecord(_Record):
    """What the check of ``data.row_id`` found.

    Attributes:
        column: the ids.
        rows: rows with an id.
        missing: rows without one, which were not compared.
        repeated: rows whose id an earlier row of the same split has.
        remarks: the same in words, with examples.
    """

    column: str
    rows: int
    missing: int
    repeated: dict[Literal["train", "eval"], int]
    remarks: list[str]


class Manifest(_Record):
    """The whole file.

    Attributes:
        format: :data:`FORMAT`.
        version: :data:`VERSION`.
        fingerprint: of content and settings, as of a run that reads the same files without preparation.
        settings: see :func:`data.fingerprint.settings`; ``features`` there is the configuration of the features.
        inputs: what was read, by ``train`` and ``eval``.
        files: names of the files that blocks refer to.
        unit: what line or row numbers count.
        features: in model order, the dense ones first.
        fitted: the files of ``features/``.
        splits: ``train``, and ``eval`` where rows are held out.
        rows_read: rows of all files, bad ones counted.
        bad_rows: those left out.
        row_ids: null where ``data.row_id`` names no column.
        made: command, time and versions.
    """

    format: str
    version: int
    fingerprint: str
    settings: dict[str, Any]
    inputs: dict[str, list[InputRecord]]
    files: list[str]
    unit: Literal["line", "row"]
    features: list[FeatureRecord]
    fitted: list[FileRecord]
    splits: dict[Literal["train", "eval"], SplitRecord]
    rows_read: int
    bad_rows: BadRowsRecord
    row_ids: RowIdsRecord | None
    made: dict[str, str]

    def write(self, folder: Path) -> None:
        """Makes the folder a prepared one, on the disk: first all that the manifest names, then the manifest."""
        for file in self.all_files():
            sync_path(folder / file.name)
        for name in {str(Path(file.name).parent) for file in self.all_files()}:
            sync_path(folder / name)
        plain = self.model_dump(mode="json")
        publish_text(folder / FILE, json.dumps(plain | {DIGEST: digest_of_json(plain)}, indent=1) + "\n", sync=True)
        sync_path(folder)

    @property
    def num_left_out(self) -> int:
        """Readable rows of ``data.train`` that ``data.negative_sampling_rate`` left out."""
        return self.rows_read - self.bad_rows.count - sum(split.rows for split in self.splits.values())

    def all_files(self) -> Iterator[FileRecord]:
        """Everything with a checksum."""
        yield from self.fitted
        for split in self.splits.values():
            yield from (part.file for part in split.parts)

    def conclusion(self, folder: Path) -> list[str]:
        """What was prepared, a line each."""
        lines = [
            f"{split}: {record.rows:,} rows in {len(record.parts)} parts, label rate "
            + ("undefined" if record.label_rate is None else f"{record.label_rate:.4f}")
            for split, record in self.splits.items()
        ]
        if self.num_left_out:
            rate = self.settings["data"]["negative_sampling_rate"]
            lines.append(f"left out: {self.num_left_out:,} negative rows (data.negative_sampling_rate: {rate:g})")
        if self.bad_rows.count:
            where = f", see {folder / QUARANTINE}" if self.bad_rows.policy == "quarantine" else ""
            lines.append(f"bad rows: {self.bad_rows.count:,} of {self.rows_read:,} left out{where}")
            reasons = list(self.bad_rows.reasons.items())
            lines += [f"  {count:,}: {reason}" for reason, count in reasons[:SHOWN_REASONS]]
            lines += [f"  and {len(reasons) - SHOWN_REASONS} other reasons"] if reasons[SHOWN_REASONS:] else []
        lines.append(f"data fingerprint {self.fingerprint[:12]}; train on it with data.prepared={folder}")
        return lines

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            DataError: there is none, or it is of another version, or not as it was written.
        """
        path = folder / FILE
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(_absent(folder)) from None
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not readable ({error}); prepare the data again") from error
        found = plain.get("format") if isinstance(plain, dict) else None
        if found != FORMAT:
            raise DataError(f"{path}: not the manifest of a prepared folder: format is {found!r}, not {FORMAT!r}")
        if plain.get("version") != VERSION:
            raise DataError(
                f"{path}: version {plain.get('version')!r} of the format, this program reads {VERSION}; "
                "prepare the data again, or use the program that wrote it"
            )
        if plain.pop(DIGEST, None) != digest_of_json(plain):
            raise DataError(
                f"{path}: was changed after it was written ({DIGEST} is not its own); prepare the data again"
            )
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: {place}: {first['msg']}; prepare the data again") from error


def _absent(folder: Path) -> str:
    if folder.is_file():
        return (
            f"{folder} is a file, not a folder that erase-rec prepare wrote; "
            "to look at a click log, let erase-rec init write a configuration for it and read the comments"
        )
    if not folder.is_dir():
        return f"data.prepared: there is no folder {str(folder)!r}; write it with: erase-rec prepare --out {folder}"
    if (folder / ".work").is_dir():
        return f"{folder}: the preparation is not finished; run the same erase-rec prepare command again to go on"
    return f"{folder}: no {FILE}, so it is not a prepared folder; write one with: erase-rec prepare --out FOLDER"
