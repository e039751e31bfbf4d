"""How made-up rows are written: lines of text put together as one matrix of bytes, or columns for Parquet.

A row of text is a row of a fixed-width byte matrix in which unused places are zero bytes; without them it is the line.
No Python object is made for a cell or a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet as pq

from data.sources.source import Split
from data.synth_rows import BLOCK_ROWS, DENSE, SPARSE, Synth, SynthBlock

ID_COLUMN = "row_id"

ByteWords = npt.NDArray[np.uint64]
"""Eight characters each, the first in the lowest byte; zero bytes are no characters."""

_RUN_ROWS = 8192
"""Rows of a byte matrix: about 3 MB, so that it stays in the cache."""
_ID_LETTERS: dict[Split, bytes] = {"train": b"t", "eval": b"e"}
_HEX = np.frombuffer(b"".join(b"%04x" % number for number in range(1 << 16)), dtype="<u4")
_FIELD_TYPES: dict[str, object] = {"label": "u1", ID_COLUMN: [("letter", "u1"), ("digits", "<u4", (3,))]}
"""Of the fields that are not eight characters wide."""
_DECIMAL = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype="<u4")


class Form(Protocol):
    """A way to write blocks of rows."""

    def payload(self, block: SynthBlock, split: Split, first_row: int) -> bytes:
        """The rows in the form in which one process hands them to the other."""
        ...


class Sink(Protocol):
    """An open file that takes payloads; a context manager."""

    def append(self, payload: bytes) -> None:
        """Writes the rows behind those that are there."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def columns(*, id_column: bool) -> list[str]:
    """Names in the order of the files."""
    return [*([ID_COLUMN] if id_column else []), "label", *DENSE, *SPARSE]


class TextForm:
    """Lines."""

    def __init__(self, synth: Synth, *, delimiter: str, id_column: bool) -> None:
        """Writes the dense columns' values as text, once."""
        self._id_column = id_column
        self._values = [values.astype("S8").view("<u8") for values in synth.values]
        names = columns(id_column=id_column)
        fields: list[tuple[str, object]] = []
        for name in names:
            fields += [(name, _FIELD_TYPES.get(name, "<u8")), (_end(name), "u1")]
        self._matrix = np.zeros(_RUN_ROWS, dtype=fields)
        for name in names:
            self._matrix[_end(name)] = ord("\n" if name == names[-1] else delimiter)

    def payload(self, block: SynthBlock, split: Split, first_row: int) -> bytes:
        """Lines."""
        runs = range(0, len(block.label), _RUN_ROWS)
        return b"".join(self._lines(block, slice(start, start + _RUN_ROWS), split, first_row + start) for start in runs)

    def _lines(self, block: SynthBlock, rows: slice, split: Split, first_row: int) -> bytes:
        label = block.label[rows]
        matrix = self._matrix[: len(label)]
        matrix["label"] = label
        matrix["label"] += ord("0")
        for name, values, positions, missing in zip(
            DENSE, self._values, block.positions[:, rows], block.dense_missing[:, rows], strict=True
        ):
            matrix[name] = _blanked(values[positions], missing)
        for name, names, missing in zip(SPARSE, block.names[:, rows], block.sparse_missing[:, rows], strict=True):
            matrix[name] = _blanked(_hexadecimal(names), missing)
        if self._id_column:
            matrix[ID_COLUMN]["letter"] = ord(_ID_LETTERS[split])
            matrix[ID_COLUMN]["digits"] = _digits(first_row, len(label))
        return matrix.tobytes().translate(None, b"\0")


class ParquetForm:
    """Columns: ``row_id`` and C* text, label int8, I* int64; a null is a missing value."""

    def __init__(self, synth: Synth, *, id_column: bool) -> None:
        """Columns of the log of ``synth``."""
        self._values, self._id_column = synth.values, id_column
        self._schema = parquet_schema(id_column=id_column)

    def payload(self, block: SynthBlock, split: Split, first_row: int) -> bytes:
        """An Arrow stream of one record batch."""
        columns = []
        if self._id_column:
            columns.append(_id_array(split, first_row, len(block.label)))
        columns.append(pa.array(block.label.astype(np.int8)))
        for values, positions, missing in zip(self._values, block.positions, block.dense_missing, strict=True):
            columns.append(pa.array(values[positions], mask=missing))
        for names, missing in zip(block.names, block.sparse_missing, strict=True):
            columns.append(_text_array(_hexadecimal(names), missing))
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, self._schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=self._schema))
        payload: bytes = out.getvalue().to_pybytes()
        return payload


def parquet_schema(*, id_column: bool) -> pa.Schema:
    """Of the files that :class:`ParquetForm` is for."""
    types = {ID_COLUMN: pa.string(), "label": pa.int8(), **dict.fromkeys(DENSE, pa.int64())}
    return pa.schema([(name, types.get(name, pa.string())) for name in columns(id_column=id_column)])


class TextSink:
    """A text file."""

    def __init__(self, path: Path, header: str) -> None:
        """Opens the file and writes ``header``."""
        self._file = path.open("wb")
        self._file.write(header.encode())

    def append(self, payload: bytes) -> None:
        """See :class:`Sink`."""
        self._file.write(payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class ParquetSink:
    """A Parquet file, a row group a block."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Opens the file."""
        self._writer = pq.ParquetWriter(path, schema)

    def append(self, payload: bytes) -> None:
        """See :class:`Sink`."""
        self._writer.write_table(pa.ipc.open_stream(payload).read_all(), row_group_size=BLOCK_ROWS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


def _end(name: str) -> str:
    """The field of the matrix behind field ``name``: a delimiter or the line's end."""
    return f"{name} end"


def _hexadecimal(numbers: npt.NDArray[np.uint32]) -> ByteWords:
    """Eight digits each."""
    halves = np.empty((len(numbers), 2), dtype="<u4")
    halves[:, 0] = _HEX[(numbers >> np.uint32(16)).astype(np.intp)]
    halves[:, 1] = _HEX[(numbers & np.uint32(0xFFFF)).astype(np.intp)]
    return halves.view("<u8").ravel()


def _blanked(words: ByteWords, missing: npt.NDArray[np.bool_]) -> ByteWords:
    """Without the characters of missing cells, in place."""
    words[missing] = 0
    return words


def _digits(first_row: int, num_rows: int) -> npt.NDArray[np.uint32]:
    """Row numbers in twelve digits, four a word, [R, 3]."""
    numbers = np.arange(first_row, first_row + num_rows)
    return _DECIMAL[np.stack([numbers // 10**8, numbers // 10**4 % 10**4, numbers % 10**4], axis=1)]


def _id_array(split: Split, first_row: int, num_rows: int) -> pa.Array:
    letters = np.full((num_rows, 1), ord(_ID_LETTERS[split]), dtype=np.uint8)
    text = np.hstack([letters, _digits(first_row, num_rows).view(np.uint8)])
    width = text.shape[1]
    offsets = np.arange(num_rows + 1, dtype=np.int32) * width
    return pa.StringArray.from_buffers(num_rows, pa.py_buffer(offsets), pa.py_buffer(text.tobytes()))


def _text_array(words: ByteWords, missing: npt.NDArray[np.bool_]) -> pa.Array:
    there = ~missing
    offsets = np.zeros(len(words) + 1, dtype=np.int32)
    np.cumsum(there, out=offsets[1:])
    offsets *= 8
    validity = pa.array(there).buffers()[1]
    return pa.StringArray.from_buffers(
        len(words), pa.py_buffer(offsets), pa.py_buffer(words[there].tobytes()), validity, int(missing.sum())
    )
