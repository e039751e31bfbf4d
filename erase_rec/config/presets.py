"""Presets: named orders of work. They fill what the configuration leaves open and never change what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from erase_rec.config.document import KeyPath
from erase_rec.config.relevance import is_read
from erase_rec.config.schema import Config, DistributedConfig, PresetName


@dataclass(frozen=True)
class Preset:
    """Values of a preset; one for all towers.

    Attributes:
        detach: ``towers[].detach``.
        stream: ``towers[].stream``.
        schedule: keys of ``schedule``.
        distributed: keys of ``distributed``.
        captures: captures as much of the step in CUDA graphs as the configuration lets it.
    """

    detach: bool
    stream: str
    schedule: Mapping[str, Any]
    distributed: Mapping[str, Any] = field(default_factory=dict)
    captures: bool = False

    def value(self, section: str, key: str) -> Any:
        """What the preset puts at ``section.key``; None where it says nothing."""
        values: Mapping[str, Any] = getattr(self, section)
        return values.get(key)


def _schedule(early_backward: bool, dispatch: str = "blocking", cuda_graph: str = "none") -> dict[str, Any]:
    return {
        "early_backward": early_backward,
        "dispatch": dispatch,
        "cuda_graph": cuda_graph,
        "optimizer": "end",
        "embedding_gradient": "both",
    }


def _paper(find_unused_parameters: bool, **schedule: str) -> Preset:
    """A row of table 1 of ERASE (arXiv 2608.18469)."""
    reduction = {"reduction": "ddp", "find_unused_parameters": find_unused_parameters}
    return Preset(True, "own", _schedule(True, **schedule), reduction)


PRESETS: Mapping[PresetName, Preset] = {
    "exact": Preset(False, "main", _schedule(False)),
    "exact_streams": Preset(False, "own", _schedule(False)),
    "detached": Preset(True, "main", _schedule(False)),
    "erase": Preset(True, "own", _schedule(True, cuda_graph="step"), captures=True),
    "paper_row3": _paper(False),
    "paper_row2": _paper(True),
    "paper_row1": _paper(False, dispatch="non_blocking", cuda_graph="tower"),
    # Printed as "blocking, FUP=True" like row 2; by the order of the rows it is the non-blocking one.
    "paper_row0": _paper(True, dispatch="non_blocking"),
}


def apply_preset(config: Config) -> tuple[Config, frozenset[KeyPath]]:
    """Fills ``schedule``, ``distributed`` and the towers' ``detach`` and ``stream`` where they are None.

    A key of ``distributed`` that has no meaning beside what the configuration says itself stays open. A preset that
    captures where it can captures what goes with what the configuration says, and updates towers by themselves where
    no norm over all of them is asked for.

    Returns:
        The configuration and the keys that were filled.
    """
    preset = PRESETS[config.schedule.preset]
    schedule = _open_keys(config.schedule, preset.schedule)
    if preset.captures:
        schedule = {key: _captured(config).get(key, value) for key, value in schedule.items()}
    distributed = _read_keys(config.distributed, _open_keys(config.distributed, preset.distributed))
    filled: set[KeyPath] = {("schedule", key) for key in schedule} | {("distributed", key) for key in distributed}
    towers = []
    for position, tower in enumerate(config.towers):
        values = _open_keys(tower, {"detach": preset.detach, "stream": preset.stream})
        filled |= {("towers", position, key) for key in values}
        towers.append(tower.model_copy(update=values))
    update = {
        "schedule": config.schedule.model_copy(update=schedule),
        "distributed": config.distributed.model_copy(update=distributed),
        "towers": tuple(towers),
    }
    return config.model_copy(update=update), frozenset(filled)


def _captured(config: Config) -> dict[str, Any]:
    """What a preset that captures does in this configuration."""
    distributed, dense = config.distributed, config.optimizer.dense
    one_norm = dense.max_grad_norm is not None and dense.clip == "global"
    optimizer = {"optimizer": "end" if one_norm else "per_tower"}
    early = config.schedule.early_backward is not False
    if distributed.reduction in {None, "bucket"}:
        if config.schedule.dispatch == "non_blocking":
            return optimizer | {"cuda_graph": "tower"}
        # Ranks tell each other through their hosts how many ids they exchange, which no capture can hold.
        exchanged = config.embedding.sharding != "replicated"
        return optimizer | {"cuda_graph": "dense" if exchanged else "step"}
    needs_hooks = distributed.reduction == "ddp_per_tower" or distributed.find_unused_parameters is True
    return optimizer | {"cuda_graph": "tower" if early and not needs_hooks else "none"}


def _open_keys(section: object, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if getattr(section, key) is None}


def _read_keys(section: DistributedConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    filled = section.model_copy(update=dict(values))
    return {key: value for key, value in values.items() if is_read(("distributed",), filled, key)}
