"""What sets runs apart: their configurations, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHOWN_KEYS = 3


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a configuration by key; list entries with a name go by it."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flat(entry, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value and all(isinstance(entry, Mapping) and "name" in entry for entry in value):
        for entry in value:
            yield from flat(entry, f"{prefix}.{entry['name']}")
    else:
        yield prefix, value


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys in which two flat configurations differ, with the second one's values."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return [f"{key}={other.get(key)}" for key in keys]


def shortened(found: list[str]) -> str:
    """The first few differences and how many more there are; empty where there are none."""
    more = f" and {len(found) - SHOWN_KEYS} more" if len(found) > SHOWN_KEYS else ""
    return ", ".join(found[:SHOWN_KEYS]) + more
