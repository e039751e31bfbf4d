"""Rules on towers: what they read, what trains them, where they run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, TowerConfig
from erase_rec.errors import nearest

RESERVED_NAMES = ("over_arch", "embeddings")
"""Parts of every model that weights, losses and gradient norms list beside the towers."""


def has_loss(tower: TowerConfig) -> bool:
    """Whether a local loss of the tower is part of the sum of losses."""
    return tower.loss is not None and tower.loss.weight > 0


def _untrained(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        if tower.detach and not tower.frozen and not has_loss(tower):
            path = ("towers", position, "loss")
            lack = "no loss" if tower.loss is None else "a loss of weight 0"
            found = f"the tower {tower.name!r} is detached and has {lack}"
            also = (("towers", position, "detach"), ("towers", position, "frozen"), ("schedule", "preset"))
            yield Finding(path, found, also)


def _frozen_with_loss(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        if tower.frozen and has_loss(tower):
            assert tower.loss is not None
            found = f"the tower {tower.name!r} is frozen and has a loss of weight {tower.loss.weight:g}"
            yield Finding(("towers", position, "loss"), found, also=(("towers", position, "frozen"),))


def _pairs_across_parts(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        if tower.loss is not None and tower.loss.kind == "bce_pairwise" and config.train.micro_batches > 1:
            found = f"is bce_pairwise and train.micro_batches is {config.train.micro_batches}"
            yield Finding(("towers", position, "loss", "kind"), found, also=(("train", "micro_batches"),))


def _repeated(config: Config) -> Iterator[Finding]:
    counts = Counter(tower.name for tower in config.towers)
    seen: set[str] = set()
    for position, tower in enumerate(config.towers):
        if tower.name in seen:
            yield Finding(("towers", position, "name"), f"{counts[tower.name]} towers are called {tower.name!r}")
        seen.add(tower.name)


def _reserved(config: Config) -> Iterator[Finding]:
    for position, tower in enumerate(config.towers):
        if tower.name in RESERVED_NAMES:
            yield Finding(("towers", position, "name"), f"a tower is called {tower.name!r}")


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


def _misplaced(config: Config) -> Iterator[Finding]:
    path, order = ("schedule", "launch_order"), config.schedule.launch_order
    if not order:
        return
    names = [tower.name for tower in config.towers]
    if sorted(order) != sorted(names):
        yield Finding(path, f"found {', '.join(order)}, expected each of {', '.join(names)} once", also=(("towers",),))
        return
    for tower in config.towers:
        for read in tower.inputs.towers:
            if read in order and order.index(read) > order.index(tower.name):
                yield Finding(path, f"{tower.name} comes before {read}, which it reads", also=(("towers",),))


def _preferred_nowhere(config: Config) -> Iterator[Finding]:
    path = ("schedule", "high_priority")
    streams = {tower.name: tower.stream for tower in config.towers}
    for name in config.schedule.high_priority:
        if name not in streams:
            yield Finding(path, f"found {name!r}", also=(("towers",),), hint=nearest(name, tuple(streams)))
        elif streams[name] == "main":
            yield Finding(path, f"{name} runs on the main stream", also=(("towers",), ("schedule", "preset")))


def _blind(config: Config) -> Iterator[Finding]:
    if not config.features.dense and not config.features.sparse:
        return  # a rule of its own
    for position, tower in enumerate(config.towers):
        reads_dense = tower.inputs.dense and config.features.dense
        reads_sparse = tower.inputs.sparse and config.features.sparse
        if not reads_dense and not reads_sparse and not tower.inputs.towers:
            found = f"the tower {tower.name!r} reads no feature and no tower"
            yield Finding(("towers", position, "inputs"), found, also=(("features",),))


def _unreadable(config: Config) -> Iterator[Finding]:
    names = [tower.name for tower in config.towers]
    for position, tower in enumerate(config.towers):
        path, earlier = ("towers", position, "inputs", "towers"), names[:position]
        for at, name in enumerate(tower.inputs.towers):
            hint = ""
            if name == tower.name:
                found = f"the tower {name!r} reads itself"
            elif name not in names:
                found, hint = f"no tower is called {name!r}", nearest(name, earlier)
            elif name not in earlier:
                found = f"the tower {name!r} comes after {tower.name!r}"
            elif name in tower.inputs.towers[:at]:
                found = f"the tower {name!r} is named twice"
            else:
                continue
            yield Finding(path, found, also=(("towers",),), hint=hint)


def _cut_inside(config: Config) -> Iterator[Finding]:
    read = {name for tower in config.towers for name in tower.inputs.towers}
    for position, tower in enumerate(config.towers):
        if tower.cut_at == 0:
            continue
        path, name = ("towers", position, "cut_at"), tower.name
        if not tower.detach:
            also = (("towers", position, "detach"), ("schedule", "preset"))
            yield Finding(path, f"the tower {name!r} is not detached and has cut_at {tower.cut_at}", also=also)
        if tower.frozen:
            found = f"the tower {name!r} is frozen and has cut_at {tower.cut_at}"
            yield Finding(path, found, also=(("towers", position, "frozen"),))
        if name in read:
            found = f"the tower {name!r} is read by another and has cut_at {tower.cut_at}"
            yield Finding(path, found, also=(("towers",),))


def _leaking(config: Config) -> Iterator[Finding]:
    """A detached tower's loss must end at the tower; an output that is not cut would carry it on."""
    cut = {tower.name: tower.detach for tower in config.towers}
    for position, tower in enumerate(config.towers):
        if not tower.detach or tower.frozen:
            continue
        for name in tower.inputs.towers:
            if cut.get(name) is False:
                found = f"the detached tower {tower.name!r} reads {name!r}, which is not detached"
                path = ("towers", position, "inputs", "towers")
                yield Finding(path, found, also=(("towers",), ("schedule", "preset")))


TOWER_RULES = (
    Rule(
        "a detached tower without a loss, or with a loss of weight 0, that is not frozen",
        "nothing would ever train it",
        "declare towers[].loss with a weight above 0, or keep its gradient with detach: false",
        _untrained,
    ),
    Rule(
        "a frozen tower with a loss of weight above 0",
        "the tower would learn nothing from it",
        "take the loss away (loss: null), or set frozen: false",
        _frozen_with_loss,
    ),
    Rule(
        "a loss of kind `bce_pairwise` with `train.micro_batches` above 1",
        "rows of different parts would be no pairs, and the gradient another",
        "use train.micro_batches: 1, or kind: bce",
        _pairs_across_parts,
    ),
    Rule("two towers of one name", "weights and metrics go by the name", "rename one", _repeated),
    Rule(
        "a tower called `over_arch` or `embeddings`",
        "every model has a part of that name, and weights and metrics go by the name",
        "rename the tower",
        _reserved,
    ),
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
        "a tower that reads no feature and no tower",
        "its output would be a constant",
        "set inputs.dense or inputs.sparse to true or to names of features",
        _blind,
    ),
    Rule(
        "`towers[].inputs.towers` with a name that is not that of an earlier tower, or twice",
        "towers run in the order of the list",
        "name towers that are listed before, each once",
        _unreadable,
    ),
    Rule(
        "a detached tower that reads a tower that is not detached",
        "its local loss would train the other tower too",
        "set detach: true for the tower that is read, or detach: false for the one that reads it",
        _leaking,
    ),
    Rule(
        "`towers[].cut_at` above 0 for a tower that is not detached, is frozen, or is read by another tower",
        "the layers above the cut are trained with the over-arch, after all towers",
        "use cut_at: 0 for this tower",
        _cut_inside,
    ),
    Rule(
        "a `schedule.launch_order` that is not each tower once, those that are read before those that read them",
        "every tower is launched once, after its inputs",
        "put the towers' names in order, or leave it out",
        _misplaced,
    ),
    Rule(
        "a `schedule.high_priority` with a name that is not a tower's, or of a tower on the main stream",
        "a priority is a stream's",
        "name towers whose stream is own or a shared one",
        _preferred_nowhere,
    ),
)
