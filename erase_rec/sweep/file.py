"""The file of a sweep: which configuration, changed how, with which seeds, on how many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from os.path import isfile  # Path's own raises where a name is too long
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from erase_rec.config.document import KeyPath, Node
from erase_rec.config.load import find_config
from erase_rec.config.merge import read_with_bases
from erase_rec.config.schema import ComponentParams, NonNegativeInt, PositiveInt
from erase_rec.config.types import Boolean, Number, Params, Text
from erase_rec.config.validate import validate_params
from erase_rec.errors import ConfigError

Overrides = ComponentParams
"""Keys as on the command line (``towers.cross.loss.weight``) and their values, which may be sections; null: none."""

MAX_POINTS = 10_000
"""Runs of a sweep: a grid of a few keys can come to more than there are atoms."""

_OURS = {
    "seed": "give seeds: [...] instead, at the top of the sweep",
    "run": "a sweep names its runs' folders itself; say where with --out",
}


class Space(Params):
    """Values that a search may take for one key: a range or choices."""

    low: Number | None = None
    high: Number | None = None
    log: Boolean = False
    """Draw the logarithm of the value evenly."""
    whole: Boolean = False
    """Whole numbers only."""
    choices: tuple[Any, ...] = ()

    def problem(self) -> str | None:
        """What is wrong with it."""
        if self.choices:
            bounds = self.low is not None or self.high is not None or self.log or self.whole
            return "choices leave no room for low, high, log and whole; keep one" if bounds else None
        if self.low is None or self.high is None:
            return "expected low and high, or choices"
        if not self.low < self.high:
            return f"low ({self.low:g}) is not below high ({self.high:g})"
        return "log needs a low above 0" if self.log and self.low <= 0 else None


class SearchConfig(Params):
    """Trials that look for the best value of a metric, each drawn from what earlier ones came to (Optuna)."""

    space: Annotated[dict[str, Space], Field(min_length=1)]
    """Key -> values."""
    trials: PositiveInt
    sampler: Literal["tpe", "random"] = "tpe"
    metric: Literal["eval.ne", "eval.logloss", "eval.auc", "eval.calibration"] = "eval.ne"
    """Mean over the seeds of a trial. Lower is better; of ``eval.auc`` higher, of ``eval.calibration`` nearer to 1."""
    at_once: PositiveInt = 1
    """Trials that are drawn together. More let ``--jobs`` run them side by side, and teach the sampler later."""
    seed: NonNegativeInt = 1
    """Of the sampler: the same trials are drawn again when a sweep goes on."""


class SweepFile(Params):
    """A sweep as it is written. Points are arms x (grid or list) x seeds, or the trials of a search x seeds."""

    base: Text
    """Configuration of all points: a path from the sweep's folder, or what ``--config`` of ``train`` takes."""
    overrides: Overrides = Field(default_factory=dict)
    """Of all points."""
    arms: dict[str, Overrides] = Field(default_factory=dict)
    """Name -> overrides; none: one arm, the base as it is."""
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Key -> values; every combination is a point."""
    list: tuple[Overrides, ...] = ()
    """Overrides of a point each, where not every combination is wanted."""
    search: SearchConfig | None = None
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1,)
    ranks: PositiveInt = 1
    """Processes of a run; several are started by torchrun."""
    order: Literal["interleaved", "given"] = "interleaved"
    """``interleaved``: the first seed of all arms, the second of all arms backwards, and so on, so that what drifts
    with time meets all arms alike. ``given``: all seeds of the first arm, then those of the second."""


@dataclass(frozen=True)
class ReadSweep:
    """A sweep's file and where its entries stand."""

    path: Path
    file: SweepFile
    document: Node

    @property
    def name(self) -> str:
        """Stem of the file."""
        return self.path.stem

    @property
    def base(self) -> Path:
        """The base configuration.

        Raises:
            UserError: there is no such file.
        """
        beside = self.path.parent / self.file.base
        return beside.resolve() if isfile(beside) else find_config(self.file.base)

    def place(self, *path: str | int) -> str:
        """``file:line`` of the entry at ``path``."""
        return self.document.place_of(path)


def read_sweep(name_or_path: str | Path) -> ReadSweep:
    """Reads a sweep: strictly, like a configuration. ``_base_`` names a sweep that this one changes.

    Args:
        name_or_path: a path, or a name in the checkout's ``configs/``, such as ``sweeps/table1.yaml``.

    Raises:
        UserError: no such file.
        ConfigError: all that is wrong with it.
    """
    path = find_config(name_or_path)
    document, problems = read_with_bases(path)
    file, found = validate_params(SweepFile, document.plain(), ())
    problems += [
        f"{document.place_of(each.path)}: {document.shown(each.path) or 'the file'}: {each.message}" for each in found
    ]
    if isinstance(file, SweepFile):
        problems += [
            f"{document.place_of(path)}: {document.shown(path)}: {message}" for path, message in _contradictions(file)
        ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert isinstance(file, SweepFile)
    return ReadSweep(path, file, document)


def _contradictions(file: SweepFile) -> Iterator[tuple[KeyPath, str]]:
    """What no single key shows: where, and what is wrong."""
    points = (len(file.arms) or 1) * (len(file.list) or prod(map(len, file.grid.values()))) * len(file.seeds)
    if file.search is not None:
        points = file.search.trials * len(file.seeds)
    if points > MAX_POINTS:
        yield ("search", "trials") if file.search else ("grid",), f"comes to {points:,} runs, more than {MAX_POINTS:,}"
    if file.grid and file.list:
        yield ("list",), "grid is given too, and the points would be either; keep one"
    if file.search is not None:
        for key in ("arms", "grid", "list"):
            if getattr(file, key):
                yield (key,), "search is given too, which draws its points itself; keep one"
        for key, space in file.search.space.items():
            if (problem := space.problem()) is not None:
                yield ("search", "space", key), problem
    for position, seed in enumerate(file.seeds):
        if seed in file.seeds[:position]:
            yield ("seeds", position), f"{seed} is there twice; name an arm twice to repeat a run"
    for path in _override_keys(file):
        section = str(path[-1]).partition(".")[0]
        if section in _OURS:
            yield path, f"cannot be set here: {_OURS[section]}"


def _override_keys(file: SweepFile) -> Iterator[KeyPath]:
    for key in file.overrides:
        yield "overrides", key
    for arm, overrides in file.arms.items():
        yield from (("arms", arm, key) for key in overrides)
    yield from (("grid", key) for key in file.grid)
    if file.search is not None:
        yield from (("search", "space", key) for key in file.search.space)
    for position, overrides in enumerate(file.list):
        yield from (("list", position, key) for key in overrides)
