"""The ranks over a process group of their own, for collectives that one thread issues beside the main one.

:class:`erase_rec.distributed.world.World` lets the main thread alone issue collectives, since two threads on one group
reach it in an order that timing decides. A group that one thread alone uses has no such order to lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from erase_rec.distributed.world import CollectiveError, World

Value = TypeVar("Value")


class RanksBeside:
    """This process among the ranks of ``world``, over gloo; ends with the world's own group.

    Attributes:
        rank: from 0.
        group: for libraries that issue collectives of their own.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        """Collective, by the main thread; every wait for another rank takes at most ``timeout_s``."""
        assert world.grouped
        self.rank = world.rank
        self._size = world.size
        with world.lent("group_beside"):
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is common to all."""
        return self.rank == 0

    def gather_objects(self, name: str, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order; small, picklable. Synchronises the host.

        Raises:
            CollectiveError: another rank has ended, or does not answer in time.
        """
        values: list[Any] = [None] * self._size
        with self.named(name):
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """A block with collectives over these ranks, whose failure names it."""
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"collective {name}, beside training: another rank has ended, or did not answer within "
                f"distributed.timeout_s ({str(error).splitlines()[0]})"
            ) from error
