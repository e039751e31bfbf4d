"""Rules on where rows come from: which are held out, which are read, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config
from erase_rec.config.times import read_time

DATA: KeyPath = ("data",)
SPLIT: KeyPath = ("data", "split")
BY: KeyPath = (*SPLIT, "by")
FRACTION: KeyPath = ("data", "eval_fraction")


def _two_evaluation_sets(config: Config) -> Iterator[Finding]:
    if config.data.eval and config.data.eval_fraction is not None:
        found = "is given beside files in data.eval"
        yield Finding(FRACTION, found, also=(("data", "eval"),))


def _split_beside_files(config: Config) -> Iterator[Finding]:
    if config.data.eval and config.data.split.by != "row":
        yield Finding(BY, f"is {config.data.split.by} beside files in data.eval", also=(("data", "eval"),))


def _split_without_column(config: Config) -> Iterator[Finding]:
    split = config.data.split
    if split.by != "row" and split.column is None:
        yield Finding((*SPLIT, "column"), f"by: {split.by} names no column", also=(BY,))


def _split_without_rows(config: Config) -> Iterator[Finding]:
    """Nothing says how many rows, or which, are held out."""
    split = config.data.split
    if split.by == "hash" and config.data.eval_fraction is None:
        yield Finding(FRACTION, "is not given, with split.by: hash", (BY,), way_out="give data.eval_fraction")
    if split.by == "column" and not split.values:
        yield Finding(
            (*SPLIT, "values"), "is empty, with by: column", (BY,), way_out="list the values that are held out"
        )
    if split.by == "time" and split.since is None:
        yield Finding((*SPLIT, "since"), "is not given, with by: time", (BY,), way_out="give data.split.since")


def _fraction_of_chosen(config: Config) -> Iterator[Finding]:
    split = config.data.split
    if config.data.eval_fraction is not None and split.by in ("column", "time"):
        yield Finding(FRACTION, f"is given with split.by: {split.by}", also=(BY,))


def _unreadable_time(config: Config) -> Iterator[Finding]:
    if (since := config.data.split.since) is None:
        return
    try:
        time = read_time(since)
    except ValueError as error:
        yield Finding((*SPLIT, "since"), str(error))
    else:
        if isinstance(time, float) and not math.isfinite(time):
            yield Finding((*SPLIT, "since"), f"expected a finite number, found {since!r}")


def _label_decides(config: Config) -> Iterator[Finding]:
    data = config.data
    if data.label.column is None:
        return
    if data.split.column == data.label.column:
        found = f"is the label's column {data.label.column!r}"
        yield Finding((*SPLIT, "column"), found, also=(("data", "label"),), way_out="split by another column")
    if data.row_id == data.label.column:
        found = f"is the label's column {data.label.column!r}"
        yield Finding(("data", "row_id"), found, also=(("data", "label"),), way_out="name the column that names rows")


def _read_twice(config: Config) -> Iterator[Finding]:
    if config.data.prepared is not None and config.data.reading == "stream":
        yield Finding(("data", "reading"), "is stream beside data.prepared", also=(("data", "prepared"),))


def _sampled_at_no_rate(config: Config) -> Iterator[Finding]:
    if config.data.negatives_sampled and config.data.negative_sampling_rate is None:
        yield Finding(("data", "negatives_sampled"), "is true without a rate")


DATA_RULES = (
    Rule(
        "`data.eval_fraction` together with files in `data.eval`",
        "evaluation rows come from one place",
        "drop one: data.eval_fraction: null, or data.eval: []",
        _two_evaluation_sets,
    ),
    Rule(
        "`data.split.by` other than `row` together with files in `data.eval`",
        "evaluation rows come from one place, so no training row would be held out",
        "drop one: data.split.by: row, or data.eval: []",
        _split_beside_files,
    ),
    Rule(
        "`data.split.by: hash`, `column` or `time` without `data.split.column`",
        "the column's values decide which rows are held out",
        "give data.split.column, or use data.split.by: row",
        _split_without_column,
    ),
    Rule(
        "`data.split.by: hash` without `data.eval_fraction`, `column` without `values`, or `time` without `since`",
        "nothing says which rows are held out",
        "give it, or use data.split.by: row",
        _split_without_rows,
    ),
    Rule(
        "`data.eval_fraction` with `data.split.by: column` or `time`",
        "the column decides how many rows are held out",
        "drop one: data.eval_fraction: null, or data.split.by: row or hash",
        _fraction_of_chosen,
    ),
    Rule(
        "a `data.split.since` that is neither a finite number nor a time in ISO 8601",
        "rows are compared with it",
        "write it as the column's values are written: a number, or 2024-05-31T00:00:00",
        _unreadable_time,
    ),
    Rule(
        "the label's column as `data.split.column` or `data.row_id`",
        "the label says neither which rows are held out nor which row is which",
        "name another column",
        _label_decides,
    ),
    Rule(
        "`data.reading: stream` together with `data.prepared`",
        "prepared rows are read from their folder, in memory that does not grow with them",
        "drop one: data.reading: memory, or data.prepared: null",
        _read_twice,
    ),
    Rule(
        "`data.negatives_sampled` without `data.negative_sampling_rate`",
        "the rate says by how much logits are corrected",
        "give data.negative_sampling_rate, the share of the negative rows that the files hold",
        _sampled_at_no_rate,
    ),
)
