"""The kinds of towers, local heads and local losses. A new one is a file (or a class) and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from erase_rec.config.catalog import Group
from erase_rec.config.types import Params

TOWERS = {
    "mlp": "models.towers.mlp:MLPTower",
    "dot_interaction": "models.towers.dot_interaction:DotInteractionTower",
    "dcn_v2": "models.towers.dcn_v2:DCNv2Tower",
    "masknet": "models.towers.masknet:MaskNetTower",
    "autoint": "models.towers.autoint:AutoIntTower",
    "fm": "models.towers.fm:FMTower",
    "deepfm": "models.towers.deepfm:DeepFMTower",
    "cin": "models.towers.cin:CINTower",
    "bilinear": "models.towers.bilinear:BilinearTower",
    "transformer": "models.towers.transformer:TransformerTower",
}

HEADS = {
    "linear": "models.heads:LinearHead",
    "goodness": "models.heads:GoodnessHead",
}

LOCAL_LOSSES = {
    "bce": "models.local_losses:BCELoss",
    "focal": "models.local_losses:FocalLoss",
    "bce_pairwise": "models.local_losses:PairwiseLoss",
}

_GROUPS: dict[Group, dict[str, str]] = {"tower": TOWERS, "head": HEADS, "local_loss": LOCAL_LOSSES}


class ModelCatalog:
    """Implements :class:`erase_rec.config.catalog.Catalog` for towers, heads and local losses."""

    def kinds(self, group: Group) -> Sequence[str]:
        """Names registered in ``group``, sorted."""
        return sorted(_GROUPS[group])

    def params_model(self, group: Group, kind: str) -> type[Params]:
        """Schema of ``params`` for ``kind``."""
        model: type[Params] = component(group, kind).Config
        return model


def component(group: Group, kind: str) -> Any:
    """The class registered under ``kind``; its module is imported at the first use."""
    module, name = _GROUPS[group][kind].split(":")
    return getattr(importlib.import_module(module), name)
