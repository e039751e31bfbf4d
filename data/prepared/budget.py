"""How much disk and memory a preparation takes, from a sample: a worker reads one chunk and writes nothing."""

from __future__ import annotations

import pickle
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.bad_rows import BadRows
from data.block import Bags, EncodedBlock
from data.errors import DataError
from data.features.fit import FeaturesFit
from data.features.fitted import encode_training, needs_fit
from data.features.raw import RawRows
from data.reading import Reading
from data.sources.source import Chunk

MIB = 1 << 20
GROUP_CHUNKS = 4
"""Chunks that make a part file."""
MARGIN = 1.25
"""Chunks differ: a later one may take so much more than the sample."""
MERGE_BYTES = 64 * MIB
"""Merging vocabularies and comparing row ids gets at least so much."""
MOST_MERGE_BYTES = 128 * MIB
"""And no more than that: it is not faster with more, and so the peak does not grow with the rows."""
MAIN_BYTES = 48 * MIB
"""What the main process comes to need beside what it has."""
NURSERY_BYTES = 96 * MIB
"""The process that workers are forked from; most of it is theirs, too, and counts once more with each."""
WORKER_BYTES = 110 * MIB
"""A worker before its first chunk: the interpreter, numpy and Arrow."""


@dataclass(frozen=True)
class SampleTask:
    """A chunk of the training files."""

    reading: Reading
    chunk: Chunk


@dataclass(frozen=True)
class Sample:
    """What a chunk took.

    Attributes:
        rows: readable rows.
        input_bytes: its share of the input.
        part_bytes: its rows in part files.
        spill_bytes: its rows between reading and encoding, and what they say for the fit.
        task_bytes: the chunk itself, on its way to a worker.
        peak_bytes: most memory of the worker.
        seconds: time of reading and encoding.
    """

    rows: int
    input_bytes: int
    part_bytes: int
    spill_bytes: int
    task_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Disk:
    """Estimated bytes: rows in all, their part files, and what else lies in the folder while it is prepared."""

    rows: int
    part_bytes: int
    spill_bytes: int
    seconds: float


@dataclass(frozen=True)
class Memory:
    """How the bound is shared out.

    Attributes:
        workers: processes besides the main one.
        merge_bytes: for merging vocabularies and comparing row ids.
    """

    workers: int
    merge_bytes: int


def take_sample(task: SampleTask) -> Sample:
    """Reads, splits, fits and encodes a chunk as :func:`data.prepared.work.read_group` would, and keeps nothing.

    Raises:
        DataError: it cannot be read.
    """
    start = time.perf_counter()
    reading, rows, part_bytes, spill_bytes = task.reading, 0, 0, 0
    found = reading.read(task.chunk, BadRows(reading.data.bad_rows))
    if found is not None:
        rows = found.rows.num_rows
        train, held_out = found.part("train"), found.part("eval")
        fit = FeaturesFit(reading.features)
        if train is not None:
            fit.add(train)
        spill_bytes += sum(array.nbytes for array in fit.state().values())
        if train is not None and not needs_fit(reading.features):
            part_bytes += _block_bytes(encode_training(reading.features, train))
            train = None
        for left in (train, held_out):
            part_bytes += 0 if left is None else _encoded_bytes(left)
            spill_bytes += 0 if left is None else _raw_bytes(left)
    return Sample(
        rows=rows,
        input_bytes=task.chunk.num_bytes,
        part_bytes=part_bytes,
        spill_bytes=spill_bytes,
        task_bytes=len(pickle.dumps(task.chunk)),
        peak_bytes=peak_bytes(),
        seconds=time.perf_counter() - start,
    )


def estimate_disk(sample: Sample, input_bytes: int, workers: int) -> Disk:
    """Scales a sample to the whole input.

    Args:
        sample: of one of its chunks.
        input_bytes: of the whole input.
        workers: that share the work.
    """
    factor = max(1.0, input_bytes / max(1, sample.input_bytes))
    return Disk(
        rows=round(sample.rows * factor),
        part_bytes=round(sample.part_bytes * factor),
        spill_bytes=round(sample.spill_bytes * factor),
        seconds=sample.seconds * factor / workers,
    )


def first_workers(memory_bytes: int, wanted: int) -> int:
    """Workers to start before a sample says what they need, at most ``wanted``."""
    return max(1, min(wanted, (memory_bytes - peak_bytes() - NURSERY_BYTES) // WORKER_BYTES))


def share_memory(memory_bytes: int, wanted: int, *, main_bytes: int, sample: Sample, features_bytes: int = 0) -> Memory:
    """As many workers, at most ``wanted``, as fit below a bound.

    Args:
        memory_bytes: bound on all processes together.
        wanted: workers asked for.
        main_bytes: memory of the main process now.
        sample: what a chunk took.
        features_bytes: fitted features, which every worker maps; 0 while nothing is fitted.

    Raises:
        DataError: not even one fits; names the smallest bound that works.
    """
    in_flight = GROUP_CHUNKS * sample.task_bytes
    a_worker = round(sample.peak_bytes * MARGIN) + 2 * in_flight + features_bytes
    a_worker_in_main = 2 * in_flight  # one group that waits, one on its way
    fixed = main_bytes + MAIN_BYTES + NURSERY_BYTES + in_flight + MERGE_BYTES
    workers = min(wanted, (memory_bytes - fixed) // (a_worker + a_worker_in_main))
    if workers < 1:
        needed = -(-(fixed + a_worker + a_worker_in_main) // (16 * MIB)) * 16
        raise DataError(
            f"--memory: {memory_bytes / MIB:,.0f} MiB are too little for these rows and features; "
            f"give --memory {needed}MiB or more"
        )
    left = memory_bytes - fixed - workers * (a_worker + a_worker_in_main)
    return Memory(workers, min(MERGE_BYTES + left, MOST_MERGE_BYTES))


def peak_bytes() -> int:
    """Most memory that this process ever had."""
    return _status("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Memory that this process has now, or had once where the system does not say."""
    return _status("VmRSS:") or peak_bytes()


def _status(name: str) -> int:
    """A size that Linux tells of this process, in bytes; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name)) * 1024


def _block_bytes(block: EncodedBlock) -> int:
    bags = sum(_bags_bytes(each) for each in block.bags.values())
    return sum(column.nbytes for column in (*block.dense, *block.ids)) + bags + 5 * block.num_rows


def _bags_bytes(bags: Bags) -> int:
    weights = 0 if bags.weights is None else int(bags.weights.nbytes + bags.offsets.nbytes)
    return int(bags.values.nbytes + bags.offsets.nbytes) + weights


def _encoded_bytes(raw: RawRows) -> int:
    """Rows that are not encoded yet: float32 numbers, ids as they are, label and number."""
    return sum(_sparse_bytes(raw)) + (4 * len(raw.dense) + 5) * raw.num_rows


def _raw_bytes(raw: RawRows) -> int:
    """At most; numbers that float32 holds take half of it."""
    texts = sum(int(feature.texts.nbytes) for feature in raw.sparse if feature.texts is not None)
    extra = sum(int(column.nbytes) for column in raw.extra.values())
    return sum(_sparse_bytes(raw)) + texts + extra + (8 * len(raw.dense) + 17) * raw.num_rows


def _sparse_bytes(raw: RawRows) -> Iterator[int]:
    for feature in raw.sparse:
        yield feature.values.nbytes
        yield 0 if feature.offsets is None else feature.offsets.nbytes
        yield 0 if feature.weights is None else feature.weights.nbytes
