"""What the loader must know of content to check its ``params``, without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from erase_rec.config.types import Params

Group = Literal["tower", "head", "local_loss", "source"]


class Catalog(Protocol):
    """Registered kinds of one or more groups; ``models/registry.py`` and ``data/registry.py`` each fill one."""

    def kinds(self, group: Group) -> Sequence[str]:
        """Names registered in ``group``, sorted."""
        ...

    def params_model(self, group: Group, kind: str) -> type[Params]:
        """Schema of ``params`` for ``kind``; its class is beside the component it configures."""
        ...
