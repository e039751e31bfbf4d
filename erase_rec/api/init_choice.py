"""From what columns hold to features, dimension and pace of training: each choice with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from data.features.cells import LARGEST_EXACT_FLOAT
from erase_rec.api.init_facts import MISSING_WORDS, ColumnFacts
from erase_rec.api.init_label import shown_text
from erase_rec.errors import UserError

FEW = 20
"""Whole numbers of at most so many kinds are codes: a table for them costs nothing."""
FULL_RANGE = 200
"""Whole numbers of at least so many kinds that fill half of their range are ids, as preprocessing makes them."""
MANY = 100
"""Categories from which rare ones may share a row."""
MAX_VOCABULARY = 2_000_000
"""More categories than this are hashed."""
MAX_BUCKETS = 1 << 22
UNIQUE_SHARE = 0.95
"""A column with so many different values, compared with its rows, names the rows."""
FREE_TEXT = 60
"""Mean characters from which a text is prose."""

_ID_WORDS = (
    "ad adgroup app author brand browser campaign cat cate category channel city class code country cust customer "
    "device domain gender genre id ip item keyword language market material model movie os page pid product publisher "
    "query region shop site sku slot store tag type user weekday zip"
)
_IDS = frozenset(_ID_WORDS.split())
_QUANTITY_WORDS = (
    "age amount avg average count days hours length mean num number price rank rate rating ratio score size std stddev "
    "sum total year"
)
_QUANTITIES = frozenset(_QUANTITY_WORDS.split())
_JOINED_ID = re.compile(
    r".*(user|item|ad|movie|session|customer|campaign|group|site|app|device|shop)ids?", re.IGNORECASE
)
_TIMES = frozenset({"date", "datetime", "time", "timestamp", "ts"})
_EARLIEST = 1e8
"""Seconds since 1970 (or milliseconds, and so on) from which a number with such a name is a time: 1973."""
_CODED = re.compile(r"[Cc]\d+|cat\d+")


@dataclass(frozen=True)
class Choice:
    """What becomes of a column.

    Attributes:
        column: its name.
        role: a feature of either kind, or none.
        why: the reason, for a comment.
        settings: of the feature, besides its name; ``features`` of the schema knows them.
        categories: of a sparse feature: about how many.
    """

    column: str
    role: Literal["dense", "sparse", "out"]
    why: str
    settings: dict[str, Any] = field(default_factory=dict)
    categories: int = 0


def choose(facts: ColumnFacts, total_rows: int) -> Choice:
    """Decides on a column.

    Args:
        facts: from the first rows.
        total_rows: rows of the file.
    """
    return _left_out(facts) or _as_feature(facts, total_rows)


def _left_out(facts: ColumnFacts) -> Choice | None:
    """Columns that no model should read."""
    why = ""
    if facts.form == "other":
        why = f"of type {facts.kind}, which no feature reads"
    elif facts.form == "time" or _is_time(facts):
        why = "times: make features such as hour or weekday of them, or split by them (data.split.by: time)"
    elif facts.present == 0:
        why = "empty in every row"
    elif facts.distinct == 1 and not facts.missing:
        why = f"constant: {shown_text(facts.examples[0])} in every row" if facts.examples else "constant"
    elif facts.says_label:
        why = "each of its values goes with one label only: it says what is to be predicted"
    elif facts.form != "list" and _names_rows(facts):
        why = f"names the rows: {facts.distinct:,} different values in {facts.present:,} rows"
    elif facts.form == "text" and facts.length > FREE_TEXT:
        why = f"prose: {facts.length:.0f} characters a cell; make features of it first"
    return Choice(facts.name, "out", why) if why else None


def _names_rows(facts: ColumnFacts) -> bool:
    if facts.present < 50 or facts.distinct < UNIQUE_SHARE * facts.present:
        return False
    if facts.form != "number":
        return True
    return facts.whole and (facts.in_order or _is_id_name(facts.name) or facts.high > LARGEST_EXACT_FLOAT)


def _is_time(facts: ColumnFacts) -> bool:
    return facts.form == "number" and facts.low > _EARLIEST and not _TIMES.isdisjoint(_words(facts.name))


def _as_feature(facts: ColumnFacts, total_rows: int) -> Choice:
    if facts.form == "list":
        cut = {} if facts.separator is None else {"separator": facts.separator}
        how = "a list" if facts.separator is None else f"a list in text, cut at {facts.separator!r}"
        settings = {"multi_valued": True, **cut, "pooling": "mean"}
        return _sparse(facts, total_rows, f"{how} of {facts.length:.1f} values on average", settings)
    if facts.form != "number":
        return _sparse(facts, total_rows, "numbers that are names" if facts.form == "code" else "text", {})
    if reason := _why_codes(facts):
        return _sparse(facts, total_rows, reason, {})
    heavy = max(abs(facts.low), abs(facts.high)) > 100 * max(facts.typical, 1.0)
    numeric: dict[str, Any] = {"transform": "log" if heavy else "standardize"}
    if words := _missing_words(facts):
        numeric["missing_values"] = words
    why = f"numbers from {facts.low:g} to {facts.high:g}, typically {facts.typical:g}"
    return Choice(facts.name, "dense", why + (", with a long tail" if heavy else "") + _gaps(facts), numeric)


def _why_codes(facts: ColumnFacts) -> str:
    """Why a column of numbers holds categories; empty: it holds quantities."""
    if not facts.whole:
        return ""
    if facts.high > LARGEST_EXACT_FLOAT:
        return "whole numbers too large to be quantities"
    if facts.distinct <= FEW:
        return f"whole numbers of {facts.distinct} kinds"
    if _is_id_name(facts.name):
        return "whole numbers that the name calls ids"
    if facts.distinct >= FULL_RANGE and facts.distinct >= 0.5 * (facts.high - facts.low + 1):
        return "whole numbers that fill their range, as ids do"
    return ""


def _sparse(facts: ColumnFacts, total_rows: int, what: str, settings: dict[str, Any]) -> Choice:
    """Vocabulary or hash, by how many categories there will be."""
    values = max(1, facts.present) * max(1.0, facts.length if facts.form == "list" else 1.0)
    new_share = facts.distinct / values
    # Where nearly every value is new, the rows that were not looked at bring as many again; else few.
    growth = total_rows / max(1, facts.rows) if new_share > 0.1 else 1.0
    categories = int(facts.distinct * max(1.0, growth))
    settings = dict(settings)
    if categories > MAX_VOCABULARY:
        buckets = min(MAX_BUCKETS, 1 << (categories - 1).bit_length())
        settings |= {"encoding": "hash", "num_embeddings": buckets}
        how = "too many for a vocabulary, so hashed"
    else:
        min_count = 1 if new_share <= 0.05 or facts.distinct <= MANY else 2
        settings |= {"encoding": "vocabulary", "min_count": min_count}
        how = "" if min_count == 1 else "many of them rare, so those seen once share a row"
    if words := _missing_words(facts):
        settings["missing_values"] = words
    about = f"about {categories:,}" if growth > 1 else f"{categories:,}"
    why = f"{what}; {about} categories" + (f", {how}" if how else "") + _gaps(facts)
    return Choice(facts.name, "sparse", why, settings, categories)


def embedding_dim(choices: Sequence[Choice]) -> tuple[int, str]:
    """One dimension for all tables, and why."""
    most = max((choice.categories for choice in choices), default=0)
    dim = 8 if most <= 1_000 else 16 if most <= 100_000 else 32
    return dim, f"the largest table has about {most:,} categories"


@dataclass(frozen=True)
class Pace:
    """How training goes.

    Attributes:
        epochs: passes over the rows.
        batch_size: rows a step.
        log_every_steps: between two lines of the log, about twenty of which make an epoch.
        warmup_steps: of the learning rate.
    """

    epochs: int
    batch_size: int
    log_every_steps: int
    warmup_steps: int

    @classmethod
    def of(cls, rows: int) -> Pace:
        """For so many training rows."""
        sizes = ((2_000, 64), (20_000, 256), (200_000, 512), (2_000_000, 1024), (20_000_000, 4096))
        batch_size = next((size for most, size in sizes if rows <= most), 8192)
        steps = max(1, rows // batch_size)
        return cls(2 if rows <= 200_000 else 1, batch_size, max(1, steps // 20), min(500, steps // 10))


def with_a_category(choices: Sequence[Choice], facts: Sequence[ColumnFacts]) -> list[Choice]:
    """The choices, where a table is needed and none was chosen: the number of the fewest kinds becomes a category.

    Raises:
        UserError: there is no column to read.
    """
    if any(choice.role == "sparse" for choice in choices):
        return list(choices)
    dense = {choice.column for choice in choices if choice.role == "dense"}
    fewest = min((each for each in facts if each.name in dense), key=lambda each: each.distinct, default=None)
    if fewest is None:
        reasons = "; ".join(f"{choice.column!r} {choice.why}" for choice in choices[:5])
        raise UserError(f"FILE: no column is left to learn from: {reasons or 'there is only the label'}")
    settings = {"encoding": "vocabulary", "min_count": 2}
    why = f"a model needs one category: of the numbers this has the fewest kinds, {fewest.distinct:,}"
    chosen = Choice(fewest.name, "sparse", why, settings, fewest.distinct)
    return [chosen if choice.column == fewest.name else choice for choice in choices]


def _words(name: str) -> set[str]:
    """Words of a name, written with capitals, bars or other signs between them."""
    return {word.lower() for word in re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", name) if word}


def _is_id_name(name: str) -> bool:
    words = _words(name)
    if _CODED.fullmatch(name) or _JOINED_ID.fullmatch(name):
        return True
    return _QUANTITIES.isdisjoint(words) and not _IDS.isdisjoint(words)


def _missing_words(facts: ColumnFacts) -> list[str]:
    return [word for word in facts.missing_words if word in MISSING_WORDS]


def _gaps(facts: ColumnFacts) -> str:
    return f"; {facts.missing / facts.rows:.1%} missing" if facts.missing else ""
