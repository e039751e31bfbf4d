"""Whether a row is in training and in evaluation, or twice in one of them, by the column that names rows.

Ids are compared by 64-bit hashes of their texts, in sorted runs that may lie in files, a range of hashes at a time: so
memory is bounded whatever the number of rows. Different ids with one hash would be reported too; of 50 million rows
that happens with a probability of 1 in 15,000 (n ** 2 / 2 ** 65).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data.block import Rows
from data.errors import DataError
from data.features.encoding import IntArray
from data.features.hashing import HashArray
from data.sources.source import Split, Unit
from data.split import FILE_BITS, cell_hashes

EXAMPLES = 5
_BYTES_OF_A_ROW = 64
"""Memory that comparing a row takes, at most: hash, place, split, and what sorting needs."""
_NOTABLE = 1e-6
"""Probability of a chance match from which on a message says it."""


@dataclass(frozen=True)
class IdRun:
    """Ids of rows of one split, ascending by hash.

    Attributes:
        split: the side that the rows are on.
        hashes: uint64 [R].
        places: int64 [R], position of the row's file times 2 ** 40, plus its 1-based line or row number.
        missing: rows without an id, which are not among the R.
    """

    split: Split
    hashes: HashArray
    places: IntArray
    missing: int

    @classmethod
    def of(cls, split: Split, column: pa.Array, rows: Rows, file: int) -> Self:
        """The ids of rows of one file.

        Args:
            split: the side that they are on.
            column: the ids.
            rows: where they came from.
            file: position of their file.

        Raises:
            BadColumnError: the type holds no ids.
        """
        hashes, places = cell_hashes(column), (np.int64(file) << FILE_BITS) + rows.numbers
        present = hashes != cell_hashes(pa.array([""]))[0]
        return cls.joined(split, [cls(split, hashes[present], places[present], int((~present).sum()))])

    @classmethod
    def joined(cls, split: Split, runs: Sequence[IdRun]) -> Self:
        """One run of several."""
        hashes = np.concatenate([run.hashes for run in runs])
        order = np.argsort(hashes, kind="stable")
        places = np.concatenate([run.places for run in runs])
        return cls(split, hashes[order], places[order], sum(run.missing for run in runs))

    def write(self, path: Path) -> None:
        """Writes hashes and places to an .npy file; the caller keeps the rest."""
        with path.open("wb") as stream:
            np.save(stream, np.stack([self.hashes, self.places.view(np.uint64)]))

    @classmethod
    def read(cls, path: Path, split: Split, missing: int) -> Self:
        """Memory-maps what :meth:`write` wrote."""
        both = np.load(path, mmap_mode="r")
        return cls(split, both[0], both[1].view(np.int64), missing)


@dataclass
class Repeats:
    """Rows with the same id.

    Attributes:
        rows: rows that were compared.
        missing: rows without an id.
        leaked: held-out rows whose id a training row has.
        repeated: rows whose id another row before them has, by split.
        leaks: places of a training and of a held-out row with the same id, the first ``EXAMPLES`` of them.
        doubles: places of two rows of a split with the same id, likewise.
    """

    rows: int = 0
    missing: int = 0
    leaked: int = 0
    repeated: dict[Split, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    leaks: list[tuple[int, int]] = field(default_factory=list)
    doubles: list[tuple[int, int]] = field(default_factory=list)

    def refuse_leaks(self, column: str, files: Sequence[str], unit: Unit) -> None:
        """Ends here where rows are on both sides of the split.

        Args:
            column: ``data.row_id``.
            files: names of the files by position.
            unit: what numbers count.

        Raises:
            DataError: says how many there are, and where some of them stand.
        """
        if not self.leaked:
            return
        examples = ", ".join(_pair(*pair, files, unit) for pair in self.leaks)
        raise DataError(
            f"data.row_id: {self.leaked:,} held-out rows have an id (column {column!r}) that a training row has too, "
            f"such as {examples}{self._doubt()}; a model would be evaluated on rows that it learned. Remove the rows "
            f"from one side, keep equal ids together (data.split.by=hash data.split.column={column}), or leave "
            "data.row_id out if it does not name rows"
        )

    def remarks(self, column: str, files: Sequence[str], unit: Unit) -> list[str]:
        """What a user should know, a line each."""
        lines = []
        if any(self.repeated.values()):
            counts = " and ".join(f"{count:,} {split} rows" for split, count in self.repeated.items() if count)
            lines.append(
                f"data.row_id: {counts} repeat an id of column {column!r}, such as "
                f"{', '.join(_pair(*pair, files, unit) for pair in self.doubles)}{self._doubt()}"
            )
        if self.missing:
            lines.append(f"data.row_id: {self.missing:,} rows have no id in column {column!r} and were not compared")
        return lines

    def _doubt(self) -> str:
        chance = self.rows**2 / 2**65
        return "" if chance < _NOTABLE else f" (by 64-bit hashes; of so many rows a chance match has {chance:.0e})"


def find_repeats(runs: Sequence[IdRun], memory_bytes: int) -> Repeats:
    """Compares the rows of all runs.

    Args:
        runs: any number, each ascending by hash.
        memory_bytes: about as much is used.
    """
    found = Repeats(rows=sum(len(run.hashes) for run in runs), missing=sum(run.missing for run in runs))
    passes = max(1, -(-found.rows * _BYTES_OF_A_ROW // memory_bytes))
    for hashes, places, is_eval in _ranges(runs, passes):
        _compare(hashes, places, is_eval, found)
    return found


def _ranges(runs: Sequence[IdRun], passes: int) -> Iterator[tuple[HashArray, IntArray, npt.NDArray[np.bool_]]]:
    """All rows with a hash in one of ``passes`` equal ranges after the other, ascending by hash, then by place."""
    bounds = [(number << 64) // passes for number in range(passes + 1)]
    starts = [0] * len(runs)
    for stop in bounds[1:]:
        ends = [
            len(run.hashes) if stop == 1 << 64 else int(np.searchsorted(run.hashes, np.uint64(stop))) for run in runs
        ]
        parts = list(zip(runs, starts, ends, strict=True))
        hashes = np.concatenate([run.hashes[start:end] for run, start, end in parts] or [np.empty(0, np.uint64)])
        places = np.concatenate([run.places[start:end] for run, start, end in parts] or [np.empty(0, np.int64)])
        is_eval = np.repeat([run.split == "eval" for run in runs], [end - start for _, start, end in parts])
        order = np.lexsort((places, hashes))
        yield hashes[order], places[order], is_eval.astype(np.bool_)[order]
        starts = ends


def _compare(hashes: HashArray, places: IntArray, is_eval: npt.NDArray[np.bool_], found: Repeats) -> None:
    """Adds what rows ascending by hash, then by place, say."""
    same = hashes[1:] == hashes[:-1]
    if not same.any():
        return
    among = np.zeros(len(hashes), dtype=np.bool_)
    among[1:] |= same
    among[:-1] |= same
    places, is_eval = places[among], is_eval[among]
    group = np.unique(hashes[among], return_inverse=True)[1]
    trains, evals = np.bincount(group[~is_eval], minlength=group[-1] + 1), np.bincount(group[is_eval])
    evals = np.pad(evals, (0, len(trains) - len(evals)))
    found.repeated["train"] += int(np.maximum(trains - 1, 0).sum())
    found.repeated["eval"] += int(np.maximum(evals - 1, 0).sum())
    found.leaked += int(evals[trains > 0].sum())
    first_train, first_eval = _first_places(group, places, ~is_eval), _first_places(group, places, is_eval)
    leaking = (trains > 0) & (evals > 0)
    found.leaks = _smallest(found.leaks, first_train[leaking], first_eval[leaking])
    by_side = np.lexsort((places, is_eval, group))
    group, places, is_eval = group[by_side], places[by_side], is_eval[by_side]
    double = (group[1:] == group[:-1]) & (is_eval[1:] == is_eval[:-1])
    found.doubles = _smallest(found.doubles, places[:-1][double], places[1:][double])


def _first_places(group: IntArray, places: IntArray, where: npt.NDArray[np.bool_]) -> IntArray:
    """The first place of each group among the rows at ``where``; anything for a group without one."""
    first = np.zeros(int(group[-1]) + 1, dtype=np.int64)
    found, at = np.unique(group[where], return_index=True)
    first[found] = places[where][at]
    return first


def _smallest(pairs: list[tuple[int, int]], first: IntArray, second: IntArray) -> list[tuple[int, int]]:
    """The first ``EXAMPLES`` pairs of those given and of more."""
    order = np.lexsort((second, first))[:EXAMPLES]
    return sorted([*pairs, *zip(first[order].tolist(), second[order].tolist(), strict=True)])[:EXAMPLES]


def _pair(first: int, second: int, files: Sequence[str], unit: Unit) -> str:
    return f"{_place(first, files, unit)} and {_place(second, files, unit)}"


def _place(place: int, files: Sequence[str], unit: Unit) -> str:
    number = place & ((1 << FILE_BITS) - 1)
    return Rows(files[place >> FILE_BITS], unit, np.array([number])).place(0)
