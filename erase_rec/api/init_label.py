"""How a column says whether there was a click: 0 and 1, two words, or a rule that the user gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.cells import BadCellsError, BadColumnError, read_categories
from data.features.encoding import FIRST_ROW
from data.features.label import read_labels
from erase_rec.config.schema import LabelConfig
from erase_rec.errors import UserError

_YES = frozenset({"1", "true", "t", "yes", "y", "click", "clicked", "positive", "pos", "buy", "purchase"})
_SHOWN = 8


@dataclass(frozen=True)
class LabelChoice:
    """How the label is read.

    Attributes:
        rule: entries of ``data.label`` besides the column.
        why: the reason, for a comment.
        values: 0 or 1 [R].
    """

    rule: dict[str, Any]
    why: str
    values: npt.NDArray[np.uint8]


def choose_label(name: str, array: pa.Array, positive: Sequence[str], at_least: float | None) -> LabelChoice:
    """Finds out how a column says 0 and 1.

    Args:
        name: of the column.
        array: its cells.
        positive: values that are said to mean 1; empty: nothing is said.
        at_least: the threshold that is said; None: nothing is said.

    Raises:
        UserError: it is no click label, or all rows have the same one.
    """
    try:
        cells = read_categories(array)
    except BadColumnError as error:
        raise UserError(f"--label: column {name!r}: {error}") from None
    texts = cells.texts.to_pylist()
    if missing := int(np.count_nonzero(cells.values < FIRST_ROW)):
        raise UserError(
            f"--label: column {name!r}: {missing:,} of the first {len(array):,} rows have no label; remove them, or "
            "name another column"
        )
    counts = np.bincount(cells.values - FIRST_ROW, minlength=len(texts))
    found = Counter({text: int(count) for text, count in zip(texts, counts, strict=True) if count})
    rule, why = _label_rule(name, found, positive, at_least)
    try:
        values = read_labels(array, LabelConfig.model_validate(rule))
    except BadCellsError as error:
        raise UserError(f"--label: column {name!r}: {error}") from None
    clicks = int(values.sum())
    if clicks in (0, len(values)):
        raise UserError(
            f"--label: column {name!r}: all of the first {len(values):,} rows have label {int(clicks > 0)}, so there "
            "is nothing to learn; name another column or rule, or shuffle a file that is sorted by its label"
        )
    return LabelChoice(rule, f"{why}; {clicks / len(values):.4f} of the rows are 1", values)


def _label_rule(
    name: str, found: Counter[str], positive: Sequence[str], at_least: float | None
) -> tuple[dict[str, Any], str]:
    if positive and at_least is not None:
        raise UserError("--positive and --at-least: one rule makes the label; give one of them")
    if at_least is not None:
        return {"at_least": at_least}, "a threshold, as told"
    if positive:
        if absent := [value for value in positive if value not in found]:
            raise UserError(f"--positive: {absent[0]!r} is not in column {name!r}; it holds {_listed(found)}")
        return {"positive": list(positive)}, "which values mean a click, as told"
    numbers = {text: _number(text) for text in found}
    if all(number in (0, 1) for number in numbers.values()):
        return {}, "0 and 1 as they are"
    if len(found) != 2:
        example = sorted(found, key=lambda text: (numbers[text] is None, numbers[text] or 0.0, text))[-1]
        threshold = "--at-least NUMBER, or " if all(number is not None for number in numbers.values()) else ""
        raise UserError(
            f"--label: column {name!r} is no click label: expected 0 and 1, or two values, found {len(found):,}: "
            f"{_listed(found)}; say which mean a click: {threshold}--positive {example!r}"
        )
    one, other = _order(found, numbers)
    why = f"{one!r} means a click, {other!r} none"
    if numbers[one] is None and one.lower() not in _YES:
        why += " (taken from the rarer one: exchange them if that is wrong)"
    return {"positive": [one], "negative": [other]}, why


def _order(found: Counter[str], numbers: dict[str, float | None]) -> tuple[str, str]:
    """Of two values the one that means a click first: the greater number, a word that says yes, or the rarer one."""
    first, second = found
    a, b = numbers[first], numbers[second]
    if a is not None and b is not None:
        return (first, second) if a > b else (second, first)
    if (first.lower() in _YES) != (second.lower() in _YES):
        return (first, second) if first.lower() in _YES else (second, first)
    return (first, second) if found[first] <= found[second] else (second, first)


def _number(text: str) -> float | None:
    try:
        return float({"false": "0", "true": "1"}.get(text.lower(), text))
    except ValueError:
        return None


def _listed(found: Counter[str]) -> str:
    common = [f"{shown_text(text)} ({count:,} rows)" for text, count in found.most_common(_SHOWN)]
    return ", ".join(common) + (" ..." if len(found) > _SHOWN else "")


def shown_text(text: str) -> str:
    """A value for a message or a comment, shortened."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
