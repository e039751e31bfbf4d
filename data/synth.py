"""Criteo-shaped raw files of any size, written by several processes in bounded memory: ``erase-rec synth``.

Workers make blocks of rows (:mod:`data.synth_rows`) and bring them into the files' form (:mod:`data.synth_formats`);
this process appends them in order. What is written depends on the :class:`Spec` alone, not on the number of workers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from data.errors import DataError
from data.sources.source import Split
from data.synth_formats import (
    ID_COLUMN,
    Form,
    ParquetForm,
    ParquetSink,
    Sink,
    TextForm,
    TextSink,
    columns,
    parquet_schema,
)
from data.synth_rows import BLOCK_ROWS, LAYOUT, NUM_CATEGORIES, SPARSE, Synth, bayes_ne

Format = Literal["criteo", "csv", "parquet"]
DELIMITERS = {"criteo": "\t", "csv": ","}
SUFFIXES: dict[Format, str] = {"criteo": "tsv", "csv": "csv", "parquet": "parquet"}
ROW_BYTES: dict[Format, int] = {"criteo": 243, "csv": 243, "parquet": 68}
"""Mean size of a row without its id."""
ID_BYTES: dict[Format, int] = {"criteo": 0, "csv": 14, "parquet": 5}
SUMMARY = "synth.json"
WORKER_GIB = 0.5
_PARTIAL = ".partial"
_PAYLOADS_AHEAD = 2
"""Blocks in flight for each worker: one in work, one waiting to be written."""


@dataclass(frozen=True)
class Spec:
    """What is to be written.

    Attributes:
        rows: training rows.
        eval_rows: rows of ``eval.*``; 0 writes no such file.
        seed: of everything: names, teacher, rows.
        format: ``criteo`` (TAB separated, no header), ``csv`` (commas, a header line) or ``parquet``.
        files: that the training rows are spread over.
        id_column: a first column ``row_id``, text: ``t`` or ``e`` (train, eval) and the row's number in twelve digits.
    """

    rows: int
    eval_rows: int
    seed: int
    format: Format
    files: int = 1
    id_column: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be written.

        Raises:
            DataError: an id column in the criteo format, or more files than blocks of rows.
        """
        if self.id_column and self.format == "criteo":
            raise DataError(
                "--id-column: lines of the criteo format have 40 fields (label, I1-I13, C1-C26) and no place for a row "
                "id; use --format csv or --format parquet"
            )
        most = _num_blocks(self.rows)
        if self.files > most:
            raise DataError(
                f"--files: {self.rows} rows are made in {most} blocks of {BLOCK_ROWS}, which cannot be spread over "
                f"{self.files} files; use at most --files {most}, or more --rows"
            )

    def estimated_bytes(self) -> int:
        """Size of all files."""
        each = ROW_BYTES[self.format] + (ID_BYTES[self.format] if self.id_column else 0)
        return (self.rows + self.eval_rows) * each

    def form(self, synth: Synth) -> Form:
        """What brings rows into the files' form."""
        if self.format == "parquet":
            return ParquetForm(synth, id_column=self.id_column)
        return TextForm(synth, delimiter=DELIMITERS[self.format], id_column=self.id_column)

    def sink(self, path: Path) -> Sink:
        """Opens a file for what :meth:`form` makes."""
        if self.format == "parquet":
            return ParquetSink(path, parquet_schema(id_column=self.id_column))
        names = columns(id_column=self.id_column)
        return TextSink(path, "" if self.format == "criteo" else DELIMITERS[self.format].join(names) + "\n")


@dataclass(frozen=True)
class _Task:
    """A block to make: its first ``num_rows`` rows."""

    split: Split
    block: int
    num_rows: int


@dataclass(frozen=True)
class _Made:
    """A block in the files' form."""

    payload: bytes
    num_rows: int
    clicks: int
    cross_entropy: float


@dataclass(frozen=True)
class _Written:
    """What a file holds."""

    name: str
    num_rows: int
    clicks: int
    cross_entropy: float
    num_bytes: int


def require_space(spec: Spec, out: Path) -> None:
    """Looks before a disk is filled.

    Raises:
        DataError: the disk has less room than the files need.
    """
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if os.path.exists(folder))
    needed, free = spec.estimated_bytes(), shutil.disk_usage(there).free
    if needed > free:
        raise DataError(
            f"--out {out}: the files need about {needed / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB left; "
            "ask for fewer --rows or name another folder"
        )


def claim_folder(out: Path, *, force: bool) -> None:
    """Makes the folder, or takes it over.

    Args:
        out: the folder.
        force: removes what an earlier ``erase-rec synth`` left there; other files stay.

    Raises:
        DataError: it is no folder, cannot be made, or holds anything and ``force`` is not set.
    """
    if os.path.exists(out) and not os.path.isdir(out):  # Path's own raise where a name is too long
        raise DataError(f"--out {out}: is a file, expected a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            if not force:
                raise DataError(f"--out {out}: the folder is not empty; name another, or add --force to write into it")
            stems = [SUMMARY, *(f"{stem}.{suffix}" for stem in ("train-?????", "eval") for suffix in SUFFIXES.values())]
            for path in (path for stem in stems for end in ("", _PARTIAL) for path in out.glob(stem + end)):
                path.unlink()
    except OSError as error:
        raise DataError(f"--out {out}: {error.strerror or error}; name a folder that you may write to") from error


def write_files(spec: Spec, out: Path, *, workers: int, on_rows: Callable[[int], None]) -> dict[str, Any]:
    """Writes the files and ``synth.json``, each whole or not at all, the summary last.

    Args:
        spec: what to write.
        out: a folder that is there.
        workers: processes that make rows, at most; 1 makes them in this one.
        on_rows: called with the number of rows that were just appended.

    Returns:
        What ``synth.json`` holds.

    Raises:
        DataError: the disk is full or refuses, or a worker was killed.
    """
    plan = _plan(spec)
    try:
        with _made(spec, [task for tasks in plan.values() for task in tasks], workers) as made:
            files = [_write_file(spec, out / name, made, len(tasks), on_rows) for name, tasks in plan.items()]
        summary = _summary(spec, files)
        with _published(out / SUMMARY) as partial:
            partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, probably for want of memory; use fewer --workers (each needs "
            f"{WORKER_GIB} GiB)"
        ) from None
    except OSError as error:
        raise DataError(f"--out {out}: {error.strerror or error}; free some space or name another folder") from error
    return summary


def _num_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


def _plan(spec: Spec) -> dict[str, list[_Task]]:
    """The files in the order of writing, and the blocks of each."""

    def tasks(split: Split, rows: int, blocks: range) -> list[_Task]:
        return [_Task(split, block, min(BLOCK_ROWS, rows - block * BLOCK_ROWS)) for block in blocks]

    suffix, num_blocks = SUFFIXES[spec.format], _num_blocks(spec.rows)
    cuts = [num_blocks * file // spec.files for file in range(spec.files + 1)]
    plan = {
        f"train-{file:05d}.{suffix}": tasks("train", spec.rows, range(cuts[file], cuts[file + 1]))
        for file in range(spec.files)
    }
    if spec.eval_rows:
        plan[f"eval.{suffix}"] = tasks("eval", spec.eval_rows, range(_num_blocks(spec.eval_rows)))
    return plan


def _write_file(
    spec: Spec, path: Path, made: Iterator[_Made], num_blocks: int, on_rows: Callable[[int], None]
) -> _Written:
    """Takes the next ``num_blocks`` blocks into a file."""
    num_rows, clicks, cross_entropy = 0, 0, 0.0
    with _published(path) as partial, spec.sink(partial) as sink:
        for _ in range(num_blocks):
            block = next(made)
            sink.append(block.payload)
            num_rows, clicks = num_rows + block.num_rows, clicks + block.clicks
            cross_entropy += block.cross_entropy
            on_rows(block.num_rows)
    return _Written(path.name, num_rows, clicks, cross_entropy, path.stat().st_size)


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """A path to write to; what is there at the end becomes ``path``, and nothing is left of a failure."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _summary(spec: Spec, files: list[_Written]) -> dict[str, Any]:
    def split(name: str) -> dict[str, Any] | None:
        found = [file for file in files if file.name.startswith(name)]
        if not found:
            return None
        rows, clicks = sum(file.num_rows for file in found), sum(file.clicks for file in found)
        ne = bayes_ne(sum(file.cross_entropy for file in found), clicks, rows)
        return {"rows": rows, "base_rate": clicks / rows, "bayes_ne": ne}

    return {
        "seed": spec.seed,
        "format": spec.format,
        "id_column": ID_COLUMN if spec.id_column else None,
        "layout": LAYOUT,
        "train": split("train-"),
        "eval": split("eval."),
        "files": [
            {"name": file.name, "rows": file.num_rows, "clicks": file.clicks, "bytes": file.num_bytes} for file in files
        ],
        "num_categories": dict(zip(SPARSE, NUM_CATEGORIES, strict=True)),
    }


@contextmanager
def _made(spec: Spec, tasks: list[_Task], workers: int) -> Iterator[Iterator[_Made]]:
    """The blocks of ``tasks`` in order; with several workers, some are made ahead."""
    workers = min(workers, len(tasks))
    if workers == 1:
        yield (_make(spec, task) for task in tasks)
        return
    # Spawned: a fork of a process that has threads (Arrow's) may hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_to_the_main_process)
    try:
        yield _ahead(pool, spec, tasks, workers * _PAYLOADS_AHEAD)
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(pool: ProcessPoolExecutor, spec: Spec, tasks: list[_Task], in_flight: int) -> Iterator[_Made]:
    waiting: deque[Future[_Made]] = deque()
    for task in tasks:
        if len(waiting) == in_flight:
            yield waiting.popleft().result()
        waiting.append(pool.submit(_make, spec, task))
    while waiting:
        yield waiting.popleft().result()


def _leave_interrupts_to_the_main_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal


def _make(spec: Spec, task: _Task) -> _Made:
    block = _synth(spec.seed).block(task.split, task.block, task.num_rows)
    payload = _form(spec).payload(block, task.split, task.block * BLOCK_ROWS)
    return _Made(payload, task.num_rows, int(block.label.sum()), block.cross_entropy)


@lru_cache(maxsize=1)
def _synth(seed: int) -> Synth:
    """Made once in a process: it takes as long as some blocks."""
    return Synth(seed)


@lru_cache(maxsize=1)
def _form(spec: Spec) -> Form:
    return spec.form(_synth(spec.seed))
