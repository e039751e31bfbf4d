"""Points in time as a configuration writes them: ISO 8601, or a plain number on the scale of the column."""

from __future__ import annotations

from datetime import UTC, datetime


def read_time(text: str) -> float | datetime:
    """The number, or the time (in UTC where the text names no zone).

    Raises:
        ValueError: neither.
    """
    try:
        return float(text)
    except ValueError:
        pass  # no number: a time, or the error below
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        message = f"expected a number, or a time in ISO 8601 such as 2024-05-31T00:00:00, found {text!r}"
        raise ValueError(message) from None
    # A zone is kept: near the years 1 and 9999 the same time has no date in UTC.
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
