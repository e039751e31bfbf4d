"""How far ranks are apart: one that is slow waits least in collectives, since the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from erase_rec.distributed.world import World


class Staggering:
    """Time that this rank spends in the collectives of its steps, compared with that of the others at each log."""

    def __init__(self, world: World) -> None:
        """No step yet."""
        self._world = world
        self._waited_s = 0.0
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that is one training step. What DDP's own reducer waits for is not seen."""
        before_s = self._world.waited.seconds
        yield
        self._waited_s += self._world.waited.seconds - before_s
        self._steps += 1

    def scalars(self, on_device_ms: float | None) -> dict[str, float]:
        """Run log tags, the same on every rank; none for a single one. Collective.

        Args:
            on_device_ms: where the device waits and not the host: time of the reductions of one step; None: the host's
                mean over the steps since the last call counts.

        Returns:
            ``time/stagger_ms``, the most that a rank waits longer than another in a step, and ``time/slowest_rank``,
            the one that waits least.
        """
        waited_ms = 1e3 * self._waited_s / max(self._steps, 1) if on_device_ms is None else on_device_ms
        self._waited_s, self._steps = 0.0, 0
        if self._world.size == 1:
            return {}
        found = self._world.gather_objects("staggering", waited_ms)
        return {"time/stagger_ms": max(found) - min(found), "time/slowest_rank": float(found.index(min(found)))}
