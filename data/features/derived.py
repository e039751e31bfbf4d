"""Categories that are computed from a cell: a count's bucket, and the hour, weekday and weekend of a time.

They are those of the BARS protocols (Zhu et al., "BARS: Towards Open Benchmarking for Recommender Systems", SIGIR 2022;
FuxiCTR's ``convert_to_bucket``, ``convert_hour``, ``convert_weekday`` and ``convert_weekend``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.cells import BadCellsError, FloatArray, read_numbers, shown
from data.features.encoding import IntArray

Derived = Literal["log_square", "hour", "weekday", "weekend"]

_LARGEST_COUNT = 2.0**53
"""Beyond, a float64 is no count any more."""
_DAYS_FROM_SUNDAY = 4
"""1 January 1970 was a Thursday."""


def derive(cells: pa.Array, kind: Derived, missing_values: Sequence[str]) -> pa.Array:
    """The category of each cell, int64 [n]; null: missing.

    Args:
        cells: numbers, or texts of numbers.
        kind: ``log_square``: floor(log(v)^2) of a v above 2, any other without its fraction. The others read
            YYMMDDHH, as Avazu's ``hour`` is written: ``hour`` is 0 to 23, ``weekday`` 0 (Sunday) to 6, ``weekend`` 1 on
            Saturday and Sunday, else 0.
        missing_values: texts, besides the empty one, that mean missing.

    Raises:
        BadCellsError: cells that are no such number; all of them.
        BadColumnError: the type holds no numbers.
    """
    numbers = read_numbers(cells, missing_values)
    missing = np.isnan(numbers)
    numbers = np.where(missing, 0.0 if kind == "log_square" else 70_01_01_00.0, numbers)
    values = _log_square(numbers, cells) if kind == "log_square" else _of_time(numbers, kind, cells)
    return pa.array(values, mask=missing)


def _log_square(numbers: FloatArray, cells: pa.Array) -> IntArray:
    _refuse(np.abs(numbers) > _LARGEST_COUNT, cells, "a count of at most 2^53 (derive: log_square)")
    return np.where(numbers > 2, np.floor(np.log(np.maximum(numbers, 1.0)) ** 2), np.trunc(numbers)).astype(np.int64)


def _of_time(numbers: FloatArray, kind: Derived, cells: pa.Array) -> IntArray:
    expected = f"a time as YYMMDDHH, such as 14102123 (derive: {kind})"
    whole = (numbers == np.trunc(numbers)) & (numbers >= 0) & (numbers < 100_00_00_00)
    _refuse(~whole, cells, expected)
    written = numbers.astype(np.int64)
    parts: list[IntArray] = [written // 100**place % 100 for place in range(4)]
    hour, day, month, year = parts
    in_calendar = (hour < 24) & (month >= 1) & (month <= 12) & (day >= 1)
    _refuse(~in_calendar, cells, expected)
    months = (np.datetime64("2000", "M") + (year * 12 + month - 1).astype("timedelta64[M]")).astype("datetime64[M]")
    dates = months.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")
    _refuse(dates.astype("datetime64[M]") != months, cells, expected)
    if kind == "hour":
        return hour
    weekday: IntArray = (dates.astype(np.int64) + _DAYS_FROM_SUNDAY) % 7
    return weekday if kind == "weekday" else np.isin(weekday, (0, 6)).astype(np.int64)


def _refuse(bad: npt.NDArray[np.bool_], cells: pa.Array, expected: str) -> None:
    rows = np.flatnonzero(bad)
    if len(rows):
        found = [cells[int(row)].as_py() for row in rows]  # Arrow takes nothing out of string views
        raise BadCellsError(rows, [f"found {shown(cell)!r}, expected {expected}" for cell in found])
