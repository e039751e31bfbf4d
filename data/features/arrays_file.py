"""Arrow arrays of any lengths in one file that is memory-mapped: fitted features, what chunks say, raw rows.

The file is an Arrow IPC file of one record batch of one row: array ``name`` is the one list of the large-list column
``name``. A string belongs to the file, too (the schema's metadata).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

_NOTE = b"note"


def write_arrays(path: Path, arrays: Mapping[str, pa.Array], note: str = "") -> None:
    """Writes ``arrays`` and ``note``. An older file of that name is replaced in one piece: it may still be mapped."""
    lists = [pa.LargeListArray.from_arrays(pa.array([0, len(array)], pa.int64()), array) for array in arrays.values()]
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip(arrays, lists, strict=True)], {_NOTE: note.encode()}
    )
    unfinished = path.with_name(path.name + ".unfinished")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(lists, schema=schema))
    unfinished.replace(path)


def read_arrays(path: Path, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], str]:
    """What :func:`write_arrays` wrote. The arrays' content is read when it is used; the file is not kept open.

    Args:
        path: the file.
        names: which arrays; None: all.

    Raises:
        OSError: the file is not there.
        pa.ArrowInvalid: it is damaged.
    """
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        batch = reader.get_batch(0)
    note = (batch.schema.metadata or {}).get(_NOTE, b"").decode()
    wanted = batch.schema.names if names is None else names
    return {name: batch.column(name).values for name in wanted}, note
