"""Parquet files: any compression that Arrow reads, lists, dictionary columns; columns keep their types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet as pq

from data.errors import DataError
from data.sources.paths import content_fingerprint, resolve
from data.sources.source import MAX_BLOCK_ROWS, Block, Split, positions_of, split_rows
from erase_rec.config.types import Params


class ParquetSource:
    """Rows of Parquet files, whatever their names; columns are matched by name and keep one type over all files."""

    class Config(Params):
        """Nothing to configure: the files describe themselves."""

    label_column: str | None = None

    def __init__(self, config: Config, paths: Sequence[str], *, seed: int, split: Split) -> None:
        """Finds the files; ``seed`` has no meaning here."""
        self._files = resolve(paths)
        self._split = split

    def columns(self) -> list[str]:
        """Top-level column names of the first file."""
        with _opened(self._files[0]) as file:
            names: list[str] = file.schema_arrow.names
        return names

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Rows with the files' own types."""
        self._check_types(columns)
        rows = 0
        for path in self._files:
            with _opened(path) as file:
                first = 1
                for batch in file.iter_batches(MAX_BLOCK_ROWS, columns=list(columns)):
                    # select: Parquet's own selection goes by prefix, so "a" brings a column "a.b" along
                    table = pa.Table.from_batches([batch]).select(list(columns))
                    yield from split_rows(table, str(path), first, "row")
                    first += table.num_rows
                rows += first - 1
        if not rows and self._split == "train":
            raise DataError(f"{', '.join(map(str, self._files))}: there are no rows to train on")

    def fingerprint(self) -> str:
        """Identity of the files' content."""
        return content_fingerprint(self._files)

    def _check_types(self, columns: Sequence[str]) -> None:
        """Before anything is read: a file late in the list must not fail after hours."""
        known: dict[str, tuple[pa.DataType, Path]] = {}
        for path in self._files:
            with _opened(path) as file:
                schema = file.schema_arrow
            for name, position in zip(columns, positions_of(columns, schema.names, str(path)), strict=True):
                found = _logical(schema.field(position).type)
                if pa.types.is_null(found):
                    continue  # a file in which the column is all null says nothing about its type
                expected, first = known.setdefault(name, (found, path))
                if found != expected:
                    raise DataError(
                        f"column {name!r} is {expected} in {first} and {found} in {path}; "
                        "write both files with one type"
                    )


def _logical(kind: pa.DataType) -> pa.DataType:
    """The type without its storage: dictionaries and 64-bit offsets hold the same values."""
    if pa.types.is_dictionary(kind):
        return _logical(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_logical(kind.value_type))
    return kind


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a file and turns what Arrow says about its content, now or while it is read, into a user's error."""
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected a Parquet file")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        cause = (
            "it is no Parquet file, or was cut off; for text use data.kind: csv"
            if "magic bytes" in str(error) or "footer" in str(error).lower()
            else "it is damaged; copy or write it again"
        )
        raise DataError(f"{path}: not readable as Parquet ({str(error).splitlines()[0]}): {cause}") from error
