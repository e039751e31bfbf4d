"""Rows from pandas: DataFrames in place of files, with the same features, splits and loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from data.bad_rows import BadRows
from data.errors import DataError
from data.fingerprint import holds_out
from data.sources.source import MAX_CHUNK_ROWS, Block, Chunk, InputFile, Split, consecutive, positions_of
from erase_rec.config.schema import Config
from erase_rec.config.types import Params

if TYPE_CHECKING:
    from data.dataset import Datasets


class FrameSource:
    """Rows of a DataFrame, numbered from 1; its index is ignored, and column names are taken as text.

    Columns keep their types: nullable ones, categoricals and lists too; NaN, None and NA are missing. A column of
    Python objects must hold one type. The frame must not be changed while it is in use.
    """

    class Config(Params):
        """Nothing to configure: a frame describes itself."""

    label_column: str | None = None

    def __init__(self, frame: pd.DataFrame, *, split: Split = "train") -> None:
        """Copies nothing.

        Raises:
            DataError: it is something else, such as a dictionary or another library's frame.
        """
        self._columns = _Columns(frame, "DataFrame" if split == "train" else "eval DataFrame")
        self._split = split

    def columns(self) -> list[str]:
        """The frame's column names, as text."""
        return list(self._columns.names)

    def inputs(self) -> list[InputFile]:
        """None."""
        return []

    def num_bytes(self) -> int:
        """Memory of the frame; of Python objects, their references."""
        return self._columns.num_bytes

    def chunks(self) -> Iterator[Chunk]:
        """Rows in chunks of ``MAX_CHUNK_ROWS``, each of which holds the whole frame: they are not for other processes.

        Raises:
            DataError: there are no rows to train on.
        """
        num_rows = self._columns.num_rows
        if not num_rows and self._split == "train":
            raise DataError(f"{self._columns.name}: there are no rows to train on")
        for start in range(0, num_rows, MAX_CHUNK_ROWS):
            yield _FrameChunk(self._columns, start, min(start + MAX_CHUNK_ROWS, num_rows))

    def fingerprint(self) -> str:
        """Hex SHA-256 of names, types and values."""
        return self._columns.fingerprint()


def from_pandas(config: Config, train: pd.DataFrame, eval: pd.DataFrame | None = None, **options: Any) -> Datasets:
    """Builds datasets from DataFrames.

    Args:
        config: checked, defaults filled in, with ``data.kind: pandas``.
        train: training rows; those that ``data.split`` and ``data.eval_fraction`` name are held out.
        eval: rows to evaluate; None: those held out of ``train``, if any.
        options: ``features``, ``rank``, ``world_size`` and ``pin`` of :func:`data.dataset.build_datasets`.

    Raises:
        DataError: the configuration names other rows, or the frames cannot be read as configured.
    """
    from data.dataset import build_datasets  # imports torch, which a process that only reads frames needs not

    if config.data.kind != "pandas":
        raise DataError(f"data.kind: found {config.data.kind}, expected pandas for rows of DataFrames")
    for key in ("train", "eval", "prepared"):
        if value := getattr(config.data, key):
            shown = value if isinstance(value, str) else ", ".join(value)
            raise DataError(f"data.{key}: names {shown!r}, but the rows come from DataFrames; remove it")
    if eval is not None and holds_out(config.data):
        raise DataError(
            "data.eval_fraction or data.split holds out training rows, and there is a DataFrame to evaluate; "
            "give one of them"
        )
    eval_source = None if eval is None else FrameSource(eval, split="eval")
    return build_datasets(config, train_source=FrameSource(train), eval_source=eval_source, **options)


@dataclass(frozen=True)
class _FrameChunk:
    """Rows ``start`` to ``stop`` - 1."""

    columns: _Columns
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Share of the frame."""
        size, rows = self.columns.num_bytes, self.columns.num_rows
        return size * self.stop // rows - size * self.start // rows

    @property
    def rereadable(self) -> bool:
        """The frame is in memory whether or not its chunks are kept."""
        return True

    def blocks(self, columns: Sequence[str], bad: BadRows) -> Iterator[Block]:
        """The rows in one block; none of them can be bad.

        Raises:
            DataError: a column is not there, is there twice, or holds several types.
        """
        positions = positions_of(columns, self.columns.names, self.columns.name)
        arrays = [self.columns.arrow(position).slice(self.start, self.stop - self.start) for position in positions]
        table = pa.table(arrays, names=list(columns))
        yield consecutive(table, file=self.columns.name, file_index=0, unit="row", first_row=self.start)


class _Columns:
    """The columns of a frame, turned into Arrow when they are first needed: most of them without a copy.

    Attributes:
        name: of the frame, for messages.
        names: of the columns.
        num_rows: rows.
        num_bytes: memory of the frame.
    """

    def __init__(self, frame: pd.DataFrame, name: str) -> None:
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"{name}: found {type(frame).__name__}, expected a pandas DataFrame; convert it")
        self._frame, self.name = frame, name
        self.names = [str(column) for column in frame.columns]
        self.num_rows = len(frame)
        self.num_bytes = int(frame.memory_usage(index=False).sum())
        self._arrow: dict[int, pa.ChunkedArray] = {}

    def arrow(self, position: int) -> pa.ChunkedArray:
        """The column at ``position``. Thread-safe: two threads that need it first make the same.

        Raises:
            DataError: it holds values of several types, or of one that Arrow has no type for.
        """
        if position not in self._arrow:
            self._arrow[position] = self._convert(position)
        return self._arrow[position]

    def _convert(self, position: int) -> pa.ChunkedArray:
        series = self._frame.iloc[:, position]
        try:
            array = pa.array(series, from_pandas=True)
        except (pa.ArrowException, OverflowError) as error:
            kinds = sorted({type(value).__name__ for value in series[series.notna()].astype(object)})
            found = f"values of {len(kinds)} types ({', '.join(kinds[:5])})" if len(kinds) > 1 else str(series.dtype)
            raise DataError(
                f"{self.name}: column {self.names[position]!r} holds {found}: {str(error).splitlines()[0]}; convert it "
                "to one type, for instance with astype"
            ) from error
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])

    def fingerprint(self) -> str:
        """Hex SHA-256 of names, types and values."""
        digest = hashlib.sha256()
        for position, name in enumerate(self.names):
            try:
                array = self.arrow(position)
            except DataError:
                # nobody can train on it, but it is there
                digest.update(repr((name, list(self._frame.iloc[:, position]))).encode())
                continue
            digest.update(repr((name, str(array.type), len(array))).encode())
            for start in range(0, len(array), MAX_CHUNK_ROWS):
                part = array.slice(start, MAX_CHUNK_ROWS)
                # apart, because what lies beneath a missing value is arbitrary
                _hash(part.is_valid(), digest)
                _hash(part.drop_null(), digest)
        return digest.hexdigest()


def _hash(array: pa.ChunkedArray, digest: Any) -> None:
    """Hashes values as Arrow would send them: without what a slice leaves out."""
    table = pa.table([array.combine_chunks()], names=[""])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    digest.update(sink.getvalue())
