"""What the columns of a click log hold, from its first rows: all that ``erase-rec init`` decides by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data.bad_rows import BadRow, BadRows
from data.features.cells import one_array, without_views
from data.sources.source import Source

SAMPLE_ROWS = 200_000
SAMPLE_BYTES = 256 << 20
"""Rows are read until there are so many, or they take so much memory."""

SEPARATORS = "|^;,"
"""What may separate the values of a list in text, the surest first."""
MISSING_WORDS = frozenset({"?", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "\\N"})
"""Texts that mean missing in the logs that the field passes around."""

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}([ T]\d{1,2}:\d{2}.*)?")
_CODE = re.compile(r"0\d+")
_SHOWN = 3


@dataclass(frozen=True)
class Sample:
    """The first rows of a source.

    Attributes:
        columns: those whose name is there once.
        repeated: names that several columns have.
        num_rows: rows in the sample.
        whole: whether these are all rows.
        total_rows: rows of the source; an estimate from the bytes read where it was not read to its end.
        bad: rows that cannot be cut into columns.
    """

    columns: pa.Table
    repeated: list[str]
    num_rows: int
    whole: bool
    total_rows: int
    bad: list[BadRow]


@dataclass(frozen=True)
class ColumnFacts:
    """A column of the sample. What is said of values is said of those that are not missing.

    Attributes:
        name: of the column.
        form: ``number``, ``text``, ``list``, ``time``, ``code`` (numbers that are names: leading zeros, booleans) or
            ``other`` (a type that no feature reads).
        kind: the Arrow type.
        rows: rows of the sample.
        missing: how many cells are missing.
        missing_words: texts that mean missing, as found.
        distinct: how many different values (of a list: items) there are.
        separator: of a list in text.
        examples: some values.
        whole: of numbers: all are integers.
        low, high, typical: of numbers: least, greatest, and median of the absolute values.
        length: mean characters of a text; of a list, mean items.
        in_order: of numbers: each is greater than the one before.
        says_label: each value that is frequent enough to tell goes with one label only.
    """

    name: str
    form: str
    kind: str
    rows: int
    missing: int = 0
    missing_words: tuple[str, ...] = ()
    distinct: int = 0
    separator: str | None = None
    examples: tuple[str, ...] = ()
    whole: bool = False
    low: float = math.nan
    high: float = math.nan
    typical: float = math.nan
    length: float = 0.0
    in_order: bool = False
    says_label: bool = False

    @property
    def present(self) -> int:
        """Cells that are not missing."""
        return self.rows - self.missing


def sample(source: Source) -> Sample:
    """Reads the first rows of a source.

    Raises:
        DataError: it cannot be read, or has no rows.
    """
    names = source.columns()
    wanted = [name for name in dict.fromkeys(names) if names.count(name) == 1]
    bad = BadRows("skip")
    tables: list[pa.Table] = []
    rows = held = read = 0
    whole = True
    for chunk in source.chunks():
        if rows >= SAMPLE_ROWS or held >= SAMPLE_BYTES:
            whole = False
            break
        for block in chunk.blocks(wanted, bad):
            tables.append(without_views(block.columns))
            rows, held = rows + block.num_rows, held + block.columns.nbytes
        read += chunk.num_bytes
    total = rows if whole else rows * source.num_bytes() // max(1, read)
    columns = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    return Sample(columns, [name for name in dict.fromkeys(names) if name not in wanted], rows, whole, total, bad.rows)


def facts_of(table: pa.Table, label: npt.NDArray[np.uint8], without: Sequence[str] = ()) -> Iterator[ColumnFacts]:
    """Facts of each column.

    Args:
        table: R rows.
        label: 0 or 1 [R].
        without: columns that are passed over.
    """
    for name in table.column_names:
        if name not in without:
            yield _facts(name, one_array(table[name]), label)


def _facts(name: str, array: pa.Array, label: npt.NDArray[np.uint8]) -> ColumnFacts:
    kind = str(array.type)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    known: dict[str, Any] = {"name": name, "kind": kind, "rows": len(array)}
    if pa.types.is_null(array.type):
        return ColumnFacts(**known, form="text", missing=len(array))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return _list_facts(known, array)
    if pa.types.is_temporal(array.type):
        return ColumnFacts(**known, form="time", missing=array.null_count, distinct=pc.count_distinct(array).as_py())
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)
    if not (is_text or is_number or pa.types.is_boolean(array.type)):
        return ColumnFacts(**known, form="other", missing=array.null_count)
    values = _Values.of(array)
    known |= {"missing": len(array) - int(values.counts.sum()), "missing_words": values.missing_words}
    known |= {"distinct": len(values.texts), "examples": values.examples(), "says_label": values.says(label)}
    if pa.types.is_boolean(array.type):
        return ColumnFacts(**known, form="code")
    numbers = values.numbers()
    if numbers is not None and len(numbers):
        return _number_facts(known, values, numbers)
    return _text_facts(known, values)


@dataclass(frozen=True)
class _Values:
    """Different values of a column as texts, without missing ones.

    Attributes:
        texts: each once, in the order of their first places.
        counts: how often each is there.
        codes: position in ``texts`` of each cell; -1: missing.
        missing_words: texts that mean missing.
    """

    texts: list[str]
    counts: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]
    missing_words: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, array: pa.Array) -> _Values:
        if pa.types.is_floating(array.type):
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
        encoded = array.dictionary_encode()
        texts = [str(value) for value in encoded.dictionary.to_pylist()]
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        missing = np.array([not text or text in MISSING_WORDS for text in texts], dtype=np.bool_)
        kept = np.cumsum(~missing) - 1
        renamed = np.where(missing, -1, kept) if len(texts) else np.empty(0, np.int64)
        codes = np.where(codes < 0, -1, renamed[codes]) if len(texts) else codes
        left = [text for text, is_missing in zip(texts, missing, strict=True) if not is_missing]
        counts = np.bincount(codes[codes >= 0], minlength=len(left)).astype(np.int64)
        words = tuple(text for text in texts if text in MISSING_WORDS)
        return cls(left, counts, codes, words)

    def examples(self) -> tuple[str, ...]:
        """The most frequent values."""
        return tuple(self.texts[i] for i in np.argsort(-self.counts, kind="stable")[:_SHOWN])

    def numbers(self) -> npt.NDArray[np.float64] | None:
        """The values as numbers, infinite ones too; None: not all are numbers, or some are codes such as 007."""
        if any(_CODE.fullmatch(text.lstrip("-")) for text in self.texts):
            return None
        try:
            numbers = np.array([float(text) for text in self.texts], dtype=np.float64)
        except ValueError:
            return None
        return None if np.isnan(numbers).any() else numbers

    def says(self, label: npt.NDArray[np.uint8]) -> bool:
        """Whether each value goes with one label only: a column of what is to be predicted, under another name."""
        if not self.texts or len(self.texts) < 2 or self.counts.sum() < 10 * len(self.texts):
            return False
        there = self.codes >= 0
        positive = np.bincount(self.codes[there], weights=label[there], minlength=len(self.texts))
        pure = (positive == 0) | (positive == self.counts)
        return bool(pure.all() and 0 < positive.sum() < self.counts.sum())


def _number_facts(known: dict[str, Any], values: _Values, numbers: npt.NDArray[np.float64]) -> ColumnFacts:
    order = np.argsort(np.abs(numbers))
    middle = np.searchsorted(np.cumsum(values.counts[order]), values.counts.sum() / 2)
    cells = numbers[values.codes[values.codes >= 0]]
    return ColumnFacts(
        **known,
        form="number",
        whole=bool((np.isfinite(numbers) & (numbers == np.floor(numbers))).all()),
        low=float(numbers.min()),
        high=float(numbers.max()),
        typical=float(np.abs(numbers[order[middle]])),
        in_order=bool((cells[1:] > cells[:-1]).all()),
    )


def _text_facts(known: dict[str, Any], values: _Values) -> ColumnFacts:
    if not values.texts:
        return ColumnFacts(**known, form="text")
    if all(_TIME.fullmatch(text) for text in values.texts):
        return ColumnFacts(**known, form="time")
    for separator in SEPARATORS:
        if items := _items(values, separator):
            known |= {"separator": separator, "distinct": items, "says_label": False}
            counts = np.array([text.count(separator) + 1 for text in values.texts])
            return ColumnFacts(**known, form="list", length=float(np.average(counts, weights=values.counts)))
    lengths = np.array([len(text) for text in values.texts])
    form = "code" if all(_CODE.fullmatch(text) or text.isdigit() for text in values.texts) else "text"
    return ColumnFacts(**known, form=form, length=float(np.average(lengths, weights=values.counts)))


def _items(values: _Values, separator: str) -> int:
    """Different items where the texts are lists; 0: they are not.

    Lists of several lengths, or whose items are fewer than the lists: in both cases cutting finds what repeats. A comma
    is common inside names, so it has to save half of the values.
    """
    parts = [text.split(separator) for text in values.texts]
    several = np.array([len(part) > 1 for part in parts])
    if values.counts[several].sum() < 0.2 * values.counts.sum():
        return 0
    items = {item for part in parts for item in part if item}
    if any(" " in item.strip() for item in items) and separator == ",":
        return 0
    if separator in ",;":
        return len(items) if len(items) <= len(values.texts) / 2 else 0
    return len(items) if len({len(part) for part in parts}) > 1 or len(items) < len(values.texts) else 0


def _list_facts(known: dict[str, Any], array: pa.Array) -> ColumnFacts:
    items = pc.list_flatten(array)
    if pa.types.is_dictionary(items.type):
        items = items.cast(items.type.value_type)
    readable = pa.types.is_integer(items.type) or pa.types.is_string(items.type) or pa.types.is_large_string(items.type)
    if not readable and not pa.types.is_null(items.type):
        return ColumnFacts(**known, form="other")
    values = pc.value_counts(items)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    examples = tuple(str(value) for value in values.field(0).to_pylist()[:_SHOWN])
    empty = int((lengths == 0).sum())
    mean = float(lengths.mean()) if len(lengths) else 0.0
    return ColumnFacts(**known, form="list", missing=empty, distinct=len(values), examples=examples, length=mean)
