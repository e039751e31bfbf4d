"""Rows that cannot be read, and what becomes of them: the policy ``data.bad_rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data.errors import DataError

Policy = Literal["error", "skip", "quarantine"]

FREE_BAD_ROWS = 100
"""So many bad rows are borne whatever their share."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read.

    Attributes:
        file: as messages name it.
        unit: what ``number`` counts.
        number: 1-based line or row number.
        column: the column that cannot be read; empty where the row itself cannot be cut into columns.
        value: what was found there, shortened; or the start of the row.
        reason: found, expected and way out, as in the message of the ``error`` policy.
    """

    file: str
    unit: Literal["line", "row"]
    number: int
    column: str
    value: str
    reason: str


class BadRows:
    """Collects bad rows of one reader, or refuses the first.

    Attributes:
        rows: in the order of reading.
    """

    def __init__(self, policy: Policy = "error") -> None:
        """Under ``error`` nothing is ever collected."""
        self.policy = policy
        self.rows: list[BadRow] = []

    @property
    def tolerated(self) -> bool:
        """Whether reading goes on after a bad row."""
        return self.policy != "error"

    def add(self, row: BadRow, error: DataError) -> None:
        """Takes over a bad row.

        Raises:
            DataError: ``error``, under the policy ``error``.
        """
        if not self.tolerated:
            raise error
        self.rows.append(row)


def refuse_too_many(bad: int, read: int, max_share: float) -> None:
    """Ends reading where a mistaken format, rather than a few bad rows, is the likely cause.

    Args:
        bad: bad rows so far.
        read: rows so far, bad ones counted.
        max_share: ``data.max_bad_share``.

    Raises:
        DataError: more than ``FREE_BAD_ROWS`` and more than ``max_share`` of the rows are bad.
    """
    if bad > FREE_BAD_ROWS and bad > max_share * read:
        raise DataError(
            f"data.max_bad_share: {bad} of the first {read} rows are bad, more than {max_share:.2%}; look at the "
            "reasons, correct data.kind, data.params or features, or raise data.max_bad_share"
        )
