"""YAML files as trees that remember where each value was written.

The schema, not the YAML text, decides what a value is: every scalar is text, ``null``, ``~`` and nothing aside.
So ``on``, ``0123``, ``2024-01-01`` and ``1e-3`` arrive as written. Quoted scalars are text always.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from erase_rec.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the root of a configuration."""

NAMED_LISTS: frozenset[KeyPath] = frozenset({("towers",), ("features", "dense"), ("features", "sparse")})
"""Lists whose items have a ``name`` by which they can be changed."""

_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = frozenset({"str", "null", "seq", "map", "merge"})

MAX_BYTES = 4 << 20
MAX_DEPTH = 40
"""Sections and lists inside each other; a configuration has 6."""
MAX_VALUES = 100_000
"""Values of a file, each alias counted with all that it stands for: a few lines of aliases can stand for billions."""


@dataclass(frozen=True)
class Node:
    """A value and its place: ``file:line`` of its key (or of itself in a list), or the override that it came from."""

    value: str | tuple[Node, ...] | dict[str, Node] | None
    place: str

    def plain(self) -> Any:
        """The value without places: text, None, lists and dictionaries."""
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value

    def item_names(self, path: KeyPath) -> list[str | None]:
        """Name of each item of the list at ``path``: its ``name``, or itself where it is bare text; else None."""
        assert isinstance(self.value, tuple)
        return [_item_name(item) if path in NAMED_LISTS else None for item in self.value]

    def position(self, key: str, path: KeyPath) -> int | None:
        """Position of the item that ``key`` names in the list at ``path``: by its name, or else by a number."""
        names = self.item_names(path)
        if key in names:
            return names.index(key)
        if re.fullmatch("[0-9]+", key) and int(key) < len(names):
            return int(key)
        return None

    def child(self, key: str | int, path: KeyPath) -> Node | None:
        """The value under ``key`` of the section or list at ``path``; list items go by name or position."""
        if isinstance(self.value, dict):
            return self.value.get(str(key))
        if isinstance(self.value, tuple):
            position = self.position(str(key), path) if isinstance(key, str) else key
            return None if position is None or position >= len(self.value) else self.value[position]
        return None

    def descend(self, path: KeyPath) -> Iterator[Node]:
        """The values on the way to ``path``, from this one on, as far as they were written."""
        node: Node | None = self
        for depth in range(len(path) + 1):
            if node is None:
                return
            yield node
            if depth < len(path):
                node = node.child(path[depth], path[:depth])

    def place_of(self, path: KeyPath) -> str:
        """Place of the value at ``path``, or of the innermost section around it that was written."""
        return list(self.descend(path))[-1].place

    def shown(self, path: KeyPath) -> str:
        """``path`` as a user writes it in an override: keys joined by dots, list items by name."""
        parts = [str(key) for key in path]
        for depth, node in enumerate(self.descend(path)):
            key = path[depth] if depth < len(path) else None
            if isinstance(key, int) and isinstance(node.value, tuple) and key < len(node.value):
                parts[depth] = node.item_names(path[:depth])[key] or str(key)
        return ".".join(parts)


def _item_name(item: Node) -> str | None:
    if isinstance(item.value, dict):
        named = item.value.get("name")
        return named.value if named is not None and isinstance(named.value, str) else None
    return item.value if isinstance(item.value, str) else None


def display(path: Path) -> str:
    """``path`` relative to the current folder where it lies inside it."""
    path = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def read_document(path: Path) -> tuple[Node, list[str]]:
    """Reads one YAML file.

    Returns:
        The tree (an empty file is an empty section) and its problems, such as a key given twice.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    shown = display(path)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError([f"{shown}: has {size:,} bytes, more than the {MAX_BYTES:,} of any configuration"])
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{shown}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{shown}: is not UTF-8 text (byte {error.start}); save it as UTF-8"]) from error
    return parse_document(text, shown)


def node_of(value: Any, place: str) -> Node:
    """Plain Python data as a tree: what the text of a YAML file would be read as.

    Args:
        value: mappings, sequences, texts, numbers, booleans and None.
        place: where it was written, for messages.

    Raises:
        ConfigError: another type.
    """
    if value is None or isinstance(value, str):
        return Node(value, place)
    if isinstance(value, bool | int | float | Path):
        return Node(str(value), place)
    if isinstance(value, Mapping):
        return Node({str(key): node_of(item, place) for key, item in value.items()}, place)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return Node(tuple(node_of(item, place) for item in value), place)
    raise ConfigError(
        [f"{place}: expected texts, numbers, booleans, lists and dictionaries, found {type(value).__name__} {value!r}"]
    )


def parse_value(text: str, place: str) -> Node:
    """Reads one value of the command line, such as ``[a, b]`` or ``{kind: bce}``.

    Raises:
        ConfigError: the text is not a YAML value.
    """
    reader = _Reader(None, place)
    node = reader.read(_compose(text, place, is_file=False), place)
    if reader.problems:
        raise ConfigError(reader.problems)
    return node


def parse_document(text: str, shown: str) -> tuple[Node, list[str]]:
    """Reads the text of a YAML file that messages call ``shown``; see :func:`read_document`."""
    composed = _compose(text, shown, is_file=True)
    reader = _Reader(shown, f"{shown}:1")
    root = Node({}, f"{shown}:1") if composed is None else reader.read(composed, f"{shown}:1")
    if root.value is None:
        root = Node({}, root.place)
    if not isinstance(root.value, dict):
        raise ConfigError([f"{root.place}: expected a section of `key: value` lines, found {kind_of(root.plain())}"])
    return root, reader.problems


def unwritable(text: str) -> str | None:
    """What is wrong with a text that no file name can hold, or no file."""
    if "\0" in text:
        return f"the text {kind_of(text)} holds a NUL character; remove it"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return f"the text {kind_of(text)} holds half a character (a surrogate), which no file can; write it as UTF-8"
    return None


def kind_of(value: Any) -> str:
    """How a message names a found value."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:56]}...'"


class _TooDeepError(yaml.MarkedYAMLError):
    """Sections and lists inside each other, more than :data:`MAX_DEPTH`."""


class TextLoader(yaml.SafeLoader):
    """PyYAML's parser with the two implicit types that are left, and a bound on its recursion."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, the attribute PyYAML reads
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node, unless it is too deep inside others."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeepError(problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


TextLoader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|)\Z"), ["~", "n", ""])
TextLoader.add_implicit_resolver(_MERGE, re.compile(r"<<\Z"), ["<"])


def _compose(text: str, shown: str, *, is_file: bool) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=TextLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark and is_file else shown
        if isinstance(error, _TooDeepError):
            raise ConfigError([f"{where}: more than {MAX_DEPTH} sections and lists inside each other"]) from None
        context = f" {error.context}" if error.context else ""
        raise ConfigError(
            [f"{where}: not YAML:{context} {error.problem}; quote text that holds : # [ ] {{ }} & *"]
        ) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError([f"{shown}: not YAML text: {error.reason} at character {error.position}"]) from None
    return node


class _Reader:
    """Turns PyYAML's nodes into :class:`Node`, noting what YAML allows and a configuration does not."""

    def __init__(self, file: str | None, place: str) -> None:
        self.problems: list[str] = []
        self._file, self._place = file, place
        self._open: set[int] = set()
        self._num_values = 0

    def read(self, node: yaml.Node | None, place: str) -> Node:
        if node is None:
            return Node(None, place)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ConfigError([f"{place}: more than {MAX_VALUES:,} values, aliases counted with what they stand for"])
        if id(node) in self._open:
            self.problems.append(f"{place}: the alias refers to a section that it is part of")
            return Node(None, place)
        if node.tag.rpartition(":")[2] not in _PLAIN_TAGS:
            self.problems.append(f"{place}: the tag {node.tag.rpartition(':')[2]!r} has no meaning here; leave it out")
        self._open.add(id(node))
        try:
            return Node(self._value(node), place)
        finally:
            self._open.remove(id(node))

    def _value(self, node: yaml.Node) -> str | tuple[Node, ...] | dict[str, Node] | None:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.read(item, self._at(item)) for item in node.value)
        if node.tag == _NULL:
            return None
        text = str(node.value)
        if (problem := unwritable(text)) is not None:
            self.problems.append(f"{self._at(node)}: {problem}")
        return text

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self._at(key_node)
            if key_node.tag == _MERGE:
                merged = {**self._merged(value_node, place), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _NULL:
                self.problems.append(f"{place}: a key must be text; quote it if it is")
                continue
            key = str(key_node.value)
            if (problem := unwritable(key)) is not None:
                self.problems.append(f"{place}: {problem}")
            if key in own:
                self.problems.append(f"{place}: {key}: the key is given twice, first at {own[key].place}; keep one")
            own[key] = self.read(value_node, place)
        return {**merged, **own}

    def _merged(self, node: yaml.Node, place: str) -> dict[str, Node]:
        """Entries of ``<<``: a section, or a list of sections of which the first has precedence."""
        sections = node.value if isinstance(node, yaml.SequenceNode) else [node]
        entries: dict[str, Node] = {}
        for section in sections:
            value = self.read(section, place).value
            if isinstance(value, dict):
                entries = {**value, **entries}
            else:
                self.problems.append(f"{place}: <<: expected a section or a list of sections")
        return entries

    def _at(self, node: yaml.Node) -> str:
        return self._place if self._file is None else f"{self._file}:{node.start_mark.line + 1}"
