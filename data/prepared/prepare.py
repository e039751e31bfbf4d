"""From the files of a configuration to a prepared folder, in bounded memory and in as many processes as that allows.

Two passes over groups of chunks (see :mod:`data.prepared.work`). The first reads, splits and fits; where the features
need no fit it writes the training parts at once. Then the fit is merged, and the second encodes what is left. The main
process finds the chunks, in order, and takes the results in order, so that nothing depends on the workers' number.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from data.bad_rows import BadRow
from data.errors import DataError
from data.features.fit import vocabularies_of
from data.features.fitted import Features
from data.features.vocabulary import INDEX_SHARE as VOCABULARY_INDEX_SHARE
from data.leaks import IdRun, Repeats, find_repeats
from data.prepared.budget import (
    GROUP_CHUNKS,
    MIB,
    Disk,
    Memory,
    Sample,
    SampleTask,
    estimate_disk,
    first_workers,
    resident_bytes,
    share_memory,
    take_sample,
)
from data.prepared.files import writing
from data.prepared.lock import locked
from data.prepared.manifest import FEATURES, FileRecord, Manifest
from data.prepared.nursery import Nursery
from data.prepared.plan import Input, Plan, open_inputs
from data.prepared.pool import WorkerPool
from data.prepared.records import GroupRecord, Published
from data.prepared.tally import Tally
from data.prepared.words import duration_in_words, size_in_words
from data.prepared.work import (
    SPLITS,
    WORK,
    EncodeTask,
    MergeTask,
    ReadTask,
    VocabularyTask,
    encode_group,
    merge_features,
    read_group,
    write_vocabulary,
)
from data.quarantine import FILE as QUARANTINE
from data.quarantine import write_quarantine
from data.sources.source import Split
from erase_rec.config.schema import Config

Item = TypeVar("Item")


class Report(Protocol):
    """Where a preparation says how it goes."""

    def say(self, text: str) -> None:
        """A line of its own."""
        ...

    def start(self, name: str, total: int) -> None:
        """A pass begins; ``total`` is what its steps add up to."""
        ...

    def advance(self, amount: int, rows: int) -> None:
        """A group is done: its share of the total, and its rows."""
        ...


@dataclass(frozen=True)
class Options:
    """How to prepare; nothing here changes the result.

    Attributes:
        workers: processes besides the main one, at most.
        memory_bytes: bound on all processes together.
        command: as the manifest quotes it.
        force: start over where the folder holds a preparation.
    """

    workers: int
    memory_bytes: int
    command: str = ""
    force: bool = False


def prepare(config: Config, folder: Path, options: Options, report: Report, nursery: Nursery | None = None) -> Manifest:
    """Prepares, or goes on where an earlier run of the same plan stopped.

    Args:
        config: checked, defaults filled in; what it says beside data, label, split and features does not matter.
        folder: where to write; made when missing. Only the last file, the manifest, makes it a prepared one.
        options: how.
        report: is told how it goes.
        nursery: where workers come from, of :func:`data.prepared.pool.open_nursery`, where one was opened ahead.

    Raises:
        DataError: the data cannot be read as configured, the folder holds something else or is in use, or disk or
            memory do not suffice. What is finished is kept.
    """
    inputs = open_inputs(config)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / WORK):
            finished = Plan.of(config, inputs).claim(folder, force=options.force)
            if finished is None:
                with WorkerPool(first_workers(options.memory_bytes, options.workers), nursery) as pool:
                    finished = _Preparation(config, folder, options, report, inputs, pool).run()
            else:
                report.say(f"{folder} is prepared already, from the same files and settings")
            shutil.rmtree(folder / WORK)
    return finished


def dry_run(config: Config, folder: Path, options: Options, report: Report, nursery: Nursery | None = None) -> Disk:
    """Says what :func:`prepare` would take, from one chunk; writes nothing. Arguments are the same.

    Raises:
        DataError: the data cannot be read as configured, or disk or memory do not suffice.
    """
    inputs = open_inputs(config)
    with WorkerPool(first_workers(options.memory_bytes, options.workers), nursery) as pool:
        return _Preparation(config, folder, options, report, inputs, pool).estimate()[0]


class _Fitted(Published):
    """Notes that ``features/`` is finished."""

    files: list[FileRecord]


class _Preparation:
    def __init__(
        self,
        config: Config,
        folder: Path,
        options: Options,
        report: Report,
        inputs: dict[Split, Input],
        pool: WorkerPool,
    ) -> None:
        self._config, self._folder, self._options, self._report = config, folder, options, report
        self._inputs, self._pool = inputs, pool
        self._tally = Tally(config)

    def run(self) -> Manifest:
        """All of it; the folder is this plan's, and locked."""
        _, sample, memory = self.estimate()
        self._pool.shrink(memory.workers)
        total = sum(each.source.num_bytes() for each in self._inputs.values())
        self._report.start("read", total)
        for each in self._inputs.values():
            self._read(each)
        self._refuse_nothing_to_train_on()
        repeats = self._compare_ids(memory)
        fitted = self._fit(memory)
        self._encode(sample)
        with writing(self._folder):
            if self._config.data.bad_rows == "quarantine" and self._tally.num_bad:
                write_quarantine(self._folder / QUARANTINE, self._bad_rows())
            features = Features.load(self._folder / FEATURES)
            manifest = self._tally.manifest(self._inputs, features, fitted, repeats, self._options.command)
            manifest.write(self._folder)
        return manifest

    def estimate(self) -> tuple[Disk, Sample, Memory]:
        """Reads a chunk, says what all will take, and refuses what cannot fit."""
        train = self._inputs["train"]
        chunks = list(itertools.islice(train.source.chunks(), 3))
        if not chunks:
            raise DataError("data.train: there are no rows to train on")
        if "eval" in self._inputs:
            next(
                iter(self._inputs["eval"].source.chunks()), None
            )  # a mistake in these files must not wait for their turn
        # The bytes of a file's first chunk count what was read ahead, too, and the last one is short.
        (sample,) = self._pool.in_order(take_sample, [SampleTask(train.reading, chunks[len(chunks) // 3])])
        options = self._options
        memory = share_memory(options.memory_bytes, options.workers, main_bytes=resident_bytes(), sample=sample)
        total = sum(each.source.num_bytes() for each in self._inputs.values())
        disk = estimate_disk(sample, total, memory.workers)
        free = shutil.disk_usage(_existing(self._folder)).free
        num_files = sum(len(each.files) for each in self._inputs.values())
        part, more, left = map(size_in_words, (disk.part_bytes, disk.spill_bytes, free))
        self._report.say(
            f"{size_in_words(total)} of input ({num_files} files), about {disk.rows:,} rows; about {part} prepared and "
            f"{more} more on the way; {left} are free"
        )
        self._report.say(
            f"{memory.workers} of {options.workers} workers fit into {options.memory_bytes / MIB:,.0f} MiB of memory; "
            f"about {duration_in_words(disk.seconds)}"
        )
        needed = disk.part_bytes + disk.spill_bytes - _used(self._folder)
        if needed > free:
            raise DataError(
                f"{self._folder}: about {size_in_words(needed)} are needed and {left} are free; make room, or name a "
                "folder on another disk with --out"
            )
        return disk, sample, memory

    def _read(self, each: Input) -> None:
        def tasks() -> Iterator[ReadTask]:
            for number, chunks in enumerate(_batched(each.source.chunks(), GROUP_CHUNKS)):
                yield ReadTask(self._folder, each.reading, number, chunks, each.first_file)

        for record in self._pool.in_order(read_group, tasks()):
            self._tally.add_group(record)
            self._report.advance(record.input_bytes, record.rows_read)

    def _refuse_nothing_to_train_on(self) -> None:
        groups = self._tally.groups
        if not any(group.encoded or group.raw.get("train") for group in groups):
            read = sum(group.rows_read for group in groups if group.source == "train")
            raise DataError(
                f"data.train: no rows to train on ({read} rows read, {self._tally.num_bad} of them bad, the others "
                "held out); give more rows, or hold fewer of them out"
            )

    def _compare_ids(self, memory: Memory) -> Repeats | None:
        column = self._config.data.row_id
        if column is None:
            return None
        runs = [
            IdRun.read(self._folder / ids.file.name, ids.split, ids.missing)
            for group in self._tally.groups
            for ids in group.ids
        ]
        repeats = find_repeats(runs, memory.merge_bytes)
        files, unit = self._tally.places(self._inputs)
        repeats.refuse_leaks(column, files, unit)
        for line in repeats.remarks(column, files, unit):
            self._report.say(line)
        return repeats

    def _fit(self, memory: Memory) -> list[FileRecord]:
        """Merges the fits and leaves the files of the fitted features."""
        note, place = self._folder / WORK / "fitted.json", self._folder / FEATURES
        done = _Fitted.find(note)
        if done is not None and all(file.is_whole(self._folder) for file in done.files):
            return done.files
        fits = tuple(group.fit.name for group in self._tally.groups if group.fit is not None)
        unfinished = self._folder / WORK / FEATURES
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        features, bound = self._config.features, memory.merge_bytes // self._pool.size
        vocabularies = [
            VocabularyTask(self._folder, features, position, fits, bound) for position in vocabularies_of(features)
        ]
        for _ in self._pool.in_order(write_vocabulary, vocabularies):
            pass
        for _ in self._pool.in_order(merge_features, [MergeTask(self._folder, features, fits, unfinished)]):
            pass
        unfinished.replace(place)
        files = [FileRecord.of(self._folder, f"{FEATURES}/{path.name}") for path in sorted(place.iterdir())]
        _Fitted(files=files).publish(note)
        return files

    def _encode(self, sample: Sample) -> None:
        first_file = {split: each.first_file for split, each in self._inputs.items()}
        tasks = [
            EncodeTask(
                folder=self._folder,
                features=self._folder / FEATURES,
                data=self._config.data,
                split=split,
                number=group.number,
                raw=tuple(group.raw[split]),
                first_file=first_file[group.source],
            )
            for group in self._tally.groups
            for split in SPLITS
            if split in group.raw
        ]
        if not tasks:
            return
        mapped = sum(path.stat().st_size for path in (self._folder / FEATURES).iterdir())
        memory = share_memory(
            self._options.memory_bytes,
            self._pool.size,
            main_bytes=resident_bytes(),
            sample=sample,
            features_bytes=mapped + mapped // VOCABULARY_INDEX_SHARE,
        )
        self._pool.shrink(memory.workers)
        self._report.start("encode", sum(file.num_bytes for task in tasks for file in task.raw))
        for task, record in zip(tasks, self._pool.in_order(encode_group, tasks), strict=True):
            self._tally.add_part(record)
            self._report.advance(sum(file.num_bytes for file in task.raw), record.rows)

    def _bad_rows(self) -> Iterator[BadRow]:
        """All of them, from the groups' notes: they may be too many for memory."""
        for group in self._tally.groups:
            note = GroupRecord.find(self._folder / WORK / f"{group.source}-{group.number:05d}.json")
            assert note is not None, "notes are whole or not there"
            yield from (record.row() for record in note.bad)


def _batched(items: Iterable[Item], count: int) -> Iterator[tuple[Item, ...]]:
    source = iter(items)
    while batch := tuple(itertools.islice(source, count)):
        yield batch


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _used(folder: Path) -> int:
    """Bytes that an earlier run left."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
