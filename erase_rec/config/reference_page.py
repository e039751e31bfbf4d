"""The documentation's page of all keys, written from the schema and from the components' own ``Config``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from erase_rec.config.catalog import Catalog, Group
from erase_rec.config.field_docs import field_docs
from erase_rec.config.schema import (
    ComponentParams,
    Config,
    DenseDefaults,
    DenseFeatureConfig,
    SparseDefaults,
    SparseFeatureConfig,
)
from erase_rec.config.types import Selection, Texts

_GROUPS: dict[Group, tuple[str, str, str]] = {
    "tower": ("Towers", "Tower", "towers[].params"),
    "head": ("Heads", "Head", "towers[].head.params"),
    "local_loss": ("Local losses", "Local loss", "towers[].loss.params"),
    "source": ("Data sources", "Data source", "data.params"),
}
_ENTRIES = {DenseDefaults: DenseFeatureConfig, SparseDefaults: SparseFeatureConfig}
"""Sections that hold defaults, and whose keys they are."""
_BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}
_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", NoneType: "null"}
_ROUTE = {Texts: "text or list of texts", Selection: "true, false or list of names"}


class Default(Enum):
    """What stands where a key has no value by default."""

    REQUIRED = "required"
    SECTION = "see below"


def configuration_as_markdown(catalog: Catalog) -> str:
    """The whole page: sections in the order of the schema, then the kinds of each group of components."""
    return "\n".join((*_head(), *_section(Config, ""), *_components(catalog)))


def _head() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Every key, written from the schema that the loader checks configurations with; any other is refused."
    yield "On the command line a key is its path (`train.steps=200`); an item of a list is named by its `name`"
    yield "(`towers.cross.loss.weight=0.5`). `_base_: other.yaml` starts from another file. Which combinations are"
    yield "refused is said in [Combinations of settings](../configuration_rules.md)."


def _section(model: type[BaseModel], path: str) -> Iterator[str]:
    """A heading, the model's own words, its keys, then the sections below it."""
    yield ""
    if path:
        yield f"{'##' if '.' not in path else '###'} `{path}`"
        yield ""
        yield _prose(model)
        yield ""
    else:
        yield "## Top level"
        yield ""
    yield from _table(model, path)
    for name, field in model.model_fields.items():
        for below, many in _models(field.annotation):
            yield from _section(below, f"{path}.{name}{many}".lstrip("."))


def _components(catalog: Catalog) -> Iterator[str]:
    for group in get_args(Group):
        title, one, place = _GROUPS[group]
        yield f"\n## {title}\n"
        yield f"The `params` of each kind, at `{place}`."
        for kind in catalog.kinds(group):
            model = catalog.params_model(group, kind)
            yield f"\n### {one} `{kind}`\n"
            yield _prose(model)
            if model.model_fields:
                yield ""
                yield from _table(model, place)
    yield ""


def _table(model: type[BaseModel], path: str) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        cells = (f"`{key}`", value_words(field), _default(field), _meaning(model, name, field))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _meaning(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """The text below the field; of a section the first sentence about it; of defaults the text of what they fill."""
    text = field_docs(model).get(name) or field_docs(_ENTRIES.get(model, model)).get(name)
    if text is None:
        text = next((_prose(below).partition(". ")[0].rstrip(".") + "." for below, _ in _models(field.annotation)), "")
    return text.replace("``", "`").replace("`None`", "`null`")


def value_words(field: FieldInfo) -> str:
    """What a field takes, for people."""
    return _words(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)


def _words(annotation: Any) -> str:
    if annotation in _ROUTE:
        return _ROUTE[annotation]
    if annotation == ComponentParams:
        return "the kind's own keys"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        plain = next((words for alias, words in _ROUTE.items() if get_args(alias) == arguments), None)
        if plain is not None:
            return plain
        return " ".join((_words(arguments[0]), " and ".join(_bounds(arguments[1:])))).rstrip()
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is tuple:
        return "list of sections" if _models(annotation) else f"list, each {_words(arguments[0])}"
    if origin is dict:
        return "the kind's own keys" if arguments[1] is Any else f"section, each {_words(arguments[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return _WORDS[annotation]


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for item in metadata:
        for bound in item.metadata if isinstance(item, FieldInfo) else (item,):
            if type(bound) in _BOUNDS:
                name, sign = _BOUNDS[type(bound)]
                yield f"{sign} {getattr(bound, name):g}"
            elif isinstance(bound, MinLen):
                yield f"(at least {bound.min_length})"


def _models(annotation: Any) -> list[tuple[type[BaseModel], str]]:
    """Sections in a field, each with ``[]`` where it is a list's item."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [(annotation, "")]
    many = "[]" if get_origin(annotation) is tuple else ""
    return [
        (model, many + inner)
        for argument in get_args(annotation)
        if argument is not Ellipsis
        for model, inner in _models(argument)
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return Default.REQUIRED.value
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return Default.SECTION.value
    return f"`{json.dumps(value)}`"


def _prose(model: type[BaseModel]) -> str:
    return " ".join(inspect.cleandoc(model.__doc__ or "").replace("``", "`").split())
