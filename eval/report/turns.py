"""Speeds of arms that took turns in one process, from the JSON file of ``erase-rec bench``: a report's QPS.

Runs of a sweep may share a machine (``--jobs``), which says nothing of their NE and makes their speeds worthless.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError

from erase_rec.errors import UserError


@dataclass(frozen=True)
class Turns:
    """Turns of the arms at one batch size.

    Attributes:
        path: the file.
        qps_p90: rows a second of each turn (90th percentile over its steps) by arm; the k-th turns of all arms lie side
            by side in time.
        twin: the first arm and the turns of its second build, the A/A pair.
        refused: why an arm was not timed.
        about: machine and commit, ready to be printed.
        command: that timed them.
    """

    path: Path
    qps_p90: Mapping[str, Mapping[int, float]]
    twin: tuple[str, Mapping[int, float]] | None
    refused: Mapping[str, str]
    about: Mapping[str, str]
    command: str

    def of(self, arm: str, *, is_twin_of: str | None = None) -> Mapping[int, float]:
        """Turns of an arm; one that is the configuration of the first arm again has those of its second build."""
        if arm not in self.qps_p90 and self.twin is not None and is_twin_of == self.twin[0]:
            return self.twin[1]
        return self.qps_p90.get(arm, {})


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True)

    arm: str
    repeats: str | None
    batch: PositiveInt
    ranks: PositiveInt
    refused: str | None
    turns_qps_p90: tuple[FiniteFloat, ...]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)

    device: str
    commit: str
    date: str
    command: str
    rows: tuple[_Row, ...]


def read_turns(path: Path, global_batch: int) -> Turns:
    """Reads what was timed at the batch size of the runs.

    Args:
        path: of ``erase-rec bench --out``.
        global_batch: rows of a step over all ranks.

    Raises:
        UserError: it cannot be read, is no such file, or has no rows of that batch size.
    """
    try:
        file = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"--bench: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of JSON, of its encoding, and of pydantic
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        why = error if first is None else f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"--bench: {path} is not what erase-rec bench --out writes ({why})") from error
    here = [row for row in file.rows if row.batch * row.ranks == global_batch]
    if not here:
        sizes = ", ".join(f"{size:,}" for size in dict.fromkeys(row.batch * row.ranks for row in file.rows)) or "none"
        raise UserError(
            f"--bench: {path} has no rows of the runs' global batch size, {global_batch:,} (there are: {sizes}); "
            f"time it with erase-rec bench --batch {global_batch}"
        )
    turns = {row.arm: dict(enumerate(row.turns_qps_p90)) for row in here if row.refused is None}
    twin = next(((row.repeats, turns.pop(row.arm)) for row in here if row.repeats and row.arm in turns), None)
    return Turns(
        path,
        turns,
        twin,
        {row.arm: row.refused for row in here if row.refused is not None},
        {"QPS measured on": file.device, "QPS measured at": f"{file.commit}, {file.date}"},
        file.command,
    )
