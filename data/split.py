"""Which rows are held out of training: by row, by a hash of a column, by a column's values, or by time.

A row's fate depends on the row, the configuration and the seed alone: not on how many rows there are, how the files are
cut into chunks or who reads them.
"""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.bad_rows import BadRow, BadRows
from data.errors import DataError
from data.features.cells import (
    BadCellsError,
    BadColumnError,
    FloatArray,
    is_text,
    read_categories,
    read_numbers,
    shown,
    unparsable,
)
from data.features.encoding import FIRST_ROW, BoolArray, IntArray
from data.features.hashing import HashArray, hash_texts
from data.features.raw import RawRows
from data.fingerprint import holds_out
from data.shuffle import held_out as drawn
from data.shuffle import sampled
from erase_rec.config.schema import DataConfig
from erase_rec.config.times import read_time

FILE_BITS = 40
"""A row's key is its file's position times 2 ** 40, plus its position in the file."""
_ZONED = r"\d:\d\d.*(Z|[+-]\d\d(:?\d\d)?)$"
_NO_TIME = "found {}, expected a finite number"
_NANOSECONDS = r"\.\d{7}"


def split_column(data: DataConfig) -> str | None:
    """The column that decides which rows are held out; None: none does."""
    return data.split.column if holds_out(data) and data.split.by != "row" else None


def held_out(data: DataConfig, seed: int, rows: RawRows) -> BoolArray:
    """Whether each row of a training file is held out, bool [R].

    Args:
        data: checked; where files for evaluation are named, or nothing says what to hold out, no row is.
        seed: of the draw by row or by hash.
        rows: with :func:`split_column` among their ``extra``; under ``time`` without rows whose time cannot be read,
            see :func:`leave_out_untimed`.

    Raises:
        DataError: the column's type does not fit, or a time cannot be read.
    """
    if not holds_out(data):
        return np.zeros(rows.num_rows, dtype=np.bool_)
    if data.split.by == "row":
        assert data.eval_fraction is not None
        return drawn(_keys(rows), seed=seed, fraction=data.eval_fraction)
    column = _column(data, rows)
    try:
        if data.split.by == "hash":
            assert data.eval_fraction is not None
            return drawn(cell_hashes(column).view(np.int64), seed=seed, fraction=data.eval_fraction)
        if data.split.by == "column":
            return _is_one_of(column, data.split.values)
        return times(data, rows) >= _since(data)
    except BadColumnError as error:
        raise DataError(f"{rows.rows.file}: column {data.split.column!r} of data.split: {error}") from None


def left_out(data: DataConfig, seed: int, rows: RawRows) -> BoolArray | None:
    """Negative rows that ``data.negative_sampling_rate`` leaves out of training, bool [R]; None: all are trained on."""
    if data.negative_sampling_rate is None or data.negatives_sampled:
        return None
    negative: BoolArray = rows.label == 0
    return negative & ~sampled(_keys(rows), seed=seed, fraction=data.negative_sampling_rate)


def cell_hashes(column: pa.Array) -> HashArray:
    """64-bit hash of each cell's text, uint64 [n]; a missing cell counts as the empty text.

    Raises:
        BadColumnError: the type holds no categories.
    """
    categories = read_categories(column)
    hashes = hash_texts(pa.concat_arrays([pa.array([""], pa.large_string()), categories.texts]))
    return hashes[np.maximum(categories.values - (FIRST_ROW - 1), 0)]


def leave_out_untimed(data: DataConfig, rows: RawRows, bad: BadRows) -> RawRows:
    """The rows whose time can be read; the others are bad rows. All rows where time does not split them.

    Raises:
        DataError: the column's type does not fit, or under the policy ``error`` a time cannot be read.
    """
    if split_column(data) is None or data.split.by != "time":
        return rows
    while True:
        try:
            _read_times(data, rows)
        except BadCellsError as error:  # not always all that there are
            for row, message in zip(error.rows.tolist(), error.messages, strict=True):
                _add(data, rows, row, message, bad)
            keep = np.ones(rows.num_rows, dtype=np.bool_)
            keep[error.rows] = False
            rows = rows.select(keep)
        else:
            return rows


def times(data: DataConfig, rows: RawRows) -> FloatArray:
    """Each row's time, float64 [R]: the column's number, or seconds since 1970 in UTC.

    Raises:
        DataError: the column's type does not fit, or a time cannot be read.
    """
    try:
        return _read_times(data, rows)
    except BadCellsError as error:
        raise DataError(f"{rows.rows.place(int(error.rows[0]))}: {_subject(data)}: {error}") from None


def _keys(rows: RawRows) -> IntArray:
    return (np.int64(rows.file_index) << FILE_BITS) + rows.row_numbers


def _read_times(data: DataConfig, rows: RawRows) -> FloatArray:
    column = _column(data, rows)
    since = read_time(str(data.split.since))
    try:
        values = _read_dates(column) if isinstance(since, datetime) else _read_scale(column)
    except BadColumnError as error:
        raise DataError(f"{rows.rows.file}: {_subject(data)}: {error}") from None
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        missing = "the time is missing, so the row is on neither side of the split; give it one or remove the row"
        raise BadCellsError(bad, [missing if np.isnan(each) else _NO_TIME.format(each) for each in values[bad]])
    return values


def _read_scale(column: pa.Array) -> FloatArray:
    if pa.types.is_temporal(column.type):
        raise BadColumnError(column.type, "numbers, since data.split.since is one; write it in ISO 8601")
    return read_numbers(column)


def _read_dates(column: pa.Array) -> FloatArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_text(column.type):
        return _parse_dates(column.cast(pa.large_string()))
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    if not pa.types.is_timestamp(column.type) and not pa.types.is_date(column.type):
        raise BadColumnError(
            column.type, "timestamps, dates or texts in ISO 8601, since data.split.since is one; write it as a number"
        )
    return _seconds(column.cast(pa.timestamp("us"), safe=False), 1e6)


def _parse_dates(texts: pa.Array) -> FloatArray:
    """Texts in ISO 8601; without a zone they are UTC."""
    texts = pc.utf8_trim_whitespace(texts)
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    zoned, fine = (
        pc.match_substring_regex(texts, pattern).fill_null(False).to_numpy(zero_copy_only=False)
        for pattern in (_ZONED, _NANOSECONDS)
    )
    values = np.empty(len(texts), dtype=np.float64)
    bad: list[IntArray] = []
    # Nanoseconds end in 2262, and a time without an end is often written as one in 9999.
    for rows_of_unit, unit, per_second in ((~fine, "us", 1e6), (fine, "ns", 1e9)):
        for where, zone in ((rows_of_unit & zoned, "UTC"), (rows_of_unit & ~zoned, None)):
            kind = pa.timestamp(unit, zone)
            part = texts.filter(pa.array(where))
            try:
                values[where] = _seconds(part.cast(kind), per_second)
            except pa.ArrowInvalid:
                bad.append(np.flatnonzero(where)[unparsable(part, kind)])
    if bad:
        rows = np.sort(np.concatenate(bad))
        found = texts.take(pa.array(rows)).to_pylist()
        raise BadCellsError(rows, [f"found {shown(text)!r}, expected a time in ISO 8601" for text in found])
    return values


def _seconds(stamps: pa.Array, per_second: float) -> FloatArray:
    numbers = stamps.cast(pa.int64())
    values: FloatArray = numbers.fill_null(0).to_numpy() / per_second
    return np.where(numbers.is_null().to_numpy(zero_copy_only=False), np.nan, values)


def _since(data: DataConfig) -> float:
    since = read_time(str(data.split.since))
    return since.timestamp() if isinstance(since, datetime) else since


def _is_one_of(column: pa.Array, values: tuple[str, ...]) -> BoolArray:
    """The empty text stands for a missing cell."""
    categories = read_categories(column)
    chosen = pc.is_in(categories.texts, value_set=pa.array(values, pa.large_string()))
    of_value = np.full(FIRST_ROW + len(categories.texts), "" in values)
    of_value[FIRST_ROW:] = chosen.to_numpy(zero_copy_only=False)
    return of_value[categories.values]


def _column(data: DataConfig, rows: RawRows) -> pa.Array:
    assert data.split.column is not None, "the configuration's rules demand a column"
    return rows.extra[data.split.column]


def _subject(data: DataConfig) -> str:
    return f"column {data.split.column!r} of data.split"


def _add(data: DataConfig, rows: RawRows, row: int, message: str, bad: BadRows) -> None:
    found = shown(_column(data, rows)[row].as_py())
    number = int(rows.rows.numbers[row])
    assert data.split.column is not None
    entry = BadRow(rows.rows.file, rows.rows.unit, number, data.split.column, found, message)
    bad.add(entry, DataError(f"{rows.rows.place(row)}: {_subject(data)}: {message}"))
