"""What the loader of configurations must know where only data is at work: sources in full, the rest by name."""

from __future__ import annotations

from collections.abc import Sequence

from erase_rec.config.catalog import Group
from erase_rec.config.types import Params


class AnyParams(Params, extra="allow"):
    """``params`` that are left to ``erase-rec train``: checking them would load torch."""


class DataCatalog:
    """Implements :class:`erase_rec.config.catalog.Catalog`; towers and losses are known by their names only."""

    def kinds(self, group: Group) -> Sequence[str]:
        """Names registered in ``group``, sorted."""
        from data.registry import SourceCatalog
        from models.registry import ModelCatalog

        return SourceCatalog().kinds(group) if group == "source" else ModelCatalog().kinds(group)

    def params_model(self, group: Group, kind: str) -> type[Params]:
        """Schema of ``params`` for ``kind``."""
        from data.registry import SourceCatalog

        return SourceCatalog().params_model(group, kind) if group == "source" else AnyParams
