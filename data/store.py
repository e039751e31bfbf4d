"""Block stores of rows that nobody prepared: encoded once and kept, or read and encoded again in each epoch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from data.ahead import in_order
from data.bad_rows import BadRows
from data.block import EncodedBlock, RowArray
from data.errors import DataError
from data.features.encoding import UNSEEN_ROW, IntArray
from data.features.fitted import Features
from data.features.raw import RawRows
from data.reading import Reading
from data.sources.source import Chunk, Split

Encode = Callable[[RawRows], EncodedBlock]


class UnseenValues:
    """How many values of some blocks are unseen, each block counted once.

    Attributes:
        unseen: int64 [F], unseen values of each sparse feature.
        values: int64 [F], all values.
    """

    def __init__(self, num_sparse: int) -> None:
        """Of no block."""
        self.unseen, self.values = np.zeros(num_sparse, dtype=np.int64), np.zeros(num_sparse, dtype=np.int64)
        self._counted: set[int] = set()
        self._lock = threading.Lock()

    def add(self, number: int, block: EncodedBlock) -> None:
        """Counts the block of that number, unless it was counted before. Thread-safe."""
        if number in self._counted:
            return
        columns = list(_sparse_columns(block))
        unseen = [np.count_nonzero(column == UNSEEN_ROW) for column in columns]
        with self._lock:
            if number not in self._counted:
                self._counted.add(number)
                self.unseen += np.array(unseen, dtype=np.int64)
                self.values += np.array([len(column) for column in columns], dtype=np.int64)


class MemoryStore:
    """Implements :class:`data.block.BlockStore` over blocks in memory."""

    def __init__(self, blocks: Sequence[EncodedBlock]) -> None:
        """Takes the blocks in file order, none of them empty."""
        self._blocks = blocks
        self.block_rows = np.array([block.num_rows for block in blocks], dtype=np.int64)
        self.num_positive = sum(int(np.count_nonzero(block.label)) for block in blocks)

    def read(self, block: int) -> EncodedBlock:
        """See :meth:`data.block.BlockStore.read`."""
        return self._blocks[block]


class StreamStore:
    """Implements :class:`data.block.BlockStore` by reading and encoding a chunk of the input whenever it is asked for.

    Attributes:
        block_rows: int64 [blocks].
        num_positive: rows whose label is 1.
    """

    def __init__(
        self,
        reading: Reading,
        split: Split,
        chunks: Sequence[Chunk],
        features: Features,
        *,
        block_rows: IntArray,
        num_positive: int,
        unseen: UnseenValues | None = None,
    ) -> None:
        """Takes what a pass over the source found.

        Args:
            reading: how rows are read.
            split: which rows of the chunks these are.
            chunks: those with rows of the split, in order.
            features: fitted.
            block_rows: int64 [chunks], rows of the split in each.
            num_positive: how many of them have label 1.
            unseen: counts the blocks that are read; None: nobody asks.
        """
        self._reading, self._split, self._chunks, self._features = reading, split, chunks, features
        self.block_rows, self.num_positive = block_rows, num_positive
        self._unseen = unseen

    def read(self, block: int) -> EncodedBlock:
        """See :meth:`data.block.BlockStore.read`. Bad rows are left out again; they were counted before.

        Raises:
            DataError: the file cannot be read any more, or holds other rows than before.
        """
        found = self._reading.read(self._chunks[block], BadRows(self._reading.data.bad_rows))
        rows = None if found is None else found.part(self._split)
        if rows is None or rows.num_rows != self.block_rows[block]:
            where = f"data.{self._reading.split}" if rows is None else rows.rows.file
            raise DataError(
                f"{where}: {0 if rows is None else rows.num_rows} rows where there were {self.block_rows[block]} when "
                "it was first read; restore the file and resume the run, and leave files alone while they are streamed"
            )
        encoded = self._features.encode(rows)
        if self._unseen is not None:
            self._unseen.add(block, encoded)
        return encoded


class Kept:
    """Collects rows for a :class:`MemoryStore`.

    Attributes:
        held_bytes: what they take.
    """

    def __init__(self, encode: Encode | None = None) -> None:
        """Starts without rows.

        Args:
            encode: encodes rows at once; None: that has to wait for the fit.
        """
        self._encode = encode
        self._rows: deque[RawRows | EncodedBlock] = deque()
        self.held_bytes = 0

    def add(self, chunk: Chunk, rows: RawRows) -> None:
        """Takes rows of a chunk."""
        kept = rows if self._encode is None else self._encode(rows)
        self._rows.append(kept)
        self.held_bytes += _size_of(kept)

    def store(self, features: Features, workers: int, unseen: UnseenValues | None = None) -> MemoryStore:
        """The rows, encoded; raw rows are freed on the way.

        Args:
            features: fitted.
            workers: threads that encode.
            unseen: counts all blocks now; None: nobody asks.
        """

        def taken() -> Iterator[RawRows | EncodedBlock]:
            while self._rows:
                yield self._rows.popleft()

        def encoded(rows: RawRows | EncodedBlock) -> EncodedBlock:
            return rows if isinstance(rows, EncodedBlock) else features.encode(rows)

        blocks = list(in_order(encoded, taken(), workers, "encode"))
        if unseen is not None:
            for number, block in enumerate(blocks):
                unseen.add(number, block)
        return MemoryStore(blocks)


class Streamed:
    """Collects where rows are, for a :class:`StreamStore`.

    Attributes:
        held_bytes: 0, as no rows are kept.
    """

    held_bytes = 0

    def __init__(self, reading: Reading, split: Split) -> None:
        """Starts without rows."""
        self._reading, self._split = reading, split
        self._chunks: list[Chunk] = []
        self._block_rows: list[int] = []
        self._num_positive = 0

    def add(self, chunk: Chunk, rows: RawRows) -> None:
        """Takes rows of a chunk.

        Raises:
            DataError: the chunk cannot be read again without keeping all its bytes.
        """
        if not chunk.rereadable:
            raise DataError(
                f"{rows.rows.file}: compressed text cannot be read in pieces in each epoch; unpack the file, prepare "
                "it (erase-rec prepare) and train with data.prepared, or keep its rows with data.reading: memory"
            )
        self._chunks.append(chunk)
        self._block_rows.append(rows.num_rows)
        self._num_positive += int(np.count_nonzero(rows.label))

    def store(self, features: Features, workers: int, unseen: UnseenValues | None = None) -> StreamStore:
        """The rows, to be read when they are needed.

        Args:
            features: fitted.
            workers: has no meaning here.
            unseen: counts each block when it is first read; None: nobody asks.
        """
        return StreamStore(
            self._reading,
            self._split,
            self._chunks,
            features,
            block_rows=np.array(self._block_rows, dtype=np.int64),
            num_positive=self._num_positive,
            unseen=unseen,
        )


def _sparse_columns(block: EncodedBlock) -> Iterator[RowArray]:
    """Table rows of each sparse feature, of a multi-valued one those of all bags."""
    single = iter(block.ids)
    for position in range(len(block.ids) + len(block.bags)):
        yield block.bags[position].values if position in block.bags else next(single)


def _size_of(rows: RawRows | EncodedBlock) -> int:
    """Bytes of the arrays of rows."""
    if isinstance(rows, EncodedBlock):
        bags = [each for one in rows.bags.values() for each in (one.values, one.offsets, one.weights)]
        columns: list[Any] = [*rows.dense, *rows.ids, *bags, rows.label, rows.rows.numbers]
        return sum(column.nbytes for column in columns if column is not None)
    sparse = [each for one in rows.sparse for each in (one.values, one.offsets, one.weights, one.texts)]
    columns = [*rows.dense, *sparse, rows.label, rows.rows.numbers, rows.row_numbers, *rows.extra.values()]
    return sum(column.nbytes for column in columns if column is not None)
