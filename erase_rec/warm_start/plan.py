"""Decides what a model takes from a checkpoint: by whole tower, over-arch and table, and of tables by row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from erase_rec.errors import UserError
from erase_rec.warm_start.names import TABLES, Renaming, is_state, unit_of

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


NO_STATES = "train.init_from.optimizer is false"
"""Why the state of an optimizer starts anew."""
STATES_GROUP = "optimizer states"
SHOWN_UNITS = 12
"""Units that a line of :meth:`WarmPlan.text` names; the file names all tensors."""


@dataclass(frozen=True)
class Rows:
    """Which row of a checkpoint's table each row of a model's table takes.

    Attributes:
        source: int64 [rows of the model's table], -1: none, it is initialised. None: the row of the same number, as
            far as both have it.
        problem: why the rows cannot be told; None: they can.
    """

    source: Tensor | None = None
    problem: str | None = None

    def taken(self, there: int, here: int) -> int:
        """How many of ``here`` rows come from a table of ``there`` rows."""
        return min(there, here) if self.source is None else int((self.source >= 0).sum())


@dataclass(frozen=True)
class Taken:
    """A tensor that is filled from a checkpoint.

    Attributes:
        stored: its name there.
        rows: of a table, or of the state of each of its rows; None: it is taken as it is.
    """

    stored: str
    rows: Rows | None = None


@dataclass
class WarmPlan:
    """What becomes of every tensor of the model and of the checkpoint.

    Attributes:
        taken: by the model's name.
        initialised: why a tensor of the model starts anew, by name.
        ignored: why a tensor of the checkpoint goes nowhere, by name there.
        sentences: of each table with rows of its own, by unit.
    """

    taken: dict[str, Taken] = field(default_factory=dict)
    initialised: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)

    def text(self, checkpoint: Path) -> str:
        """For people: units with the same fate in one line, so that each is named once."""
        lines: dict[str, list[str]] = {}

        def add(names: Iterable[tuple[str, str]]) -> None:
            for unit, fate in dict.fromkeys(names):
                lines.setdefault(fate, []).append(unit)

        add((_group(name), f"taken{self.sentences.get(_group(name), '')}") for name in self.taken if not is_state(name))
        add((STATES_GROUP, "taken") for name in self.taken if is_state(name))
        add((_group(name, why), f"initialised: {why}") for name, why in self.initialised.items())
        add((_group(name, why), f"ignored: {why}") for name, why in self.ignored.items())
        return "\n".join(
            [f"starts from {checkpoint}", *(f"  {_listed(units)}: {fate}" for fate, units in lines.items())]
        )

    def write(self, path: Path, checkpoint: Path) -> None:
        """Every tensor's fate as JSON."""
        taken = {name: {"from": entry.stored, "rows": _how(entry)} for name, entry in self.taken.items()}
        content = {
            "checkpoint": str(checkpoint),
            "taken": taken,
            "initialised": self.initialised,
            "ignored": self.ignored,
            "tables": {unit.removeprefix(TABLES): sentence.strip() for unit, sentence in self.sentences.items()},
        }
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(units: Sequence[str]) -> str:
    """Units, the first of many of them."""
    more = len(units) - SHOWN_UNITS
    return ", ".join(units) if more <= 1 else f"{', '.join(units[:SHOWN_UNITS])} and {more} more"


def _group(name: str, why: str = "") -> str:
    """What a tensor is shown as part of: a state that shares its unit's fate as part of that."""
    return STATES_GROUP if is_state(name) and why == NO_STATES else unit_of(name) or name.partition("/")[0]


def _how(entry: Taken) -> str:
    if entry.rows is None:
        return "all"
    return "by number" if entry.rows.source is None else "by key"


def warm_plan(
    stored: Layout,
    wanted: Layout,
    renaming: Renaming,
    *,
    rows: Mapping[str, Rows],
    changed: Mapping[str, str],
    with_states: bool,
    may_initialise: bool,
) -> WarmPlan:
    """Plans a warm start.

    Args:
        stored: the tensors of the checkpoint.
        wanted: those of the model and its optimizers.
        renaming: what the former are called in the latter.
        rows: how rows of tables correspond, by unit of the model.
        changed: why a unit of the model means something else than there, although shapes may fit, by unit.
        with_states: take over optimizer states, too.
        may_initialise: what does not fit is initialised; else it is an error.

    Raises:
        UserError: something of the model is not in the checkpoint or does not fit, all of it at once.
    """
    plan = WarmPlan()
    here = {renaming(name): name for name in stored if unit_of(name) is not None}
    problems: dict[str, str] = {}
    for unit, names in _by_unit(wanted).items():
        values = [name for name in names if not is_state(name)]
        problem = changed.get(unit) or _misfit(unit, values, stored, wanted, here, rows.get(unit))
        if problem is None and with_states:
            problem = _states_misfit([name for name in names if is_state(name)], stored, wanted, here, rows.get(unit))
        if problem is not None:
            problems[unit] = problem
        for name in names:
            if problem is not None:
                plan.initialised[name] = problem
            elif is_state(name) and not with_states:
                plan.initialised[name] = NO_STATES
            else:
                plan.taken[name] = Taken(here[name], rows.get(unit) if wanted[name][0] else None)
        if problem is None and unit in rows:
            plan.sentences[unit] = _sentence(rows[unit], stored[here[unit]][0][0], wanted[unit][0][0])
    if problems and not may_initialise:
        listed = "".join(f"\n  - {unit}: {problem}" for unit, problem in problems.items())
        raise UserError(
            f"train.init_from: the checkpoint does not fit this model:{listed}\n"
            "say in train.init_from.rename what it is called there, or initialise such parts with "
            "train.init_from.missing=init"
        )
    used = {entry.stored for entry in plan.taken.values()}
    for name in sorted(stored.keys() - used):
        now = unit_of(renaming(name)) if unit_of(name) is not None else None
        if now is None:
            plan.ignored[name] = "of the other run, not of its model"
        elif now in problems:
            plan.ignored[name] = f"does not fit {now}"
        elif is_state(name) and not with_states:
            plan.ignored[name] = NO_STATES
        else:
            plan.ignored[name] = "this model has no such part"
    return plan


def _by_unit(names: Iterable[str]) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    for name in names:
        unit = unit_of(name)
        assert unit is not None
        units.setdefault(unit, []).append(name)
    return units


def _misfit(
    unit: str,
    names: Sequence[str],
    stored: Layout,
    wanted: Layout,
    here: Mapping[str, str],
    rows: Rows | None,
) -> str | None:
    """Why a unit cannot be taken; None: it can."""
    there = [name for name in here if unit_of(name) == unit and not is_state(name)]
    if not there:
        return "the checkpoint has none"
    if rows is not None and rows.problem is not None:
        return rows.problem
    if missing := sorted(set(names) - set(there)):
        return f"the checkpoint lacks {missing[0]}{_more(missing)}"
    if beyond := sorted(set(there) - set(names)):
        return f"the checkpoint also has {here[beyond[0]]}{_more(beyond)}"
    return _differing(names, stored, wanted, here, rows)


def _states_misfit(
    names: Sequence[str], stored: Layout, wanted: Layout, here: Mapping[str, str], rows: Rows | None
) -> str | None:
    if missing := sorted(name for name in names if name not in here):
        return f"the checkpoint lacks the optimizer state {missing[0]}{_more(missing)}"
    return _differing(names, stored, wanted, here, rows)


def _differing(
    names: Sequence[str], stored: Layout, wanted: Layout, here: Mapping[str, str], rows: Rows | None
) -> str | None:
    for name in names:
        (there, dtype_there), (now, dtype_now) = stored[here[name]], wanted[name]
        compared = slice(1 if rows is not None else 0, None)  # tables may have other rows
        if len(there) != len(now) or there[compared] != now[compared] or dtype_there != dtype_now:
            return f"{name} is {list(now)}, in the checkpoint {list(there)}"
    return None


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _sentence(rows: Rows, there: int, here: int) -> str:
    """What became of a table's rows; empty where each was taken."""
    taken = rows.taken(there, here)
    new, left = here - taken, there - taken
    parts = [f"{new:,} new initialised"] if new else []
    parts += [f"{left:,} of the checkpoint ignored"] if left else []
    by = "by number" if rows.source is None else "by key"
    return f" ({taken:,} rows {by}; {', '.join(parts)})" if parts else ""
