"""The click label, from whatever a log calls it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.cells import BadCellsError, is_plain_text, read_categories, read_numbers, shown, text_bytes
from data.features.encoding import FIRST_ROW
from data.text_views import views_of
from erase_rec.config.schema import LabelConfig

LabelArray = npt.NDArray[np.uint8]

_BOOLEANS = {"false": "0", "true": "1"}
_WAY_OUT = "say what it means with data.label.positive, data.label.negative or data.label.at_least"
_MISSING = "the label is missing; remove the row or give it a label"
_UNDECIDED = 2


def read_labels(array: pa.Array, config: LabelConfig) -> LabelArray:
    """Labels 0 and 1, uint8 [n]; without a rule in ``config`` the column must hold 0 and 1 (or false and true).

    Raises:
        BadCellsError: labels that are missing, or that the rule gives no meaning; all of them, or all that are no
            numbers where the rule needs numbers.
        BadColumnError: the type holds no labels.
    """
    if config.at_least is not None:
        values = read_numbers(array)
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            raise BadCellsError(missing, [_MISSING] * len(missing))
        return (values >= config.at_least).astype(np.uint8)
    if config.positive is None and (digits := _digits(array)) is not None:
        return digits
    cells = read_categories(array)
    texts = cells.texts.to_pylist()
    meanings = [_UNDECIDED] * FIRST_ROW + [_meaning(text, config) for text in texts]
    labels = np.array(meanings, dtype=np.uint8)[cells.values]
    undecided = np.flatnonzero(labels == _UNDECIDED)
    if len(undecided):
        codes = (cells.values[undecided] - FIRST_ROW).tolist()
        raise BadCellsError(undecided, [_MISSING if code < 0 else _refusal(texts[code], config) for code in codes])
    return labels


def _digits(array: pa.Array) -> LabelArray | None:
    """The labels where each is one character, 0 or 1, as nearly always; None: look closer."""
    if (views := views_of(array)) is not None:
        if not (views["length"] == 1).all():
            return None
        digits = views["head"].astype(np.uint8) - np.uint8(ord("0"))
        return digits if (digits <= 1).all() else None
    if not is_plain_text(array.type) or array.null_count:
        return None
    offsets, content = text_bytes(array)
    if not (offsets[1:] - offsets[:-1] == 1).all():
        return None
    digits = content[int(offsets[0]) : int(offsets[-1])] - np.uint8(ord("0"))
    return digits if (digits <= 1).all() else None


def _meaning(text: str, config: LabelConfig) -> int:
    if config.positive is None:
        try:
            number = float(_BOOLEANS.get(text.lower(), text))
        except ValueError:
            return _UNDECIDED
        return int(number) if number in (0, 1) else _UNDECIDED
    if text in config.positive:
        return 1
    return 0 if config.negative is None or text in config.negative else _UNDECIDED


def _refusal(found: str, config: LabelConfig) -> str:
    listed = [*(config.positive or ()), *(config.negative or ())]
    expected = f"one of {', '.join(map(repr, listed))}" if listed else "0 or 1"
    return f"found label {shown(found)!r}, expected {expected}; {_WAY_OUT}"
