"""The kinds of data sources. A new one is a file in ``data/sources/`` and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import DataError
from data.sources.source import Source, Split
from erase_rec.config.catalog import Group
from erase_rec.config.types import Params
from erase_rec.errors import nearest

SOURCES = {
    "avazu": "data.sources.avazu:AvazuSource",
    "criteo": "data.sources.criteo:CriteoSource",
    "csv": "data.sources.csv:CSVSource",
    "pandas": "data.frames:FrameSource",
    "parquet": "data.sources.parquet:ParquetSource",
    "synthetic": "data.sources.synthetic:SyntheticSource",
}

WITHOUT_FILES = frozenset({"synthetic"})
"""Kinds that make their rows up."""


class SourceCatalog:
    """Implements :class:`erase_rec.config.catalog.Catalog` for data sources."""

    def kinds(self, group: Group) -> Sequence[str]:
        """Names registered in ``group``, sorted."""
        assert group == "source"
        return sorted(SOURCES)

    def params_model(self, group: Group, kind: str) -> type[Params]:
        """Schema of ``params`` for ``kind``."""
        assert group == "source"
        model: type[Params] = _component(kind).Config
        return model


def open_source(
    kind: str,
    paths: Sequence[str],
    params: Mapping[str, Any] | Params | None = None,
    *,
    seed: int = 1,
    split: Split = "train",
) -> Source:
    """Opens a click log; its files are looked up now and read when asked.

    Args:
        kind: a registered kind.
        paths: paths, globs or URLs; none where the kind makes its rows up.
        params: the kind's ``Config`` or what it validates.
        seed: of the rows that are made up.
        split: what the rows are for.

    Raises:
        DataError: unknown kind, one whose rows are not to be opened, missing files, or files where there must be none.
        ValueError: ``params`` do not fit (a pydantic error).
    """
    if kind not in SOURCES:
        raise DataError(f"data.kind: unknown kind {kind!r}{nearest(kind, list(SOURCES))}; there are {sorted(SOURCES)}")
    if kind == "pandas":
        raise DataError(
            "data.kind: pandas takes its rows from DataFrames, in Python: erase_rec.Trainer(config, train=frame); "
            "for files name another kind"
        )
    if kind in WITHOUT_FILES and paths:
        raise DataError(f"data.{split}: kind {kind!r} makes its rows up and reads no files; remove {', '.join(paths)}")
    if kind not in WITHOUT_FILES and not paths:
        raise DataError(f"data.{split}: names no file; kind {kind!r} needs a path or a glob")
    component = _component(kind)
    source: Source = component(component.Config.model_validate(params or {}), paths, seed=seed, split=split)
    return source


def _component(kind: str) -> Any:
    """The class registered under ``kind``; its module is imported at the first use."""
    module, name = SOURCES[kind].split(":")
    return getattr(importlib.import_module(module), name)
