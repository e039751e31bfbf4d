"""An export, ready to score raw rows: the readers and transforms of training, and the exported program.

Of erase-rec it uses the data's readers (``data``) and the export's description; neither models nor trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data.bad_rows import BadRows
from data.errors import DataError
from data.features.columns import column_of, columns_of, features_of
from data.features.read import read_rows
from data.sources.source import consecutive
from erase_rec.cli.export_folder import AOT, PROGRAM, ExportFolder
from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.config.schema import LabelConfig, SparseFeatureConfig

Row = Mapping[str, Any]

_LABEL = "\0label"
"""Stands for the label's column, which the readers ask for; no row can have a column of that name."""
_SHOWN = 40
_NO_COLUMN = (pa.ArrowException, OverflowError, UnicodeError)
"""Arrow's errors for values that make no column."""


class RowError(ValueError):
    """Rows that cannot be read; names the first row, its column, and what was expected."""


@dataclass(frozen=True)
class Predictions:
    """Of the rows of a request, in their order: probability of a click, and logit."""

    probabilities: list[float]
    logits: list[float]


class Scorer:
    """Scores rows, each a dictionary from column to value; one call at a time.

    Attributes:
        folder: the export.
        columns: columns that the features read; others are not looked at.
    """

    def __init__(self, folder: ExportFolder) -> None:
        """Loads the program: the compiled one where the export has it."""
        self.folder = folder
        config = folder.features.config
        self.columns = columns_of(*features_of(config))
        bags = [feature for feature in config.sparse if feature.multi_valued]
        self._list_columns = {column for feature in bags for column in _columns_of(feature)}
        name = AOT if folder.has(AOT) else PROGRAM
        if name == AOT:
            self._program = torch._inductor.aoti_load_package(str(folder.path / name))
        else:
            self._program = torch.export.load(folder.path / name).module(check_guards=False)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens an export.

        Raises:
            UserError: it is none, or damaged.
        """
        return cls(ExportFolder.open(path))

    def refuse_malformed(self, rows: Sequence[object]) -> None:
        """Looks at the form of a request's rows, so that what is scored together with others has that form.

        Raises:
            RowError: a row is no object, a column is not there, or a value is of a type that no feature has.
        """
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise RowError(f"row {number}: found {_kind(row)}, expected an object with a value for each column")
            for column in self.columns:
                if column not in row:
                    raise RowError(f"row {number}: column {column!r} is not there; send null where a value is missing")
                self._refuse_value(number, column, row[column])

    def score(self, requests: Sequence[Sequence[Row]]) -> list[Predictions | RowError]:
        """Scores the rows of several requests at once; they passed :meth:`refuse_malformed`.

        Returns:
            What each request gets: predictions of all its rows, or what is wrong with one of them.
        """
        joined = [row for rows in requests for row in rows]
        try:
            found = self._score(joined)
        except RowError as error:
            # Of one of the requests, or because two of them have different types in a column.
            return [error] if len(requests) == 1 else [self.score([rows])[0] for rows in requests]
        answers: list[Predictions | RowError] = []
        start = 0
        for rows in requests:
            answers.append(found.of(start, len(rows)))
            start += len(rows)
        return answers

    def _refuse_value(self, number: int, column: str, value: object) -> None:
        cells = value if isinstance(value, list) and column in self._list_columns else [value]
        for cell in cells:
            if cell is not None and not isinstance(cell, str | int | float):
                expected = "text, a number, true, false or null"
                more = ", or a list of these" if column in self._list_columns else ""
                raise RowError(f"row {number}: column {column!r}: found {_kind(cell)}, expected {expected}{more}")

    def _score(self, rows: Sequence[Row]) -> _Scored:
        table = pa.table({column: _array(column, rows) for column in self.columns})
        label = pa.array(np.zeros(len(rows), dtype=np.uint8))
        block = consecutive(
            table.append_column(_LABEL, label), file="request", file_index=0, unit="row", first_row=0, first_number=0
        )
        features, bad = self.folder.features, BadRows("skip")
        try:
            raw = read_rows(features.config, _LABEL, LabelConfig(), block, bad)
        except DataError as error:  # a column whose type cannot be read, in all rows
            raise RowError(f"all rows: {str(error).removeprefix('request: ')}") from error
        refused = {row.number: f"column {row.column!r}: {row.reason}" for row in reversed(bad.rows)}
        positions = raw.row_numbers.tolist()
        if not positions:
            return _Scored(refused, {}, [], [])
        inputs = ModelInputs.of(features.encode(raw))
        probability, logit = self._run(inputs)
        places = {position: place for place, position in enumerate(positions)}
        return _Scored(refused, places, probability.tolist(), logit.tolist())

    def _run(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            probability, logit = self._program(*inputs.arguments())
        return probability, logit


@dataclass(frozen=True)
class _Scored:
    """Some rows after scoring: what is wrong with the bad ones, and where the predictions of the others are."""

    refused: Mapping[int, str]
    places: Mapping[int, int]
    probabilities: Sequence[float]
    logits: Sequence[float]

    def of(self, start: int, count: int) -> Predictions | RowError:
        """What the request of rows ``start`` to ``start + count`` - 1 gets."""
        for position in range(start, start + count):
            if position in self.refused:
                return RowError(f"row {position - start}: {self.refused[position]}")
        at = [self.places[position] for position in range(start, start + count)]
        for number, place in enumerate(at):
            if not math.isfinite(self.logits[place]):  # which JSON could not say
                return RowError(f"row {number}: its logit is {self.logits[place]}; send smaller numbers")
        return Predictions([self.probabilities[place] for place in at], [self.logits[place] for place in at])


def _columns_of(feature: SparseFeatureConfig) -> list[str]:
    return [column_of(feature), *([] if feature.weights is None else [feature.weights])]


def _array(column: str, rows: Sequence[Row]) -> pa.Array:
    """A column of the rows.

    Raises:
        RowError: a value fits into no column, or not into one with the others.
    """
    values = [row[column] for row in rows]
    try:
        return pa.array(values)
    except _NO_COLUMN:
        pass
    # All values up to the first bad one make a column.
    for position in range(len(values)):
        if not _is_column(values[: position + 1]):
            value, before = values[position], next((value for value in values if value is not None), None)
            found = f"{_kind(value)} {str(value)[:_SHOWN]!r}"
            if _is_column([value]):
                expected = f"{_kind(before)} as in the rows before; send one type a column"
            else:
                expected = "a number of 64 bits, or valid text"
            raise RowError(f"row {position}: column {column!r}: found {found}, expected {expected}")
    raise AssertionError("the whole cannot be worse than its parts")


def _is_column(values: Sequence[object]) -> bool:
    try:
        pa.array(values)
    except _NO_COLUMN:
        return False
    return True


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
