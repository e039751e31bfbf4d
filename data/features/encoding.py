"""What every categorical encoding shares: the layout of a table's rows and the shape of a fitted encoding.

A table has two rows more than its feature has categories. Missing and unseen are different things: a missing cell says
something about the row, an unseen category says that training knew nothing about it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MISSING_ROW = 0
UNSEEN_ROW = 1
FIRST_ROW = 2
"""Row of category 0."""


class Encoding(Protocol):
    """A fitted map from category texts to table rows; the same for training and evaluation."""

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table: categories and the two special rows."""
        ...

    def rows(self, texts: pa.Array) -> IntArray:
        """Table row of each text, int64 [U]; a null is missing.

        Raises:
            BadCellError: a text cannot be a category of this encoding; ``row`` is its position in ``texts``.
        """
        ...

    def state(self) -> pa.Array:
        """What fitting found, for the run folder."""
        ...


class Fit(Protocol):
    """Collects what an encoding needs to know of the training rows."""

    def add(self, texts: pa.Array, counts: IntArray) -> None:
        """Adds non-null ``texts`` [U], each seen ``counts`` [U] times (at least once); a text may be there twice."""
        ...

    def finish(self) -> Encoding:
        """The fitted encoding."""
        ...
