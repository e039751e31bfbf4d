"""Encoded rows, column by column: what features make, what is stored, and what batches are cut from.

A block holds the rows of one chunk of input (see :mod:`data.sources.source`) that fell into one split. It is the unit
of shuffling, of storage (a record batch of the prepared format) and of streaming, so batches are the same, bit for bit,
whether rows come from memory, a prepared folder or straight from the files. Every column is a NumPy array of its own;
memory-mapped ones will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from data.features.encoding import IntArray

FloatArray = npt.NDArray[np.float32]
RowArray = npt.NDArray[np.int32 | np.int64]
"""Rows of an embedding table: int32 where the table is small enough."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of a block came from.

    Attributes:
        file: as messages name it.
        unit: what ``numbers`` counts: ``line`` of a text file (a header counts), or ``row``.
        numbers: int64 [R], 1-based, ascending.
    """

    file: str
    unit: Literal["line", "row"]
    numbers: IntArray

    def place(self, row: int) -> str:
        """``file:line``, or ``file row n``."""
        return f"{self.file}:{self.numbers[row]}" if self.unit == "line" else f"{self.file} row {self.numbers[row]}"


@dataclass(frozen=True)
class Bags:
    """A multi-valued feature.

    Attributes:
        values: table rows of all bags [V], one bag after the other.
        offsets: int64 [R + 1], bag i is values ``offsets[i]`` to ``offsets[i + 1]`` - 1.
        weights: float32 [V], or None.
    """

    values: RowArray
    offsets: IntArray
    weights: FloatArray | None


@dataclass(frozen=True)
class EncodedBlock:
    """R rows after the feature transforms.

    Attributes:
        dense: float32 [R] a dense feature, finite; N of them.
        ids: table rows, int32 or int64 [R] a single-valued sparse feature, in feature order; S of them.
        bags: the multi-valued sparse features by their position among the F = S + len(bags) sparse features.
        label: uint8 [R], 0 or 1.
        rows: where they came from.
    """

    dense: Sequence[FloatArray]
    ids: Sequence[RowArray]
    bags: Mapping[int, Bags]
    label: npt.NDArray[np.uint8]
    rows: Rows

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.label)


class BlockStore(Protocol):
    """The rows of one split, block by block, in the order of the files. Reading a block twice gives the same rows.

    Attributes:
        block_rows: int64 [blocks], rows of each block; none is empty.
        num_positive: rows whose label is 1.
    """

    block_rows: IntArray
    num_positive: int

    def read(self, block: int) -> EncodedBlock:
        """The rows of a block. Thread-safe."""
        ...
