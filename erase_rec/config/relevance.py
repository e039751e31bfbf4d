"""Settings that are read for some values of a neighbouring key only, as data.

Giving such a setting a value other than its default where nothing reads it is an error: it would be ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding
from erase_rec.config.schema import Config

SPARSE_FEATURES: KeyPath = ("features", "sparse")


@dataclass(frozen=True)
class Relevance:
    """One dependent setting.

    Attributes:
        section: the section that it is in; of a list, each item.
        key: the setting.
        selector: the key beside it that decides.
        values: the selector's values with which the setting is read.
    """

    section: KeyPath
    key: str
    selector: str
    values: tuple[str | bool | None, ...]


def _rows(section: KeyPath, selector: str, **keys: tuple[str | bool | None, ...]) -> tuple[Relevance, ...]:
    return tuple(Relevance(section, key, selector, values) for key, values in keys.items())


RELEVANCE = (
    *_rows(("data", "split"), "by", column=("hash", "column", "time"), values=("column",), since=("time",)),
    *_rows(("data",), "bad_rows", max_bad_share=("skip", "quarantine")),
    *_rows(("data",), "shuffle", shuffle_window=(True,)),
    *_rows(SPARSE_FEATURES, "encoding", min_count=("vocabulary",)),
    *_rows(SPARSE_FEATURES, "multi_valued", separator=(True,), weights=(True,), max_length=(True,)),
    *_rows(SPARSE_FEATURES, "pooling", weights=("sum",)),
    *_rows(
        ("optimizer", "dense"),
        "kind",
        beta1=("adam", "adamw"),
        beta2=("adam", "adamw"),
        eps=("adam", "adamw", "adagrad"),
        momentum=("sgd",),
    ),
    *_rows(
        ("optimizer", "sparse"),
        "kind",
        beta1=("adam",),
        beta2=("adam",),
        eps=("rowwise_adagrad", "adagrad", "adam"),
    ),
    *_rows(
        ("optimizer", "lr_schedule"),
        "kind",
        decay_steps=("linear", "cosine", "poly"),
        min_factor=("linear", "cosine", "poly", "step", "plateau"),
        power=("poly",),
        step_every=("step",),
        gamma=("step", "plateau"),
        patience=("plateau",),
        metric=("plateau",),
    ),
    *_rows(("schedule",), "dispatch", workers=("non_blocking",)),
    # Left out, the reduction is bucket where there are several ranks.
    *_rows(("distributed",), "reduction", find_unused_parameters=("ddp",), bucket_mib=("bucket", None)),
)


def is_read(section: KeyPath, item: BaseModel, key: str) -> bool:
    """Whether ``key`` of ``item``, which stands in ``section``, has a meaning beside its neighbours."""
    rows = [row for row in RELEVANCE if row.section == section and row.key == key]
    return all(getattr(item, row.selector) in row.values for row in rows)


def ignored_settings(config: Config) -> Iterator[Finding]:
    """Settings that differ from their default and that nothing would read."""
    for row in RELEVANCE:
        for path, item in _items(config, row.section):
            default = type(item).model_fields[row.key].default
            selected = getattr(item, row.selector)
            if getattr(item, row.key) == default or selected in row.values:
                continue
            readers = " or ".join(map(yaml_word, row.values))
            found = f"has a meaning with {row.selector}: {readers} only, found {row.selector}: {yaml_word(selected)}"
            found += f" (default {yaml_word(default)})"
            yield Finding((*path, row.key), found, also=((*path, row.selector),))


def _items(config: Config, section: KeyPath) -> Iterator[tuple[KeyPath, BaseModel]]:
    value: Any = config
    for key in section:
        value = getattr(value, str(key))
    if isinstance(value, tuple):
        yield from (((*section, position), item) for position, item in enumerate(value))
    else:
        yield section, value


def yaml_word(value: object) -> str:
    """``value`` as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
