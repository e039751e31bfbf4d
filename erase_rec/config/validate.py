"""Checks a document against the schema, in the project's words and all problems at once.

Pydantic finds what is wrong; this module says it: key path, value found, what was expected, nearest valid name. What
is wrong in itself is then left out (or, where it is required, replaced by a stand-in), so that the rules on
combinations can still be asked about the rest of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from erase_rec.config.document import KeyPath, kind_of
from erase_rec.config.schema import Config
from erase_rec.config.types import Params
from erase_rec.errors import closest, nearest

STAND_IN = "unknown"
"""Takes the place of a required text (``name``, ``kind``) that is missing or wrong."""
WITHDRAWN = {("loss", "weight_floor"), ("loss", "teacher"), ("over_arch", "teacher_decay")}
"""Keys of local objectives that gained nothing on any data set they were measured on, with their sections."""


@dataclass(frozen=True)
class Problem:
    """What is wrong at one key.

    Attributes:
        path: the key.
        message: found, expected, way out.
    """

    path: KeyPath
    message: str


@dataclass(frozen=True)
class Validated:
    """Outcome of :func:`validate_config`.

    Attributes:
        config: what could be read; None where too much is missing.
        problems: what is wrong.
        untrusted: keys whose value in ``config`` is not the user's.
    """

    config: Config | None
    problems: tuple[Problem, ...]
    untrusted: frozenset[KeyPath]

    def trusts(self, path: KeyPath) -> bool:
        """Whether everything at, under and above ``path`` is as the user wrote it."""
        return not any(path[: len(bad)] == bad[: len(path)] for bad in self.untrusted)


def validate_config(document: dict[str, Any]) -> Validated:
    """Checks a plain document. ``document`` is changed: what is wrong is taken out."""
    problems: list[Problem] = []
    untrusted: set[KeyPath] = set()
    config: Config | None = None
    # Taking out a wrong value can leave a required one missing, and a stand-in section misses its own keys.
    for _ in range(4):
        try:
            config = Config.model_validate(document)
            break
        except ValidationError as error:
            for detail in _details(error):
                path = detail["loc"]
                if path not in untrusted:
                    problems.append(Problem(path, _message(detail, Config)))
                untrusted |= {path, *_meant(path)}
                _mend(document, path, missing=detail["type"] == "missing")
    return Validated(config, _without_consequences(problems), frozenset(untrusted))


def validate_params(
    model: type[Params], values: Mapping[str, Any], path: KeyPath
) -> tuple[Params | None, list[Problem]]:
    """Checks the ``params`` of a component, which stand at ``path``, against its schema."""
    try:
        return model.model_validate(dict(values)), []
    except ValidationError as error:
        return None, [Problem((*path, *detail["loc"]), _message(detail, model)) for detail in _details(error)]


def _details(error: ValidationError) -> list[ErrorDetails]:
    """What is wrong; not that a list is too short once its wrong items are left out."""
    details = error.errors(include_url=False)
    return [
        detail
        for detail in details
        if detail["type"] != "too_short" or len(detail["input"]) < detail["ctx"]["min_length"]
    ]


def _without_consequences(problems: list[Problem]) -> tuple[Problem, ...]:
    """Leaves out the keys that are missing in a section that is itself missing."""
    paths = [problem.path for problem in problems]
    return tuple(
        problem
        for problem in problems
        if not any(len(path) < len(problem.path) and problem.path[: len(path)] == path for path in paths)
    )


def _mend(document: dict[str, Any], path: KeyPath, *, missing: bool) -> None:
    """Takes a wrong value out; puts a stand-in where a required one is missing."""
    holder: Any = document
    steps: tuple[Any, ...] = path[:-1]
    for depth, key in enumerate(steps):
        below = holder[key] if isinstance(holder, list) else holder.get(key)
        if below is None:
            return  # taken out with an earlier problem
        if isinstance(below, list) and (path[0] not in {"towers", "features"} or depth > 1):
            # A list with a wrong value in it is taken out whole; the positions of towers and features must stay.
            path = path[: depth + 1]
            break
        holder = below
    last: Any = path[-1]
    if missing:
        holder[last] = STAND_IN if last in {"name", "kind"} else [{}] if last == "towers" else {}
    elif isinstance(holder, list):
        holder[last] = {}
    else:
        holder.pop(last, None)


def _message(detail: ErrorDetails, root: type[BaseModel]) -> str:
    found = kind_of(detail["input"])
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            key, valid = str(detail["loc"][-1]), _valid_keys(root, detail["loc"][:-1])
            if detail["loc"][-2:] in WITHDRAWN:
                return "unknown key: withdrawn, as no data set gained by it (docs/objectives.md); leave it out"
            return f"unknown key{nearest(key, valid)} (valid keys here: {', '.join(valid) or 'none'})"
        case "missing":
            return "a required key is missing"
        case "value_error":
            return str(context["error"])
        case "literal_error":
            valid = re.findall("'([^']*)'", context["expected"])
            hint = nearest(str(detail["input"]), valid)
            return f"expected one of {', '.join(valid)}, found {found}{hint}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal" as bound:
            words = {"greater_than": "above", "greater_than_equal": "of at least", "less_than": "below"}
            limit = next(iter(context.values()))
            return f"expected a number {words.get(bound, 'of at most')} {limit:g}, found {found}"
        case "string_pattern_mismatch":
            return f"expected a letter, then letters, digits and underscores, found {found}"
        case "too_short":
            return f"expected a list of {context['min_length']} or more, found {context['actual_length']}"
        case "tuple_type" | "list_type":
            return f"expected a list, found {found}"
        case "model_type" | "model_attributes_type" | "dict_type":
            hint = "; leave the key out for the defaults" if detail["input"] is None else ""
            return f"expected a section of keys, found {found}{hint}"
        case _:
            return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {found}"


def _meant(path: KeyPath) -> list[KeyPath]:
    """The key that a misspelt one stood for."""
    if not path:  # what is wrong is the whole document
        return []
    key = closest(str(path[-1]), _valid_keys(Config, path[:-1]))
    return [] if key is None else [(*path[:-1], key)]


def _valid_keys(root: type[BaseModel], path: KeyPath) -> list[str]:
    section: type[BaseModel] | None = root
    for key in path:
        if section is not None and isinstance(key, str):
            field = section.model_fields.get(key)
            section = None if field is None else _section_of(field.annotation)
    return [] if section is None else list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section type inside ``X | None``, ``tuple[X, ...]`` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, get_args(annotation))), None)
