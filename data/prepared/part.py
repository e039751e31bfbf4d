"""A part file of a prepared folder: an uncompressed Arrow IPC file, one record batch a block.

Columns, in this order, none of them nullable:

- ``dense/NAME`` float32, after the transform;
- ``sparse/NAME`` int32 or int64, a row of the feature's table; a multi-valued feature: large_list of these;
- ``weights/NAME`` large_list of float32, where the multi-valued feature ``NAME`` is weighted;
- ``label`` uint8;
- ``number`` uint32: the row's line (or row) number in its file, less the block's first one, which the manifest holds
  together with the file;
- ``time`` float64, where the rows are split by time: the column's number, or seconds since 1970 in UTC.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.block import Bags, EncodedBlock, Rows
from data.features.encoding import UNSEEN_ROW, IntArray
from data.prepared.files import partial_of
from data.sources.source import Unit
from erase_rec.config.schema import FeaturesConfig

LABEL, NUMBER, TIME = "label", "number", "time"


@dataclass
class PartInfo:
    """What a part file holds.

    Attributes:
        sha256: hex digest of the file.
        num_bytes: its size.
        block_rows: rows of each block.
        block_positives: how many of them have label 1.
        block_files: position of each block's file among the inputs.
        block_firsts: 1-based line or row number of each block's first row.
        block_crcs: checksum of each block, see :func:`checksum`.
        unseen: unseen values of each sparse feature.
        values: all values of each sparse feature.
    """

    sha256: str = ""
    num_bytes: int = 0
    block_rows: list[int] = field(default_factory=list)
    block_positives: list[int] = field(default_factory=list)
    block_files: list[int] = field(default_factory=list)
    block_firsts: list[int] = field(default_factory=list)
    block_crcs: list[int] = field(default_factory=list)
    unseen: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


class PartWriter:
    """Writes blocks of one set of features."""

    def __init__(self, sink: _HashingFile, features: FeaturesConfig) -> None:
        """Nothing is written before the first block, whose types are those of all others."""
        self._sink, self.features = sink, features
        self._writer: pa.RecordBatchFileWriter | None = None
        self.info = PartInfo(unseen=[0] * len(features.sparse), values=[0] * len(features.sparse))

    def write(self, block: EncodedBlock, file_index: int, time: npt.NDArray[np.float64] | None = None) -> None:
        """Adds a block.

        Args:
            block: at least one row.
            file_index: position of its file among the inputs.
            time: float64 [R], where the rows are split by time.
        """
        batch = _batch(block, self.features, time)
        if self._writer is None:
            self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), batch.schema)
        self._writer.write_batch(batch)
        info = self.info
        info.block_rows.append(block.num_rows)
        info.block_positives.append(int(np.count_nonzero(block.label)))
        info.block_files.append(file_index)
        first = int(block.rows.numbers[0])
        info.block_firsts.append(first)
        info.block_crcs.append(checksum(read_block(batch, self.features, block.rows.file, block.rows.unit, first)))
        for position, column in enumerate(_sparse_columns(block)):
            rows = column.values if isinstance(column, Bags) else column
            info.unseen[position] += int(np.count_nonzero(rows == UNSEEN_ROW))
            info.values[position] += len(rows)

    def close(self) -> None:
        """Writes the footer; the digest is known then."""
        if self._writer is not None:
            self._writer.close()
        self.info.sha256, self.info.num_bytes = self._sink.digest.hexdigest(), self._sink.num_bytes


@contextmanager
def part_writer(path: Path, features: FeaturesConfig) -> Iterator[PartWriter]:
    """A writer whose file appears at ``path`` when the block ends without an error; without a block none does.

    It does not wait for the disk: what a crash of the machine took is found by the checksum and written again.
    """
    partial = partial_of(path)
    try:
        with partial.open("wb", buffering=0) as stream:
            writer = PartWriter(_HashingFile(stream), features)
            yield writer
            writer.close()
        if writer.info.block_rows:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_block(batch: pa.RecordBatch, features: FeaturesConfig, file: str, unit: Unit, first: int) -> EncodedBlock:
    """The block of a record batch, its arrays pointing into the batch's memory.

    Args:
        batch: as :class:`PartWriter` wrote it.
        features: those of the part.
        file: name of the block's file.
        unit: what ``first`` counts, ``line`` or ``row``.
        first: number of the block's first row.
    """
    columns = iter(batch.columns)
    dense = [next(columns).to_numpy() for _ in features.dense]
    ids: list[Any] = []
    bags: dict[int, Bags] = {}
    for position, feature in enumerate(features.sparse):
        column = next(columns)
        if feature.multi_valued:
            weights = next(columns).values.to_numpy() if feature.weights is not None else None
            bags[position] = Bags(column.values.to_numpy(), column.offsets.to_numpy(), weights)
        else:
            ids.append(column.to_numpy())
    label = next(columns).to_numpy()
    numbers = next(columns).to_numpy().astype(np.int64) + first
    return EncodedBlock(dense, ids, bags, label, Rows(file, unit, numbers))


def checksum(block: EncodedBlock) -> int:
    """CRC-32 of a block's rows: all that training is given of them, and how the bytes are to be understood.

    Arrow's files have none, and a bit that flips on a disk would be another category. It takes about a millisecond a
    MiB, and is compared whenever a block is read.
    """
    bags = (array for bag in block.bags.values() for array in (bag.values, bag.offsets, bag.weights))
    crc = 0
    for array in (*block.dense, *block.ids, *bags, block.label, block.rows.numbers):
        if array is not None:
            crc = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), crc)
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


class _HashingFile:
    """A file that only grows, and its digest: Arrow writes the IPC format front to back."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self.digest.update(data)
        view = memoryview(data)
        written = 0
        while written < view.nbytes:  # an unbuffered file may take less than it is given
            written += self._stream.write(view[written:])
        self.num_bytes += written
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.closed = True


def _sparse_columns(block: EncodedBlock) -> Iterator[Bags | IntArray]:
    single = iter(block.ids)
    for position in range(len(block.ids) + len(block.bags)):
        yield block.bags[position] if position in block.bags else next(single)  # type: ignore[misc]


def _batch(block: EncodedBlock, features: FeaturesConfig, time: npt.NDArray[np.float64] | None) -> pa.RecordBatch:
    named: list[tuple[str, pa.Array]] = [
        (f"dense/{feature.name}", pa.array(values)) for feature, values in zip(features.dense, block.dense, strict=True)
    ]
    for feature, column in zip(features.sparse, _sparse_columns(block), strict=True):
        if not isinstance(column, Bags):
            named.append((f"sparse/{feature.name}", pa.array(column)))
            continue
        named.append((f"sparse/{feature.name}", _lists(column.offsets, column.values)))
        if column.weights is not None:
            named.append((f"weights/{feature.name}", _lists(column.offsets, column.weights)))
    offsets = block.rows.numbers - block.rows.numbers[0]
    named += [(LABEL, pa.array(block.label)), (NUMBER, pa.array(offsets.astype(np.uint32)))]
    if time is not None:
        named.append((TIME, pa.array(time)))
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in named])
    return pa.record_batch([column for _, column in named], schema=schema)


def _lists(offsets: IntArray, values: Sequence[Any] | npt.NDArray[Any]) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
