"""What was asked of the process group, in order. Ranks whose logs differ would wait for each other, or mix tensors."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import torch

KEPT_ENTRIES = 256


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        step: number of the step that issued it.
        group: what is reduced or gathered, such as ``tower:cross`` or ``rest.0``.
        numel: elements a rank.
        dtype: their type.
    """

    step: int
    group: str
    numel: int
    dtype: torch.dtype


class CollectiveLog:
    """Collects entries; keeps the last ones and a digest of all.

    Attributes:
        step: number that the next entries carry; the trainer advances it.
        recent: the last entries, oldest first.
    """

    def __init__(self) -> None:
        self.step = 0
        self.recent: deque[Collective] = deque(maxlen=KEPT_ENTRIES)
        self._hash = hashlib.sha256()

    def record(self, group: str, numel: int, dtype: torch.dtype) -> None:
        """Adds an entry of the current step."""
        entry = Collective(self.step, group, numel, dtype)
        self.recent.append(entry)
        self._hash.update(f"{entry}\n".encode())

    def digest(self) -> str:
        """Hexadecimal digest of every entry so far."""
        return self._hash.hexdigest()
