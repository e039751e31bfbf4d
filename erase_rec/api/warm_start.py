"""``train.init_from``: what a new run takes from an earlier one, found with both runs' configurations and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.dataset import load_features
from data.features.encoding import FIRST_ROW
from data.features.fitted import Features
from data.features.vocabulary import Vocabulary
from erase_rec.api.assembly import ContentCatalog
from erase_rec.checkpoint import stored_layout
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config, DenseFeatureConfig, SparseFeatureConfig, WarmStartConfig
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from erase_rec.training_loop import Parts, checkpoint_tensors, tell_of_loaded
from erase_rec.warm_start.filling import fill
from erase_rec.warm_start.names import (
    DENSE_FEATURE,
    OVER_ARCH,
    TABLES,
    Renaming,
    is_state,
    unit_of,
    unit_of_tower,
)
from erase_rec.warm_start.plan import Rows, WarmPlan, warm_plan


@dataclass(frozen=True)
class WarmStart:
    """What was taken from where.

    Attributes:
        checkpoint: the other run's.
        plan: what became of every tensor.
    """

    checkpoint: Path
    plan: WarmPlan

    def text(self) -> str:
        """For people."""
        return self.plan.text(self.checkpoint)

    def write(self, folder: RunFolder) -> None:
        """Leaves it in the run folder."""
        self.plan.write(folder.warm_start, self.checkpoint)


def warm_start(wanted: WarmStartConfig, parts: Parts, features: Features, world: World) -> WarmStart:
    """Fills a new model with what another run learnt; collective.

    Args:
        wanted: ``train.init_from``.
        parts: of the new run, with initial weights.
        features: the new run's, fitted.
        world: the ranks.

    Raises:
        UserError: there is no such checkpoint, or it does not fit.
    """
    source = RunFolder.of_checkpoint(Path(wanted.path))
    found = source.checkpoint(Path(wanted.path)) if world.is_first else None
    checkpoint: Path | None = world.broadcast_object("init_from", found)
    assert checkpoint is not None
    config, old_features = load_config(source.config, catalog=ContentCatalog()).config, load_features(source.features)
    stored = stored_layout(checkpoint)
    known = [name for name in stored if unit_of(name) is not None and not is_state(name)]
    known += [f"{DENSE_FEATURE}{feature.name}" for feature in config.features.dense]
    renaming = Renaming(wanted.rename, known)
    tensors = checkpoint_tensors(parts)
    layout = {name: (tuple(held.shape), held.dtype) for name, held in tensors.items() if unit_of(name) is not None}
    plan = warm_plan(
        stored,
        layout,
        renaming,
        rows=_rows(old_features, features, renaming),
        changed=_changed(config, parts.config, list(stored), renaming),
        with_states=wanted.optimizer,
        may_initialise=wanted.missing == "init",
    )
    fill(checkpoint, tensors, plan.taken, world)
    tell_of_loaded(parts, tensors)
    return WarmStart(checkpoint, plan)


def _rows(old: Features, new: Features, renaming: Renaming) -> dict[str, Rows]:
    """How the rows of each table that both have correspond, by unit."""
    olds = {
        renaming.plain(f"{TABLES}{feature.name}"): at  # by what the new model calls it
        for at, feature in enumerate(old.config.sparse)
    }
    found = {}
    for feature, encoding in zip(new.config.sparse, new.encodings, strict=True):
        at = olds.get(f"{TABLES}{feature.name}")
        if at is None:
            continue
        there = old.encodings[at]
        problem = _other_categories(old.config.sparse[at], feature)
        source = None
        if problem is None and isinstance(there, Vocabulary) and isinstance(encoding, Vocabulary):
            places = torch.from_numpy(there.find(encoding.categories))
            special = torch.arange(FIRST_ROW)  # missing and unseen
            source = torch.cat((special, torch.where(places >= 0, places + FIRST_ROW, places)))
        found[f"{TABLES}{feature.name}"] = Rows(source, problem)
    return found


def _other_categories(there: SparseFeatureConfig, here: SparseFeatureConfig) -> str | None:
    """Why a row means another category than in the checkpoint; None: it can be told which."""
    if there.encoding != here.encoding:
        return f"encoding is {here.encoding}, in the checkpoint {there.encoding}: rows mean other categories"
    if there.derive != here.derive:
        return f"derive is {here.derive}, in the checkpoint {there.derive}: rows mean other categories"
    if here.encoding == "hash" and there.num_embeddings != here.num_embeddings:
        return (
            f"num_embeddings is {here.num_embeddings}, in the checkpoint {there.num_embeddings}: with encoding: hash "
            "every category would fall into another row"
        )
    return None


def _changed(old: Config, new: Config, stored: Sequence[str], renaming: Renaming) -> dict[str, str]:
    """Towers that read something else than before, and an over-arch on other towers: shapes alone may not tell."""
    units = {unit_of(name): unit_of(renaming(name)) for name in stored}
    here = {tower.name: units.get(unit_of_tower(tower.name)) for tower in old.towers}  # by the name there
    before = {unit: tower for tower in old.towers if (unit := here[tower.name]) is not None}
    found: dict[str, str] = {}
    for tower in new.towers:
        unit = unit_of_tower(tower.name)
        if unit not in before:
            continue
        there = before[unit]
        renamed = [
            [renaming.plain(f"{DENSE_FEATURE}{name}") for name in _names(there.inputs.dense, old.features.dense)],
            [renaming.plain(f"{TABLES}{name}") for name in _names(there.inputs.sparse, old.features.sparse)],
            [here.get(name) for name in there.inputs.towers],
        ]
        reads = [
            [f"{DENSE_FEATURE}{name}" for name in _names(tower.inputs.dense, new.features.dense)],
            [f"{TABLES}{name}" for name in _names(tower.inputs.sparse, new.features.sparse)],
            [unit_of_tower(name) for name in tower.inputs.towers],
        ]
        if there.kind != tower.kind:
            found[unit] = f"its kind is {tower.kind}, in the checkpoint {there.kind}"
        elif renamed != reads:
            found[unit] = "it reads other features or towers than in the checkpoint, or in another order"
        elif (problem := _other_transform(old, new, reads[0], renaming)) is not None:
            found[unit] = problem
    if [here[tower.name] for tower in old.towers] != [unit_of_tower(tower.name) for tower in new.towers]:
        found[OVER_ARCH] = "it joins other towers than in the checkpoint, or in another order"
    elif old.over_arch.logits != new.over_arch.logits:
        found[OVER_ARCH] = f"over_arch.logits is {new.over_arch.logits}, in the checkpoint {old.over_arch.logits}"
    return found


def _other_transform(old: Config, new: Config, read: Sequence[str], renaming: Renaming) -> str | None:
    """Why numbers that a tower reads, which the checkpoint has, are not those of there; None: they are."""
    before = {renaming.plain(f"{DENSE_FEATURE}{feature.name}"): feature.transform for feature in old.features.dense}
    for feature in new.features.dense:
        name = f"{DENSE_FEATURE}{feature.name}"
        if name in read and feature.transform != before[name]:
            return f"transform of {name} is {feature.transform}, in the checkpoint {before[name]}"
    return None


def _names(
    chosen: bool | Sequence[str], features: Sequence[DenseFeatureConfig] | Sequence[SparseFeatureConfig]
) -> list[str]:
    """The features that a tower reads, in the model's order."""
    names = [feature.name for feature in features]
    if isinstance(chosen, bool):
        return names if chosen else []
    return [name for name in names if name in chosen]
