"""Arrow arrays of any lengths in one file that is memory-mapped: fitted features, what chunks say, raw rows.

The file is an Arrow IPC file of one record batch of one row. All arrays of a type lie one behind the other in the one
list of a column, so that a file of a hundred arrays has few columns and is quick to open. The schema's metadata say
where each array is, and hold a text that belongs to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_DIRECTORY = b"arrays"
_NOTE = b"note"


def write_arrays(path: Path, arrays: Mapping[str, pa.Array], note: str = "") -> None:
    """Writes ``arrays`` and ``note``. An older file of that name is replaced in one piece: it may still be mapped."""
    by_type: dict[pa.DataType, list[pa.Array]] = {}
    directory: dict[str, tuple[int, int, int]] = {}
    for name, array in arrays.items():
        alike = by_type.setdefault(array.type, [])
        start = sum(map(len, alike))
        directory[name] = (list(by_type).index(array.type), start, len(array))
        alike.append(array)
    columns = []
    for alike in by_type.values():
        values = pa.concat_arrays(alike)
        columns.append(pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values))
    schema = pa.schema(
        [pa.field(str(position), column.type) for position, column in enumerate(columns)],
        {_DIRECTORY: json.dumps(directory).encode(), _NOTE: note.encode()},
    )
    unfinished = path.with_name(path.name + ".unfinished")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    unfinished.replace(path)


def read_arrays(path: Path, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], str]:
    """What :func:`write_arrays` wrote. The arrays' content is read when it is used; the file is not kept open.

    Args:
        path: the file.
        names: which arrays; None: all.

    Returns:
        The arrays by name, and the text.

    Raises:
        OSError: the file is not there.
        pa.ArrowInvalid: it is damaged.
        KeyError: it has no array of that name.
    """
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        batch = reader.get_batch(0)
    metadata = batch.schema.metadata
    directory = json.loads(metadata[_DIRECTORY])
    found = {}
    for name in directory if names is None else names:
        column, start, length = directory[name]
        found[name] = batch.column(column).values.slice(start, length)
    return found, metadata[_NOTE].decode()


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Numbers without nulls as NumPy's, without a copy; Arrow's own ``to_numpy`` imports pandas, for 0.4 s."""
    kind = array.type.to_pandas_dtype()
    found: npt.NDArray[Any] = np.frombuffer(array.buffers()[1] or b"", dtype=kind)
    return found[array.offset : array.offset + len(array)]
