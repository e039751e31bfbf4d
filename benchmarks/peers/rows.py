"""What every peer is given and how it is judged: encoded rows from files, NE and AUC, the end of training.

Needs NumPy alone, as it is imported in the peers' own environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PARTS = ("train", "valid", "test")
SMALLEST = 1e-7
"""Predictions are kept this far from 0 and 1, as float32 holds them: else one row could make NE infinite."""


@dataclass(frozen=True)
class Fields:
    """The columns of a set.

    Attributes:
        dense: names of numbers.
        tables: rows of each single-valued category's table, in the order of :attr:`Part.ids`' columns.
        bags: rows of the table and longest bag of each multi-valued category.
        dim: of the embeddings.
        batch_size: rows a step.
        epochs: at most so many.
        eval_every_steps: steps between evaluations on the validation rows.
        patience: evaluations in a row without a better one that end training.
    """

    dense: tuple[str, ...]
    tables: dict[str, int]
    bags: dict[str, tuple[int, int]]
    dim: int
    batch_size: int
    epochs: int
    eval_every_steps: int
    patience: int


@dataclass(frozen=True)
class Part:
    """R rows of a set.

    Attributes:
        dense: float32 [R, N].
        ids: int32 [R, S], table rows.
        bags: by name int32 [R, longest], table row + 1, and 0 after the last of a row.
        label: float32 [R], 0 or 1.
    """

    dense: Array
    ids: Array
    bags: dict[str, Array]
    label: Array

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.label)

    def take(self, rows: Array | slice) -> Part:
        """Some of its rows."""
        bags = {name: ids[rows] for name, ids in self.bags.items()}
        return Part(self.dense[rows], self.ids[rows], bags, self.label[rows])


def write_part(file: Path, part: Part) -> None:
    """As :func:`read_part` reads it."""
    bags = {f"bag.{name}": ids for name, ids in part.bags.items()}
    np.savez(file, dense=part.dense, ids=part.ids, label=part.label, **bags)


def read_part(file: Path) -> Part:
    """Reads what :func:`write_part` wrote."""
    with np.load(file) as found:
        bags = {name.removeprefix("bag."): found[name] for name in found.files if name.startswith("bag.")}
        return Part(found["dense"], found["ids"], bags, found["label"])


def read_fields(folder: Path) -> Fields:
    """The columns of the set in ``folder``."""
    found = json.loads((folder / "fields.json").read_text(encoding="utf-8"))
    bags = {name: (rows, longest) for name, (rows, longest) in found.pop("bags").items()}
    return Fields(dense=tuple(found.pop("dense")), bags=bags, **found)


def normalized_entropy(label: Array, prediction: Array) -> float:
    """Cross-entropy over that of the label rate of the same rows.

    Args:
        label: [R], 0 or 1.
        prediction: [R], probabilities.
    """
    p = np.clip(prediction.reshape(-1).astype(np.float64), SMALLEST, 1 - SMALLEST)
    y, rate = label.astype(np.float64), float(label.astype(np.float64).mean())
    cross_entropy = -np.mean(y * np.log(p) + (1 - y) * np.log1p(-p))
    return float(cross_entropy / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def area_under_curve(label: Array, prediction: Array) -> float:
    """Share of pairs of a click and no click in which the click has the higher prediction; a tie is half.

    Args:
        label: [R], 0 or 1.
        prediction: [R].
    """
    _, position, counts = np.unique(prediction.reshape(-1), return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    clicked = label.astype(bool)
    clicks, others = int(clicked.sum()), int((~clicked).sum())
    return float((rank[position][clicked].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


@dataclass
class Setting:
    """What a run of a peer may choose.

    Attributes:
        seed: of weights and of the rows' order.
        dense_lr: Adam's rate for all but the tables.
        table_optimizer: of the tables: ``adam``, ``adagrad`` or ``rowwise_adagrad``.
        table_lr: its rate.
        dropout: share of hidden units.
    """

    seed: int
    dense_lr: float
    table_optimizer: str
    table_lr: float
    dropout: float = 0.0


class Watch:
    """Evaluates on validation rows now and then, and says when to stop.

    Attributes:
        ne: validation NE after each evaluation.
        test_ne: of the test rows where the validation NE was best; None without test rows.
        test_auc: likewise.
    """

    def __init__(self, valid: Part, test: Part | None, patience: int) -> None:
        """Test rows are predicted where validation is at its best, and choose nothing."""
        self.ne: list[float] = []
        self.test_ne: float | None = None
        self.test_auc: float | None = None
        self._valid, self._test, self._patience = valid, test, patience

    @property
    def best(self) -> int:
        """The evaluation with the lowest NE, from 1."""
        return int(np.argmin(self.ne)) + 1

    def stops(self, predict: Callable[[Part], Array]) -> bool:
        """Evaluates; whether training is to end.

        Args:
            predict: probabilities [R] of rows.
        """
        ne = normalized_entropy(self._valid.label, predict(self._valid))
        self.ne.append(ne if np.isfinite(ne) else np.inf)
        if self.best == len(self.ne) and self._test is not None:
            prediction = predict(self._test)
            self.test_ne = normalized_entropy(self._test.label, prediction)
            self.test_auc = area_under_curve(self._test.label, prediction)
        return len(self.ne) - self.best >= self._patience
