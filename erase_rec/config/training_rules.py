"""Rules on towers, schedule, optimizers and the loop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from erase_rec.best_metric import COSTS
from erase_rec.config.document import KeyPath
from erase_rec.config.merge import ALTERNATIVES
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, TowerConfig
from erase_rec.errors import nearest

TRAIN: KeyPath = ("train",)


def _has_loss(tower: TowerConfig) -> bool:
    return tower.loss is not None and tower.loss.weight > 0


def _untrained_towers(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        if tower.detach and not _has_loss(tower):
            path = ("towers", position, "loss")
            lack = "no loss" if tower.loss is None else "a loss of weight 0"
            found = f"the tower {tower.name!r} is detached and has {lack}"
            yield Finding(path, found, also=(("towers", position, "detach"), ("schedule", "preset")))


def _early_without_detached(config: Config) -> Iterator[Finding]:
    if config.schedule.early_backward and not any(tower.detach for tower in config.towers):
        found = "is true and no tower is detached"
        yield Finding(("schedule", "early_backward"), found, also=(("towers",), ("schedule", "preset")))


def _repeated_towers(config: Config) -> Iterator[Finding]:
    counts = Counter(tower.name for tower in config.towers)
    seen: set[str] = set()
    for position, tower in enumerate(config.towers):
        if tower.name in seen:
            yield Finding(("towers", position, "name"), f"{counts[tower.name]} towers are called {tower.name!r}")
        seen.add(tower.name)


def _stream_names(config: Config) -> Iterator[Finding]:
    streams = {tower.name: tower.stream for tower in config.towers}
    for position, tower in enumerate(config.towers):
        stream, path = tower.stream, ("towers", position, "stream")
        if stream is None or stream in {"own", "main"}:
            continue
        if stream.lower() in {"own", "main"} or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", stream):
            yield Finding(path, f"the stream is called {stream!r}", hint=nearest(stream.lower(), ("own", "main")))
        elif streams.get(stream, stream) != stream:
            found = f"the stream {stream!r} has the name of a tower that runs on {streams[stream]!r}"
            yield Finding(path, found, also=(("towers",),))


def _unknown_inputs(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        for key in ("dense", "sparse"):
            names = [feature.name for feature in getattr(config.features, key)]
            yield from _unknown_names(getattr(tower.inputs, key), names, ("towers", position, "inputs", key))


def _unknown_names(chosen: bool | Sequence[str], names: Sequence[str], path: KeyPath) -> Iterator[Finding]:
    for name in [] if isinstance(chosen, bool) else chosen:
        if name not in names:
            found = f"features.{path[-1]} has no {name!r}"
            yield Finding(path, found, also=(("features", path[-1]),), hint=nearest(name, names))


def _blind_towers(config: Config) -> Iterator[Finding]:
    if not config.features.dense and not config.features.sparse:
        return  # a rule of its own
    for position, tower in enumerate(config.towers):
        reads_dense = tower.inputs.dense and config.features.dense
        reads_sparse = tower.inputs.sparse and config.features.sparse
        if not reads_dense and not reads_sparse:
            found = f"the tower {tower.name!r} reads no feature"
            yield Finding(("towers", position, "inputs"), found, also=(("features",),))


def _untrained_tables(config: Config) -> Iterator[Finding]:
    path = ("schedule", "embedding_gradient")
    if not config.features.sparse:
        return
    if config.schedule.embedding_gradient == "main" and all(tower.detach for tower in config.towers):
        yield Finding(path, "is main and every tower is detached", also=(("towers",), ("schedule", "preset")))
    if config.schedule.embedding_gradient == "local" and not any(map(_has_loss, config.towers)):
        yield Finding(path, "is local and no tower has a loss of weight above 0", also=(("towers",),))


def _durations(config: Config) -> Iterator[Finding]:
    keys = ALTERNATIVES[TRAIN]
    given = [key for key in keys if getattr(config.train, key) is not None]
    if not given:
        yield Finding(TRAIN, f"none of {', '.join(keys)} is given", also=tuple((*TRAIN, key) for key in keys))
    elif len(given) > 1:
        found = f"is given beside {' and '.join(given[:-1])}"
        yield Finding((*TRAIN, given[-1]), found, also=tuple((*TRAIN, key) for key in given))


def _unwatchable(config: Config) -> Iterator[Finding]:
    watched: list[tuple[KeyPath, str]] = []
    if config.train.early_stopping is not None:
        watched.append((("train", "early_stopping", "metric"), config.train.early_stopping.metric))
    if config.optimizer.lr_schedule.kind == "plateau":
        watched.append((("optimizer", "lr_schedule", "metric"), config.optimizer.lr_schedule.metric))
    for path, metric in watched:
        if metric not in COSTS:
            yield Finding(path, f"found {metric!r}", hint=nearest(metric, tuple(COSTS)))


def _stepless(config: Config) -> Iterator[Finding]:
    schedule = config.optimizer.lr_schedule
    if schedule.kind == "step" and schedule.step_every is None:
        section = ("optimizer", "lr_schedule")
        yield Finding((*section, "step_every"), "kind: step needs step_every", also=((*section, "kind"),))


TRAINING_RULES = (
    Rule(
        "a detached tower without a loss, or with a loss of weight 0",
        "nothing would ever train it",
        "declare towers[].loss with a weight above 0, or keep its gradient with detach: false",
        _untrained_towers,
    ),
    Rule(
        "`early_backward: true` with no detached tower",
        "a tower whose output is not cut has to wait for the over-arch's gradient",
        "set detach: true for a tower, or early_backward: false",
        _early_without_detached,
    ),
    Rule("two towers of one name", "weights and metrics go by the name", "rename one", _repeated_towers),
    Rule(
        "a stream that is neither `own`, `main` nor a shared name, or that has the name of a tower elsewhere",
        "towers that share a stream name it alike, with letters, digits and underscores",
        "use own, main, or another name",
        _stream_names,
    ),
    Rule(
        "`towers[].inputs` with a feature that is not listed",
        "a tower reads features of the same kind from the list",
        "name a listed feature, or true for all of them",
        _unknown_inputs,
    ),
    Rule(
        "a tower that reads no feature",
        "its output would be a constant",
        "set inputs.dense or inputs.sparse to true or to names of features",
        _blind_towers,
    ),
    Rule(
        "`embedding_gradient: main` with every tower detached, or `local` with no local loss",
        "no gradient would reach the tables",
        "use embedding_gradient: both (or none, to keep the tables as they are)",
        _untrained_tables,
    ),
    Rule(
        "not exactly one of `train.steps`, `train.epochs` and `train.samples`",
        "exactly one says how long to train",
        "give one of train.steps, train.epochs and train.samples",
        _durations,
    ),
    Rule(
        "a watched metric that evaluation does not give",
        "expected one of " + ", ".join(COSTS),
        "",
        _unwatchable,
    ),
    Rule(
        "`lr_schedule.kind: step` without `step_every`",
        "it says how many steps lie between two multiplications",
        "give optimizer.lr_schedule.step_every",
        _stepless,
    ),
)
