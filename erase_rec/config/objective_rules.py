"""Rules on local objectives: what they are computed on, and what they keep from step to step."""

from __future__ import annotations

from collections.abc import Iterator

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, LossConfig, OverArchConfig

HARD_LABELS = ("focal", "bce_pairwise")
"""Losses that tell rows of one label from rows of the other."""


def _losses(config: Config) -> Iterator[tuple[KeyPath, LossConfig]]:
    for position, tower in enumerate(config.towers):
        if tower.loss is not None:
            yield ("towers", position, "loss"), tower.loss


def _soft_labels(config: Config) -> Iterator[Finding]:
    for path, loss in _losses(config):
        if loss.teacher is not None and loss.kind in HARD_LABELS:
            yield Finding((*path, "teacher"), f"is {loss.teacher:g} and kind is {loss.kind}", also=((*path, "kind"),))


def _average_in_bf16(config: Config) -> Iterator[Finding]:
    for path, loss in _losses(config):
        if loss.teacher is not None and config.train.precision == "bf16":
            found = f"is {loss.teacher:g} and train.precision is bf16"
            yield Finding((*path, "teacher"), found, also=(("train", "precision"),))


def _decay_of_nobody(config: Config) -> Iterator[Finding]:
    default = OverArchConfig.model_fields["teacher_decay"].default
    taught = any(loss.teacher is not None and loss.weight > 0 for _, loss in _losses(config))
    if config.over_arch.teacher_decay != default and not taught:
        found = f"is {config.over_arch.teacher_decay:g} and no tower's loss has a teacher"
        yield Finding(("over_arch", "teacher_decay"), found, also=(("towers",),))


def _pairs_across_parts(config: Config) -> Iterator[Finding]:
    for path, loss in _losses(config):
        if loss.kind == "bce_pairwise" and config.train.micro_batches > 1:
            found = f"is bce_pairwise and train.micro_batches is {config.train.micro_batches}"
            yield Finding((*path, "kind"), found, also=(("train", "micro_batches"),))


OBJECTIVE_RULES = (
    Rule(
        "`towers[].loss.teacher` with a loss of kind " + " or ".join(f"`{kind}`" for kind in HARD_LABELS),
        "a teacher's labels lie between 0 and 1",
        "use kind: bce, or leave teacher out",
        _soft_labels,
    ),
    Rule(
        "`towers[].loss.teacher` with `train.precision: bf16`",
        "the small steps of an exponential average are lost in bf16's 8 bits",
        "use train.precision: fp32, or leave teacher out",
        _average_in_bf16,
    ),
    Rule(
        "`over_arch.teacher_decay` other than its default without a `towers[].loss.teacher`",
        "it would be ignored",
        "leave it out, or give a loss a teacher",
        _decay_of_nobody,
    ),
    Rule(
        "a loss of kind `bce_pairwise` with `train.micro_batches` above 1",
        "rows of different parts would be no pairs, and the gradient another",
        "use train.micro_batches: 1, or kind: bce",
        _pairs_across_parts,
    ),
)
