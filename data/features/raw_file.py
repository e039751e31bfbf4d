"""Raw rows in a file, for the time between reading them and encoding them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.block import Rows
from data.features.arrays_file import read_arrays, write_arrays
from data.features.cells import FloatArray
from data.features.raw import RawRows, RawSparse


def write_raw(path: Path, raw: RawRows) -> None:
    """Writes rows; a dense feature takes half the room where float32 holds each of its values exactly."""
    arrays: dict[str, pa.Array] = {}
    for position, values in enumerate(raw.dense):
        arrays[f"dense/{position}"] = pa.array(_narrow(values))
    for position, feature in enumerate(raw.sparse):
        arrays[f"values/{position}"] = pa.array(feature.values)
        if feature.texts is not None:
            arrays[f"texts/{position}"] = feature.texts
        if feature.offsets is not None:
            arrays[f"offsets/{position}"] = pa.array(feature.offsets)
        if feature.weights is not None:
            arrays[f"weights/{position}"] = pa.array(feature.weights)
    arrays["label"] = pa.array(raw.label)
    arrays["numbers"] = pa.array(raw.rows.numbers)
    arrays["row_numbers"] = pa.array(raw.row_numbers)
    for name, column in raw.extra.items():
        arrays[f"extra/{name}"] = column
    note = {
        "file": raw.rows.file,
        "unit": raw.rows.unit,
        "file_index": raw.file_index,
        "dense": len(raw.dense),
        "sparse": len(raw.sparse),
        "extra": list(raw.extra),
    }
    write_arrays(path, arrays, json.dumps(note))


def read_raw(path: Path) -> RawRows:
    """What :func:`write_raw` wrote; most of it memory of the file.

    Raises:
        OSError: the file is not there.
        pa.ArrowInvalid: it is damaged.
    """
    arrays, note = read_arrays(path)
    about = json.loads(note)
    return RawRows(
        dense=[arrays[f"dense/{at}"].to_numpy().astype(np.float64, copy=False) for at in range(about["dense"])],
        sparse=[_read_sparse(arrays, position) for position in range(about["sparse"])],
        label=arrays["label"].to_numpy(),
        rows=Rows(about["file"], about["unit"], arrays["numbers"].to_numpy()),
        row_numbers=arrays["row_numbers"].to_numpy(),
        file_index=about["file_index"],
        extra={name: arrays[f"extra/{name}"] for name in about["extra"]},
    )


def _read_sparse(arrays: dict[str, pa.Array], position: int) -> RawSparse:
    offsets, weights = arrays.get(f"offsets/{position}"), arrays.get(f"weights/{position}")
    return RawSparse(
        values=arrays[f"values/{position}"].to_numpy(),
        texts=arrays.get(f"texts/{position}"),
        offsets=None if offsets is None else offsets.to_numpy(),
        weights=None if weights is None else weights.to_numpy(),
    )


def _narrow(values: FloatArray) -> FloatArray | npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values, equal_nan=True) else values
