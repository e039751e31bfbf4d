"""How long training stands still for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from erase_rec.throughput import Clock


class Stalls:
    """Times of the main stream, or of the host, in which a checkpoint was saved and no step ran."""

    def __init__(self, clock: Clock) -> None:
        """See :func:`erase_rec.throughput.clock_for`."""
        self._clock = clock
        self._open: list[tuple[Any, Any]] = []
        self._total_s = 0.0
        self._saves = 0

    @contextmanager
    def standing_still(self, *, saves: int = 1) -> Iterator[None]:
        """A block in which training does not go on; ``saves`` checkpoints are begun in it."""
        start = self._clock.mark()
        yield
        self._open.append((start, self._clock.mark()))
        self._saves += saves

    def scalars(self) -> dict[str, float]:
        """Run log tag: seconds since the last call; empty where there were none. May wait for the device."""
        if not self._open:
            return {}
        seconds = sum(self._clock.seconds(start, end) for start, end in self._open)
        self._open.clear()
        self._total_s += seconds
        return {"time/checkpoint_stall_s": seconds}

    def sentence(self) -> str | None:
        """All of this process, for people; None: nothing was saved."""
        self.scalars()
        if not self._saves:
            return None
        count = "1 checkpoint" if self._saves == 1 else f"{self._saves} checkpoints"
        return f"{count} saved; training stood still for {self._total_s:.2f} s"
