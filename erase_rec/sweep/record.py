"""``sweep.json``: the points of a sweep and what became of each. Read by ``erase-rec report``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from erase_rec.errors import UserError
from erase_rec.sweep.points import Point

SWEEP_FILE = "sweep.json"

Status = Literal["pending", "running", "finished", "failed"]


class PointRecord(BaseModel):
    """A point and its state, which changes as the sweep goes on."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    id: str
    arm: str
    seed: int
    overrides: tuple[str, ...]
    """All that the base is changed by, the seed too: ``erase-rec train --config CONFIG OVERRIDES`` is this run."""
    folder: str
    """Run folder, relative to the sweep's; its log is beside it, with ``.log`` behind the name."""
    status: Status = "pending"
    reason: str | None = None
    """Why it failed, in one line."""
    seconds: Annotated[float, Field(ge=0)] | None = None
    """Wall time of all its processes; None where none has ended."""


class SweepRecord(BaseModel):
    """A whole ``sweep.json``."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    name: str
    config: str
    command: str
    points: tuple[PointRecord, ...]

    def write(self, folder: Path) -> None:
        """Writes ``sweep.json`` atomically: a reader sees the old one or the new one."""
        path = folder / SWEEP_FILE
        partial = path.with_name(f"{SWEEP_FILE}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The record of an earlier call; None where there was none.

        Raises:
            UserError: the file is no such record.
        """
        path = folder / SWEEP_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValidationError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is no record of a sweep; remove it, or choose another --out") from error

    @classmethod
    def of(cls, points: Sequence[Point], folder: Path, *, name: str, config: str, command: str) -> Self:
        """The record of these points as ``folder`` shows them: what ran in an earlier call, and what is left.

        Raises:
            UserError: ``folder`` holds a ``sweep.json`` that is none.
        """
        before = cls.read(folder)
        known = {} if before is None else {point.id: point for point in before.points}
        records = []
        for point in points:
            record = PointRecord(
                id=point.id, arm=point.arm, seed=point.seed, overrides=point.overrides, folder=f"points/{point.id}"
            )
            if point.id in known:
                record.seconds = known[point.id].seconds
            if point.id in known and known[point.id].status == "failed":
                record.status, record.reason = "failed", known[point.id].reason
            elif has_finished(folder / record.folder):
                record.status = "finished"
            records.append(record)
        return cls(name=name, config=config, command=command, points=tuple(records))


def has_finished(run: Path) -> bool:
    """Whether the run in folder ``run`` came to its end. Reads only the status, so that no torch is loaded for it."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(summary, dict) and summary.get("status") in {"completed", "stopped_early"}
