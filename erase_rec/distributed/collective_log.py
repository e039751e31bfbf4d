"""What was asked of the process group, in order. Ranks whose logs differ would wait for each other, or mix tensors."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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

    def __str__(self) -> str:
        return f"{self.group} at step {self.step} ({self.numel} x {str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class LogTail:
    """The last entries of a log, as texts.

    Attributes:
        count: entries of the whole log.
        entries: the last of them, oldest first.
    """

    count: int
    entries: list[str]

    def entry(self, index: int) -> str | None:
        """Entry ``index`` of the whole log; None where it is not kept or not there."""
        position = index - (self.count - len(self.entries))
        return self.entries[position] if 0 <= position < len(self.entries) else None


class CollectiveLog:
    """Collects entries; keeps the last ones and a digest of all.

    Attributes:
        step: number that the next entries carry; the trainer advances it.
        recent: the last entries, oldest first.
        count: entries so far.
        sent_bytes: bytes that this rank gave to collectives, by group; no part of the digest, since ranks that exchange
            ids and pooled rows give different numbers of them.
    """

    def __init__(self) -> None:
        self.step = 0
        self.recent: deque[Collective] = deque(maxlen=KEPT_ENTRIES)
        self.count = 0
        self.sent_bytes: Counter[str] = Counter()
        self._hash = hashlib.sha256()
        self._captured: list[Collective] | None = None

    def record(self, group: str, numel: int, dtype: torch.dtype) -> None:
        """Adds an entry of the current step."""
        entry = Collective(self.step, group, numel, dtype)
        if self._captured is None:
            self._add(entry)
        else:
            self._captured.append(entry)

    def sent(self, group: str, count: int) -> None:
        """Adds ``count`` bytes that this rank gave to a collective of ``group``, besides what its entry says."""
        self.sent_bytes[group] += count

    @contextmanager
    def capturing(self) -> Iterator[list[Collective]]:
        """Entries go to the list that this gives, and not into the log: a capture issues nothing."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def repeat(self, captured: Iterable[Collective]) -> None:
        """Adds what a replay of a capture issues, as entries of the current step."""
        for entry in captured:
            self.record(entry.group, entry.numel, entry.dtype)

    def _add(self, entry: Collective) -> None:
        self.recent.append(entry)
        self.count += 1
        self.sent_bytes[entry.group] += entry.numel * entry.dtype.itemsize
        self._hash.update(f"{entry}\n".encode())

    def digest(self) -> str:
        """Hexadecimal digest of every entry so far."""
        return self._hash.hexdigest()

    def tail(self, entries: int = KEPT_ENTRIES) -> LogTail:
        """The last entries; may be called from another thread."""
        return LogTail(self.count, [str(entry) for entry in tuple(self.recent)[-entries:]])


def first_difference(tails: Mapping[int, LogTail]) -> str | None:
    """Where the ranks' logs, by rank, first hold different entries; None where one only goes on after another."""
    first = max(tail.count - len(tail.entries) for tail in tails.values())
    for index in range(first, max(tail.count for tail in tails.values())):
        found = {rank: entry for rank, tail in tails.items() if (entry := tail.entry(index)) is not None}
        if len(set(found.values())) > 1:
            asked = ", ".join(f"rank {rank} for {entry}" for rank, entry in found.items())
            return f"the ranks asked for different collectives (number {index}): {asked}"
    return None


def standing(tails: Mapping[int, LogTail], silent: Mapping[int, LogTail | None]) -> list[str]:
    """Which ranks do not answer, and which are behind, each with the last collective that is known of it.

    Args:
        tails: of the ranks that answer.
        silent: of the others, as they were last heard of; None: never.
    """
    sentences = [f"rank {rank} does not answer{_last(tail)}" for rank, tail in silent.items()]
    furthest = max((tail.count for tail in tails.values()), default=0)
    behind = {rank: tail for rank, tail in tails.items() if tail.count < furthest}
    sentences += [f"rank {rank} is behind{_last(tail)}" for rank, tail in behind.items()]
    return sentences


def _last(tail: LogTail | None) -> str:
    return (
        f", the last collective that it is known to have asked for is {tail.entries[-1]}"
        if tail and tail.entries
        else ""
    )
