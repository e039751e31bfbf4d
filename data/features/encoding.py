"""The layout that all embedding tables share, and that of rows read but not yet encoded.

A table has two rows more than its feature has categories. Missing and unseen are different things: a missing cell says
something about the row, an unseen category says that training knew nothing about it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MISSING_ROW = 0
UNSEEN_ROW = 1
FIRST_ROW = 2
"""Row of category 0."""

LARGEST_INT32 = 2**31 - 1

FILLED_ROW = 1
"""Before the encoding, where nothing is unseen yet: missing, takes the row of the feature's ``fill``."""


def narrow_rows(rows: npt.NDArray[np.integer], table_rows: int) -> npt.NDArray[np.int32 | np.int64]:
    """Rows of a table as int32 where the table is small enough for it, else as int64."""
    if table_rows <= LARGEST_INT32:
        return rows.astype(np.int32)
    return rows.astype(np.int64)
