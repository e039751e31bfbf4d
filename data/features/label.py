"""The click label, from whatever a log calls it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.features.cells import BadCellError, read_categories, read_numbers
from data.features.encoding import IntArray
from erase_rec.config.schema import LabelConfig

LabelArray = npt.NDArray[np.uint8]

_BOOLEANS = {"false": "0", "true": "1"}
_WAY_OUT = "say what it means with data.label.positive, data.label.negative or data.label.at_least"
_UNDECIDED = 2


def read_labels(column: pa.ChunkedArray, config: LabelConfig) -> LabelArray:
    """Labels 0 and 1, uint8 [n]; without a rule in ``config`` the column must hold 0 and 1 (or false and true).

    Raises:
        BadCellError: a label is missing, or the rule does not say what it means.
        BadColumnError: the type holds no labels.
    """
    if config.at_least is not None:
        values = read_numbers(column)
        _refuse_missing(np.isnan(values))
        return (values >= config.at_least).astype(np.uint8)
    cells = read_categories(column)
    texts = cells.texts.to_pylist()
    meanings = np.array([_UNDECIDED if text is None else _meaning(text, config) for text in texts], dtype=np.uint8)
    _refuse_missing(cells.texts.is_null().to_numpy(zero_copy_only=False)[cells.codes])
    labels = meanings[cells.codes]
    _refuse_undecided(labels, cells.codes, texts, config)
    return labels


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


def _refuse_missing(missing: npt.NDArray[np.bool_]) -> None:
    if missing.any():
        raise BadCellError(int(missing.argmax()), "the label is missing; remove the row or give it a label")


def _refuse_undecided(labels: LabelArray, codes: IntArray, texts: list[str | None], config: LabelConfig) -> None:
    undecided = labels == _UNDECIDED
    if undecided.any():
        row = int(undecided.argmax())
        found = str(texts[codes[row]])[:80]
        listed = [*(config.positive or ()), *(config.negative or ())]
        expected = f"one of {', '.join(map(repr, listed))}" if listed else "0 or 1"
        raise BadCellError(row, f"found label {found!r}, expected {expected}; {_WAY_OUT}")
