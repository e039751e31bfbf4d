"""What tests of data sources share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from data.bad_rows import BadRows
from data.sources.source import Block, Source


def blocks_of(source: Source, columns: Sequence[str] | None = None, bad: BadRows | None = None) -> Iterator[Block]:
    """All blocks of all chunks, in order; no column names: all columns."""
    wanted = source.columns() if columns is None else columns
    for chunk in source.chunks():
        yield from chunk.blocks(wanted, BadRows() if bad is None else bad)


def table_of(source: Source, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows; there is one at least."""
    return pa.concat_tables(block.columns for block in blocks_of(source, columns))


def rows_of(source: Source, columns: Sequence[str]) -> list[dict[str, Any]]:
    """All rows as Python values."""
    return [row for block in blocks_of(source, columns) for row in block.columns.to_pylist()]
