"""``_base_``: a configuration that changes another one, and how two trees are merged.

Sections are merged key by key, lists are replaced. A list whose items have names (towers, features) can be changed
item by item: ``towers: {cross: {detach: false}}`` changes one key of the tower ``cross`` of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isdir, isfile  # Path's own raise where a name is too long
from pathlib import Path

from erase_rec.config.document import KeyPath, Node, display, kind_of, read_document, unwritable
from erase_rec.errors import ConfigError, nearest

BASE = "_base_"
_HERE = Path(__file__).resolve().parents
SHIPPED = next(filter(Path.is_dir, (root / "configs" for root in (_HERE[1], _HERE[2]))), _HERE[2] / "configs")
"""The shipped configurations, found by name from anywhere: an installed package's own, or the checkout's."""

ALTERNATIVES: Mapping[KeyPath, tuple[str, ...]] = {
    ("train",): ("steps", "epochs", "samples"),
    ("data",): ("eval", "eval_fraction"),
}
"""Keys that exclude each other: where a file or an override sets one, the others of what it changes are dropped."""


def read_with_bases(path: Path) -> tuple[Node, list[str]]:
    """Reads a file and all that it is based on.

    Returns:
        The merged tree, without ``_base_``, and the problems of all files.

    Raises:
        ConfigError: a file is missing or not YAML, or is based on itself.
    """
    return _read(path.resolve(), ())


def _read(path: Path, above: tuple[Path, ...]) -> tuple[Node, list[str]]:
    document, problems = read_document(path)
    assert isinstance(document.value, dict)
    entries = dict(document.value)
    base = entries.pop(BASE, None)
    merged = Node({}, document.place)
    for name, place in [] if base is None else _base_names(base):
        target = (path.parent / name).resolve()
        if not isfile(target) and isfile(SHIPPED / name):
            target = (SHIPPED / name).resolve()
        if target in (*above, path):
            chain = " -> ".join(display(file) for file in (*above, path, target))
            raise ConfigError([f"{place}: {BASE}: a file cannot be based on itself: {chain}"])
        if not isfile(target):
            beside = names_beside(target, "*.y*ml")
            raise ConfigError(
                [
                    f"{place}: {BASE}: {display(target)} not found; the path is relative to the file that names it, "
                    f"or to {display(SHIPPED)}"
                    f"{nearest(target.name, beside)}"
                ]
            )
        inherited, more = _read(target, (*above, path))
        problems += more
        merged, more = merge(merged, inherited)
        problems += more
    merged, more = merge(merged, Node(entries, document.place))
    return merged, problems + more


def _base_names(base: Node) -> list[tuple[str, str]]:
    """File names and the places that name them."""
    items = base.value if isinstance(base.value, tuple) else () if base.value is None else (base,)
    names = [(item.value, item.place) for item in items if isinstance(item.value, str)]
    if len(names) < len(items):
        found = kind_of(base.plain())
        raise ConfigError([f"{base.place}: {BASE}: expected a file name or a list of them, found {found}"])
    if unfit := [f"{place}: {BASE}: {problem}" for name, place in names if (problem := unwritable(name))]:
        raise ConfigError(unfit)
    return names


def names_beside(path: Path, pattern: str) -> list[str]:
    """Names in the folder of ``path`` that match, sorted; none where there is no such folder."""
    return sorted(file.name for file in path.parent.glob(pattern)) if isdir(path.parent) else []


def merge(base: Node, patch: Node, path: KeyPath = ()) -> tuple[Node, list[str]]:
    """``base`` changed by ``patch``; neither is modified.

    Returns:
        The merged tree and the problems: a patched list item that does not exist.
    """
    if isinstance(patch.value, dict) and isinstance(base.value, dict):
        return _merge_sections(base.value, patch, path)
    if isinstance(patch.value, dict) and isinstance(base.value, tuple):
        return _patch_items(base, patch.value, path)
    return patch, []


def _merge_sections(base: dict[str, Node], patch: Node, path: KeyPath) -> tuple[Node, list[str]]:
    assert isinstance(patch.value, dict)
    alternatives = ALTERNATIVES.get(path, ())
    chosen = any(patch.value[key].value not in (None, ()) for key in alternatives if key in patch.value)
    entries = {key: node for key, node in base.items() if not (chosen and key in alternatives)}
    problems = []
    for key, value in patch.value.items():
        if key in entries:
            entries[key], more = merge(entries[key], value, (*path, key))
            problems += more
        else:
            entries[key] = value
    return Node(entries, patch.place), problems


def _patch_items(base: Node, patch: dict[str, Node], path: KeyPath) -> tuple[Node, list[str]]:
    assert isinstance(base.value, tuple)
    items, problems = list(base.value), []
    for key, value in patch.items():
        position = base.position(key, path)
        if position is None:
            names = [name for name in base.item_names(path) if name is not None]
            where = ".".join(map(str, path))
            problems.append(
                f"{value.place}: {where}.{key}: no item of that name or number{nearest(key, names)}"
                f" (there are: {', '.join(names) or f'{len(items)} nameless items'}; to replace them all, give a list)"
            )
            continue
        item = items[position]
        if isinstance(item.value, str) and isinstance(value.value, dict):
            item = Node({"name": item}, item.place)
        items[position], more = merge(item, value, (*path, position))
        problems += more
    return Node(tuple(items), base.place), problems
