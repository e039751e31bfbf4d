"""Which combinations are legal, as data.

:data:`RULES` are all that is refused. :data:`REDUCTION_TABLE` says which ways to launch backward passes go with which
gradient reduction. :mod:`erase_rec.config.rules_page` turns both into a page of the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from erase_rec.config.data_rules import DATA_RULES
from erase_rec.config.feature_rules import FEATURE_RULES
from erase_rec.config.relevance import ignored_settings
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config
from erase_rec.config.sharding_rules import SHARDING_RULES
from erase_rec.config.tower_rules import TOWER_RULES
from erase_rec.config.training_rules import TRAINING_RULES

Launch = Literal["aggregate backward", "blocking", "non_blocking", "tower graph", "dense graph", "step graph"]
Reduction = Literal["ddp, FUP=True", "ddp, FUP=False", "ddp_per_tower", "bucket"]


@dataclass(frozen=True)
class Cell:
    """Whether a combination is legal.

    Attributes:
        legal: whether it is.
        note: the condition, or the reason why not.
        way_out: the nearest legal settings, where it is not.
    """

    legal: bool
    note: str = ""
    way_out: str = ""


_OK = Cell(True)
_TOUCH_ALL = "where the final loss touches every parameter"
_NO_REDUCER = Cell(
    False,
    "a reducer of DDP keeps count of its buckets on the host, where no replay reaches it",
    "use reduction: bucket, or cuda_graph: tower",
)

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
    ("non_blocking", "ddp, FUP=False"): Cell(True, f"joined inside forward, {_TOUCH_ALL}"),
    ("non_blocking", "ddp_per_tower"): Cell(
        False,
        "several threads would issue collectives, in an order that differs between ranks",
        "use dispatch: blocking, or reduction: bucket",
    ),
    ("non_blocking", "bucket"): _OK,
    ("tower graph", "ddp, FUP=True"): Cell(
        False,
        "replayed gradients reach DDP without its hooks, so replicas would drift apart without an error",
        "use find_unused_parameters: false, or reduction: bucket",
    ),
    ("tower graph", "ddp, FUP=False"): Cell(True, _TOUCH_ALL),
    ("tower graph", "ddp_per_tower"): Cell(
        False,
        "replayed gradients would pass by the hooks of the towers' DDPs",
        "use reduction: bucket, or reduction: ddp with find_unused_parameters: false",
    ),
    ("tower graph", "bucket"): _OK,
    ("dense graph", "ddp, FUP=True"): _NO_REDUCER,
    ("dense graph", "ddp, FUP=False"): _NO_REDUCER,
    ("dense graph", "ddp_per_tower"): _NO_REDUCER,
    ("dense graph", "bucket"): _OK,
    ("step graph", "ddp, FUP=True"): _NO_REDUCER,
    ("step graph", "ddp, FUP=False"): _NO_REDUCER,
    ("step graph", "ddp_per_tower"): _NO_REDUCER,
    ("step graph", "bucket"): _OK,
}
"""FUP is ``distributed.find_unused_parameters``; left out, it is false."""


def _illegal_reductions(config: Config) -> Iterator[Finding]:
    if config.distributed.reduction is None:
        return
    launch, reduction = _launch(config), _reduction(config)
    cell = REDUCTION_TABLE[launch, reduction]
    if not cell.legal:
        found = f"{reduction} does not go with {launch}: {cell.note}"
        also = (("schedule",), ("distributed",))
        yield Finding(("distributed", "reduction"), found, also, way_out=cell.way_out)


def _launch(config: Config) -> Launch:
    schedule = config.schedule
    if schedule.cuda_graph == "step":
        return "step graph"
    if schedule.cuda_graph == "dense":
        return "dense graph"
    if schedule.cuda_graph == "tower":
        return "tower graph"
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
    *DATA_RULES,
    *FEATURE_RULES,
    *SHARDING_RULES,
    *TOWER_RULES,
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
        "the nearest legal settings (see below)",
        _illegal_reductions,
    ),
)
