"""What workers of the preparation do: read a group of chunks, then encode what could not be encoded at once.

Every task first looks whether it was finished by an earlier run, and proves it by the checksums of what it left.
Nothing here imports torch: a worker is numpy, Arrow and the group's rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from data.bad_rows import BadRows
from data.errors import DataError
from data.features.arrays_file import read_arrays, write_arrays
from data.features.cells import BadColumnError, FloatArray
from data.features.fit import FeaturesFit, merge_fits, merge_vocabulary, vocabularies_of
from data.features.fitted import Features, encode_training, needs_fit
from data.features.raw import CellCounts, RawRows, count_cells
from data.features.raw_file import read_raw, write_raw
from data.features.vocabulary import Vocabulary
from data.leaks import IdRun
from data.prepared.files import writing
from data.prepared.manifest import FileRecord
from data.prepared.part import PartWriter, part_writer
from data.prepared.records import FIT, IDS, RAW, BadRowRecord, EncodedRecord, GroupRecord, IdsRecord
from data.reading import Reading
from data.sources.source import Chunk, Split, Unit
from data.split import split_column, times
from erase_rec.config.schema import DataConfig, FeaturesConfig

WORK = ".work"
SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True)
class ReadTask:
    """A group of consecutive chunks of one source.

    Attributes:
        folder: the prepared folder.
        reading: how rows are read.
        number: position among the groups of the source.
        chunks: at least one.
        first_file: position among all files of the source's first one.
    """

    folder: Path
    reading: Reading
    number: int
    chunks: tuple[Chunk, ...]
    first_file: int

    @property
    def stem(self) -> str:
        """Names the files of the group."""
        return f"{WORK}/{self.reading.split}-{self.number:05d}"

    @property
    def record(self) -> Path:
        """Where the group is noted."""
        return self.folder / f"{self.stem}.json"


@dataclass(frozen=True)
class EncodeTask:
    """Rows of a group on one side of the split, still to be encoded.

    Attributes:
        folder: the prepared folder.
        features: folder of the fitted features.
        data: checked.
        split: the side.
        number: position of the group.
        raw: the files of the rows, in order.
        first_file: as of :class:`ReadTask`.
    """

    folder: Path
    features: Path
    data: DataConfig
    split: Split
    number: int
    raw: tuple[FileRecord, ...]
    first_file: int


@dataclass(frozen=True)
class VocabularyTask:
    """What all groups say of one vocabulary.

    Attributes:
        folder: the prepared folder.
        config: the features, defaults filled in.
        position: of the vocabulary among the sparse features.
        fits: files in the order of the groups.
        memory_bytes: how much merging may take.
    """

    folder: Path
    config: FeaturesConfig
    position: int
    fits: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True)
class MergeTask:
    """The fits of all groups, whose vocabularies are merged.

    Attributes:
        folder: the prepared folder.
        config: the features, defaults filled in.
        fits: files in the order of the groups.
        place: folder for the fitted features.
    """

    folder: Path
    config: FeaturesConfig
    fits: tuple[str, ...]
    place: Path


def part_name(split: Split, number: int) -> str:
    """A part file's name in the folder."""
    return f"{split}/part-{number:05d}.arrow"


def encoded_record(folder: Path, split: Split, number: int) -> Path:
    """Where a part is noted that was written after the fit."""
    return folder / WORK / f"encoded-{split}-{number:05d}.json"


def read_group(task: ReadTask) -> GroupRecord:
    """Reads, splits and fits a group; encodes its training rows where no fit is needed for that.

    Raises:
        DataError: rows cannot be read, or files cannot be written.
    """
    return _finished_group(task) or _Group(task).read()


def write_vocabulary(task: VocabularyTask) -> None:
    """Merges a vocabulary and leaves it for :func:`merge_features`.

    Raises:
        DataError: files cannot be written.
    """
    with writing(task.folder):
        fits = [task.folder / name for name in task.fits]
        vocabulary = merge_vocabulary(task.config, task.position, fits, task.memory_bytes)
        write_arrays(_vocabulary_file(task.folder, task.position), vocabulary.state())
    pa.default_memory_pool().release_unused()


def merge_features(task: MergeTask) -> None:
    """Fits the features and saves them; in a worker, since a process keeps the memory that it once needed.

    Raises:
        DataError: files cannot be written.
    """
    with writing(task.folder):
        vocabularies = {
            position: Vocabulary.restored(read_arrays(_vocabulary_file(task.folder, position))[0])
            for position in vocabularies_of(task.config)
        }
        fits = [task.folder / name for name in task.fits]
        merge_fits(task.config, fits, vocabularies=vocabularies).save(task.place)
        for position in vocabularies:
            _vocabulary_file(task.folder, position).unlink()
    pa.default_memory_pool().release_unused()


def encode_group(task: EncodeTask) -> EncodedRecord:
    """Encodes the rows that :func:`read_group` left, and removes them.

    Raises:
        DataError: files cannot be written.
    """
    path = encoded_record(task.folder, task.split, task.number)
    record = EncodedRecord.find(path)
    if record is None or not record.part.is_whole(task.folder):
        features, name = _features(task.features), part_name(task.split, task.number)
        with writing(task.folder):
            with part_writer(task.folder / name, features.config) as writer:
                for file in task.raw:
                    raw = read_raw(task.folder / file.name)
                    _write_block(writer, task.data, task.first_file, raw, features)
            record = EncodedRecord.of(task.split, task.number, name, writer.info)
            record.publish(path)
    for file in task.raw:
        (task.folder / file.name).unlink(missing_ok=True)
    return record


def _vocabulary_file(folder: Path, position: int) -> Path:
    return folder / WORK / f"vocabulary-{position:05d}.arrow"


def _finished_group(task: ReadTask) -> GroupRecord | None:
    """What an earlier run noted, if all that it left is whole."""
    record = GroupRecord.find(task.record)
    if record is None or record.input_bytes != sum(chunk.num_bytes for chunk in task.chunks):
        return None
    encoded = {split: EncodedRecord.find(encoded_record(task.folder, split, task.number)) for split in record.raw}
    needed = [entry.file for entry in record.ids]
    needed += [] if record.fit is None else [record.fit]
    needed += [] if record.encoded is None else [record.encoded.part]
    for split, files in record.raw.items():
        part = encoded[split]
        needed += files if part is None or not part.part.is_whole(task.folder) else []
    return record if all(file.is_whole(task.folder) for file in needed) else None


class _Group:
    """Reads one group."""

    def __init__(self, task: ReadTask) -> None:
        self._task, self._reading = task, task.reading
        self._bad = BadRows(task.reading.data.bad_rows)
        self._is_train = task.reading.split == "train"
        self._direct = self._is_train and not needs_fit(task.reading.features)
        self._fit = FeaturesFit(task.reading.features) if self._is_train else None
        self._counts = CellCounts.zero(task.reading.features)
        self._raw: dict[Split, list[FileRecord]] = defaultdict(list)
        self._ids: dict[Split, list[IdRun]] = defaultdict(list)
        self._num_good = 0
        self._files: dict[int, str] = {}
        self._unit: Unit | None = None

    def read(self) -> GroupRecord:
        """Reads all chunks, leaves their files and notes what there is."""
        task, encoded = self._task, None
        with writing(task.folder):
            with ExitStack() as stack:
                writer: PartWriter | None = None
                if self._direct:
                    path = task.folder / part_name("train", task.number)
                    writer = stack.enter_context(part_writer(path, self._reading.features))
                for position, chunk in enumerate(task.chunks):
                    self._read_chunk(position, chunk, writer)
            if writer is not None and writer.info.block_rows:
                encoded = EncodedRecord.of("train", task.number, part_name("train", task.number), writer.info)
            record = GroupRecord(
                source=self._reading.split,
                number=task.number,
                input_bytes=sum(chunk.num_bytes for chunk in task.chunks),
                files=self._files,
                unit=self._unit,
                rows_read=self._num_good + len(self._bad.rows),
                bad=[BadRowRecord.of(row) for row in self._bad.rows],
                cells=self._counts.cells.tolist(),
                missing=self._counts.missing.tolist(),
                clipped=self._counts.clipped.tolist(),
                encoded=encoded,
                raw=dict(self._raw),
                fit=self._write_fit(),
                ids=[self._write_ids(split, runs) for split, runs in self._ids.items()],
            )
            record.publish(task.record)
        return record

    def _read_chunk(self, position: int, chunk: Chunk, writer: PartWriter | None) -> None:
        bad = self._bad.rows
        already = len(bad)
        found = self._reading.read(chunk, self._bad)
        bad[already:] = sorted(bad[already:], key=lambda row: row.number)  # lines come before cells, block by block
        if found is None:
            return
        self._num_good += found.rows.num_rows
        self._unit = found.rows.rows.unit
        self._files[found.rows.file_index + self._task.first_file] = found.rows.rows.file
        if self._is_train:
            self._counts += count_cells(self._reading.features, found.rows)
        for split in SPLITS:
            rows = found.part(split)
            if rows is None:
                continue
            rows = self._take_ids(split, rows)
            if split == "train":
                assert self._fit is not None
                self._fit.add(rows)
            if split == "train" and writer is not None:
                _write_block(writer, self._reading.data, self._task.first_file, rows, None)
            else:
                name = f"{self._task.stem}-{position}-{split}.{RAW}"
                write_raw(self._task.folder / name, rows)
                self._raw[split].append(FileRecord.of(self._task.folder, name))

    def _take_ids(self, split: Split, rows: RawRows) -> RawRows:
        """Keeps the rows' ids and drops their column, unless rows are split by it."""
        column = self._reading.data.row_id
        if column is None:
            return rows
        try:
            run = IdRun.of(split, rows.extra[column], rows.rows, rows.file_index + self._task.first_file)
        except BadColumnError as error:
            raise DataError(f"{rows.rows.file}: column {column!r} of data.row_id: {error}") from None
        self._ids[split].append(run)
        kept = split_column(self._reading.data)
        return replace(rows, extra={name: values for name, values in rows.extra.items() if name == kept})

    def _write_fit(self) -> FileRecord | None:
        if self._fit is None:
            return None
        name = f"{self._task.stem}.{FIT}"
        self._fit.write(self._task.folder / name)
        return FileRecord.of(self._task.folder, name)

    def _write_ids(self, split: Split, runs: Sequence[IdRun]) -> IdsRecord:
        name, run = f"{self._task.stem}-{split}.{IDS}", IdRun.joined(split, runs)
        run.write(self._task.folder / name)
        return IdsRecord(split=split, file=FileRecord.of(self._task.folder, name), missing=run.missing)


def _write_block(
    writer: PartWriter, data: DataConfig, first_file: int, raw: RawRows, features: Features | None
) -> None:
    """Encodes rows, with their time where they are split by it; without ``features`` training rows that need none."""
    block = encode_training(writer.features, raw) if features is None else features.encode(raw)
    writer.write(block, first_file + raw.file_index, times_of(data, raw))


def times_of(data: DataConfig, raw: RawRows) -> FloatArray | None:
    """Times of rows that are split by time; None: they are not."""
    column = split_column(data)
    return times(data, raw) if data.split.by == "time" and column in raw.extra else None


@lru_cache(maxsize=1)
def _features(folder: Path) -> Features:
    """Loaded once in a worker."""
    return Features.load(folder, verify=False)
