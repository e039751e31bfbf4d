"""``key=value`` of the command line: a change to the configuration under the same rules as a file's.

The key is a path (``optimizer.dense.lr``); list items go by name or position (``towers.cross.loss.weight``,
``over_arch.hidden.0``). The value is text, or YAML where it starts with ``[``, ``{`` or a quote, or is ``null``; so
``data.train=*.csv`` and ``data.params.delimiter=|`` need no second layer of quotes. One of ``train.steps``,
``train.epochs`` and ``train.samples`` replaces the others, as do ``data.eval`` and ``data.eval_fraction``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from erase_rec.config.document import MAX_DEPTH, Node, parse_value, unwritable
from erase_rec.errors import ConfigError

_Entry = tuple[tuple[str, ...], Node]


def parse_overrides(overrides: Sequence[str], document: Node) -> tuple[Node, list[str]]:
    """Reads overrides as one tree that is to be merged over ``document``.

    Args:
        overrides: ``key=value`` texts.
        document: what they will change; says where a name that holds dots ends.

    Returns:
        The tree and its problems: no ``=``, an empty key, a value that is no YAML, a key given twice.
    """
    entries: list[_Entry] = []
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        place = f"override {override!r}"
        if not equals:
            problems.append(f"{place}: expected key=value, such as train.steps=200; there is no '='")
            continue
        if (problem := unwritable(override)) is not None:
            problems.append(f"{place}: {problem}")
            continue
        if key.count(".") >= MAX_DEPTH:
            problems.append(f"{place}: more than {MAX_DEPTH} sections inside each other")
            continue
        parts = _split(key.strip(), document)
        if not all(parts):
            problems.append(f"{place}: expected a key before the '=', such as train.steps, found {key!r}")
            continue
        try:
            entries.append((parts, _value(text, place)))
        except ConfigError as error:
            problems += error.problems
    problems += _contradictions(entries)
    return _tree(entries) if entries else Node({}, document.place), problems


def _value(text: str, place: str) -> Node:
    text = text.strip()
    if text in {"", "~", "null"} or text[0] in "[{\"'":
        return parse_value(text, place)
    return Node(text, place)


def _split(key: str, document: Node) -> tuple[str, ...]:
    """Splits at dots, except inside the name of an item of a list of ``document``."""
    parts: list[str] = []
    node: Node | None = document
    rest: str | None = key
    while rest is not None:
        path = tuple(parts)
        names = node.item_names(path) if node is not None and isinstance(node.value, tuple) else []
        fits = [name for name in names if name and (rest == name or rest.startswith(f"{name}."))]
        part = max(fits, key=len, default=rest.partition(".")[0])
        rest = rest[len(part) + 1 :] if len(rest) > len(part) else None
        parts.append(part)
        node = None if node is None else node.child(part, path)
    return tuple(parts)


def _contradictions(entries: Sequence[_Entry]) -> list[str]:
    return [
        f"{second.place}: the same key is set by {first.place} too; keep one"
        for (first_key, first), (second_key, second) in combinations(entries, 2)
        if first_key[: len(second_key)] == second_key[: len(first_key)]
    ]


def _tree(entries: Sequence[_Entry]) -> Node:
    groups: dict[str, list[_Entry]] = {}
    for parts, value in entries:
        groups.setdefault(parts[0], []).append((parts[1:], value))
    sections = {key: dict(group) for key, group in groups.items()}
    # Where a key is given twice, which was reported, the whole value goes before its parts.
    values = {key: group.get(()) or _tree(list(group.items())) for key, group in sections.items()}
    return Node(dict(values), entries[0][1].place)
