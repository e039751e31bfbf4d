"""Which combinations are legal and which of them this version has, as data.

:data:`RULES` are refused whatever the version. :data:`REDUCTION_TABLE` says which ways to launch backward passes go
with which gradient reduction. :data:`UNAVAILABLE` are legal words of the vocabulary whose implementation is not part of
this version. :mod:`erase_rec.config.rules_page` turns all of them into a page of the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from erase_rec.config.document import KeyPath
from erase_rec.config.feature_rules import FEATURE_RULES
from erase_rec.config.presets import PRESETS
from erase_rec.config.relevance import ignored_settings, yaml_word
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config
from erase_rec.config.training_rules import TRAINING_RULES

Launch = Literal["aggregate backward", "blocking", "non_blocking", "tower or step graph"]
Reduction = Literal["ddp, FUP=True", "ddp, FUP=False", "ddp_per_tower", "bucket"]


@dataclass(frozen=True)
class Cell:
    """Whether a combination is legal, and the condition or the reason."""

    legal: bool
    note: str = ""


_OK = Cell(True)
_TOUCH_ALL = "where the final loss touches every parameter"
_THREADS = Cell(False, "several threads would issue collectives, in an order that differs between ranks")

REDUCTION_TABLE: Mapping[tuple[Launch, Reduction], Cell] = {
    ("aggregate backward", "ddp, FUP=True"): _OK,
    ("aggregate backward", "ddp, FUP=False"): _OK,
    ("aggregate backward", "ddp_per_tower"): _OK,
    ("aggregate backward", "bucket"): _OK,
    ("blocking", "ddp, FUP=True"): _OK,
    ("blocking", "ddp, FUP=False"): Cell(True, _TOUCH_ALL),
    ("blocking", "ddp_per_tower"): _OK,
    ("blocking", "bucket"): _OK,
    ("non_blocking", "ddp, FUP=True"): Cell(True, "joined inside forward"),
    ("non_blocking", "ddp, FUP=False"): Cell(True, "towers after forward"),
    ("non_blocking", "ddp_per_tower"): _THREADS,
    ("non_blocking", "bucket"): _OK,
    ("tower or step graph", "ddp, FUP=True"): Cell(
        False, "replayed gradients reach DDP without its hooks, so replicas would drift apart without an error"
    ),
    ("tower or step graph", "ddp, FUP=False"): Cell(True, _TOUCH_ALL),
    ("tower or step graph", "ddp_per_tower"): Cell(
        False, "replayed gradients would pass by the hooks of the towers' DDPs"
    ),
    ("tower or step graph", "bucket"): _OK,
}
"""FUP is ``distributed.find_unused_parameters``; left out, it is false."""


@dataclass(frozen=True)
class Unavailable:
    """Values of a key that this version does not have.

    Attributes:
        path: the key.
        values: the values; None: every value.
        instead: what to write.
    """

    path: tuple[str, str]
    values: tuple[str, ...] | None
    instead: str

    def covers(self, value: object) -> bool:
        """Whether ``value`` is one of those; None, a key left out, never is."""
        return value is not None and (self.values is None or value in self.values)


UNAVAILABLE = (
    Unavailable(("schedule", "dispatch"), ("non_blocking",), "use blocking"),
    Unavailable(("schedule", "cuda_graph"), ("tower", "step"), "use none"),
    Unavailable(("schedule", "optimizer"), ("per_tower",), "use end"),
    Unavailable(("distributed", "reduction"), None, "leave it out and train in one process"),
    Unavailable(("distributed", "find_unused_parameters"), None, "leave it out and train in one process"),
)


def _illegal_reductions(config: Config) -> Iterator[Finding]:
    if config.distributed.reduction is None:
        return
    launch, reduction = _launch(config), _reduction(config)
    cell = REDUCTION_TABLE[launch, reduction]
    if not cell.legal:
        found = f"{reduction} does not go with {launch}: {cell.note}"
        yield Finding(("distributed", "reduction"), found, also=(("schedule",), ("distributed",)))


def _launch(config: Config) -> Launch:
    schedule = config.schedule
    if schedule.cuda_graph in {"tower", "step"}:
        return "tower or step graph"
    if not schedule.early_backward:
        return "aggregate backward"
    return "non_blocking" if schedule.dispatch == "non_blocking" else "blocking"


def _reduction(config: Config) -> Reduction:
    match config.distributed.reduction:
        case "ddp_per_tower" | "bucket" as reduction:
            return reduction
        case _:
            return "ddp, FUP=True" if config.distributed.find_unused_parameters else "ddp, FUP=False"


RULES: tuple[Rule, ...] = (
    *FEATURE_RULES,
    *TRAINING_RULES,
    Rule(
        "a setting, other than its default, that its neighbours make meaningless (see below)",
        "it would be ignored",
        "leave it out, or set it back to its default where it comes from a _base_",
        ignored_settings,
    ),
    Rule(
        "a gradient reduction that does not go with how backward passes are launched (see below)",
        "gradients would be wrong without an error",
        "use reduction: bucket",
        _illegal_reductions,
    ),
)


def unavailable(config: Config, filled: frozenset[KeyPath]) -> Iterator[tuple[KeyPath, str]]:
    """Keys that ask for what this version does not have; ``filled`` by the preset are reported as the preset's.

    Yields:
        Key and message.
    """
    from_preset = []
    for entry in UNAVAILABLE:
        section, key = entry.path
        value = getattr(getattr(config, section), key)
        if not entry.covers(value):
            continue
        if entry.path in filled:
            from_preset.append(f"{section}.{key}: {yaml_word(value)}")
        else:
            yield entry.path, f"{yaml_word(value)} is not available in this version; {entry.instead}"
    if from_preset:
        yield (
            ("schedule", "preset"),
            f"{config.schedule.preset} needs {', '.join(from_preset)}, which this version does not have;"
            f" use one of {', '.join(available_presets())}",
        )


def available_presets() -> list[str]:
    """Presets whose every value this version has."""
    return [
        name
        for name, preset in PRESETS.items()
        if not any(entry.covers(preset.value(*entry.path)) for entry in UNAVAILABLE)
    ]
