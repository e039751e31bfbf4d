"""Expands a sweep into its points, each validated and named by its content."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from erase_rec.config.catalog import Catalog
from erase_rec.config.load import LoadedConfig, config_hash, load_config
from erase_rec.config.merge import ALTERNATIVES
from erase_rec.errors import ConfigError
from erase_rec.sweep.file import ReadSweep

_PLAIN = re.compile(r"-?[\w./+][\w./+-]*")
"""Texts that need no quotes inside a list or section of YAML."""


@dataclass(frozen=True)
class Override:
    """``key=value`` and where it was written."""

    key: str
    value: str
    place: str

    @property
    def text(self) -> str:
        """As on the command line."""
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Arm:
    """A way to train: all points of an arm differ in the seed only."""

    name: str
    overrides: tuple[Override, ...]


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        id: hash of the resolved configuration (``run`` aside), the seed and the ranks; arms that are the same by
            content, such as an A/A pair, have ``-2``, ``-3`` ... behind it.
        arm: name.
        seed: of the configuration.
        overrides: all that the base is changed by, the seed too.
    """

    id: str
    arm: str
    seed: int
    overrides: tuple[str, ...]


def plan_points(sweep: ReadSweep, overrides: Sequence[str], *, catalog: Catalog) -> list[Point]:
    """All points in the order in which they start.

    Args:
        sweep: what was read.
        overrides: of the command line; they go before all others.
        catalog: what configurations may name.

    Raises:
        UserError: the base is missing.
        ConfigError: the problems of all points.
    """
    arms = expand_arms(sweep, overrides)
    points = {(point.arm, point.seed): point for point in points_of(arms, sweep, catalog=catalog)}
    names, seeds = [arm.name for arm in arms], sweep.file.seeds
    order = interleaved(names, seeds) if sweep.file.order == "interleaved" else product(names, seeds)
    return [points[pair] for pair in order]


def points_of(arms: Sequence[Arm], sweep: ReadSweep, *, catalog: Catalog) -> Iterator[Point]:
    """Points of ``arms``, each arm's seeds in a row.

    Raises:
        UserError: the base is missing.
        ConfigError: the problems of all points.
    """
    loaded = load_arms(arms, sweep, catalog=catalog)
    copies = Counter[str]()
    for arm, seed in product(arms, sweep.file.seeds):
        # The seed was checked with the sweep's file: one reading of the configuration stands for all seeds.
        hashed = config_hash(loaded[arm.name].config.model_copy(update={"seed": seed}))
        content = point_id(hashed, seed, sweep.file.ranks)
        copies[content] += 1
        name = content if copies[content] == 1 else f"{content}-{copies[content]}"
        yield Point(name, arm.name, seed, (*(override.text for override in arm.overrides), f"seed={seed}"))


def expand_arms(sweep: ReadSweep, overrides: Sequence[str] = ()) -> list[Arm]:
    """Arms x (grid or list), each with all that it changes; a later layer replaces what an earlier one says of a key.

    Raises:
        ConfigError: two arms have the same name, or an override is none.
    """
    file = sweep.file
    shared, last = shared_layers(sweep, overrides)
    variants = list(_variants(sweep))
    arms = []
    for name, own in (file.arms or {sweep.base.stem: {}}).items():
        written = _read(own, sweep, "arms", name) if file.arms else []
        for label, varied in variants:
            full = f"{name} {label}" if file.arms and label else label or name
            arms.append(Arm(full, tuple(layered(shared, written, varied, last))))
    counts = Counter(arm.name for arm in arms)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError([f"{sweep.place()}: two points are the same: {name}; keep one" for name in twice])
    return arms


def shared_layers(sweep: ReadSweep, overrides: Sequence[str]) -> tuple[list[Override], list[Override]]:
    """What goes below the overrides of every arm, and what goes above them.

    Raises:
        ConfigError: one of the command line's is none, or is the sweep's to set.
    """
    return _read(sweep.file.overrides, sweep, "overrides"), _of_command_line(overrides)


def layered(*layers: Iterable[Override]) -> list[Override]:
    """Layers over each other: a key (or one that excludes it) that a later layer sets is gone from earlier ones."""
    result: list[Override] = []
    for layer in map(list, layers):
        result = [each for each in result if not any(_replaces(later, each) for later in layer)] + layer
    return result


def interleaved(arms: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """``A B .. B A``: every other seed goes through the arms backwards."""
    for turn, seed in enumerate(seeds):
        yield from ((arm, seed) for arm in (arms if turn % 2 == 0 else reversed(arms)))


def point_id(hashed: str, seed: int, ranks: int) -> str:
    """12 hexadecimal digits for a configuration's hash, a seed and a number of ranks."""
    return hashlib.sha256(f"{hashed} seed={seed} ranks={ranks}".encode()).hexdigest()[:12]


def value_text(value: Any) -> str:
    """A value of the sweep's file as an override's text, which is read back as the same."""
    if isinstance(value, str) and value and value == value.strip() and value not in {"~", "null"}:
        return value if value[0] not in "[{\"'" else json.dumps(value, ensure_ascii=False)
    return _flow(value)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value != "null"
        return value if plain else json.dumps(value, ensure_ascii=False)
    return "null" if value is None else f"[{', '.join(map(_flow, value))}]"


def _read(overrides: Mapping[str, Any], sweep: ReadSweep, *path: str | int) -> list[Override]:
    return [each for key, value in overrides.items() for each in leaves(key, value, sweep.place(*path, key))]


def leaves(key: str, value: Any, place: str) -> Iterator[Override]:
    """An override a key of a section, which means the same and lets a later layer replace one of them."""
    if isinstance(value, Mapping) and value:
        for below, item in value.items():
            yield from leaves(f"{key}.{below}", item, place)
    else:
        yield Override(key, value_text(value), place)


def _of_command_line(overrides: Sequence[str]) -> list[Override]:
    problems = [
        f"override {text!r}: expected key=value, such as train.steps=200; there is no '='"
        for text in overrides
        if "=" not in text
    ]
    parsed = [Override(key.strip(), value, "") for key, _, value in (text.partition("=") for text in overrides)]
    problems += [
        f"override {each.text!r}: a sweep sets it itself: seeds are in its file, folders go by --out"
        for each in parsed
        if each.key.partition(".")[0] in {"seed", "run"}
    ]
    if problems:
        raise ConfigError(problems)
    return parsed


def _variants(sweep: ReadSweep) -> Iterator[tuple[str, list[Override]]]:
    """Points of the grid or the list, each with its label; without either one of no label."""
    file = sweep.file
    if file.list:
        for position, own in enumerate(file.list):
            yield label_of(own), _read(own, sweep, "list", position)
        return
    for values in product(*file.grid.values()):
        own = dict(zip(file.grid, values, strict=True))
        yield label_of(own), _read(own, sweep, "grid")


def label_of(own: Mapping[str, Any]) -> str:
    """``key=value`` of each, keys as short as they are clear."""
    return " ".join(f"{_short(key, own)}={value_text(value)}" for key, value in own.items())


def _short(key: str, among: Iterable[str]) -> str:
    """The last part of a key where no other key ends in it."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in among) == 1 else key


def _replaces(later: Override, earlier: Override) -> bool:
    if earlier.key == later.key or earlier.key.startswith(f"{later.key}."):
        return True
    section, _, key = later.key.rpartition(".")
    others = ALTERNATIVES.get(tuple(section.split(".")), ())
    return key in others and later.value != "null" and earlier.key in {f"{section}.{other}" for other in others}


def load_arms(arms: Sequence[Arm], sweep: ReadSweep, *, catalog: Catalog) -> dict[str, LoadedConfig]:
    """The configuration of each arm, with the first seed.

    Raises:
        ConfigError: all problems of all arms, each once, with the arms that have it.
    """
    loaded: dict[str, LoadedConfig] = {}
    problems: dict[str, list[str]] = {}
    base = sweep.base
    for arm in arms:
        texts = [*(override.text for override in arm.overrides), f"seed={sweep.file.seeds[0]}"]
        try:
            loaded[arm.name] = load_config(base, texts, catalog=catalog)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(_placed(problem, arm), []).append(arm.name)
    if problems:
        raise ConfigError([f"{_whose(names, arms)}: {problem}" for problem, names in problems.items()])
    return loaded


def _placed(problem: str, arm: Arm) -> str:
    """``problem`` with the line of the sweep's file where it speaks of an override."""
    for override in arm.overrides:
        if override.place and problem.startswith(f"override {override.text!r}"):
            return f"{override.place}: {problem}"
    return problem


def _whose(names: Sequence[str], arms: Sequence[Arm]) -> str:
    if len(names) == len(arms):
        return "every point"
    return f"arm {names[0]!r}" if len(names) == 1 else f"arms {', '.join(map(repr, names))}"
