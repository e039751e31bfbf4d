"""The ranks that train together, and the only door to their collectives.

Only the main thread of a rank issues collectives, in an order that the plan alone decides: several threads on one
process group reach it in an order that timing decides, and ranks would then mix up tensors without an error. Each
collective is logged before it is issued, so that the logs of the ranks can be compared.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from erase_rec.distributed.collective_log import CollectiveLog

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pending:
    """A collective under way; ``work`` is None where there was nothing to do."""

    work: dist.Work | None = None

    def wait(self) -> None:
        """Lets the current stream wait for the result (NCCL), or the host (gloo)."""
        if self.work is not None:
            self.work.wait()


@dataclass
class World:
    """This process among the ranks.

    Attributes:
        rank: from 0.
        size: number of ranks.
        local_rank: rank on this machine; chooses the GPU.
        grouped: a process group exists; without one (and then ``size`` is 1) collectives are the identity.
        collectives: log of what was issued.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    grouped: bool = False
    collectives: CollectiveLog = field(default_factory=CollectiveLog)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0

    def mean(self, group: str, tensor: Tensor) -> Pending:
        """Starts the mean of ``tensor`` over the ranks, in place; ready after ``wait``."""
        if not self.grouped:
            return Pending()
        self._enter(group, tensor)
        if tensor.device.type == "cuda":
            return Pending(dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True))
        tensor.div_(self.size)  # gloo has no mean; divided first, as DDP does
        return Pending(dist.all_reduce(tensor, async_op=True))

    def sum(self, group: str, tensor: Tensor) -> Pending:
        """Starts the sum of ``tensor`` over the ranks, in place; ready after ``wait``."""
        if not self.grouped:
            return Pending()
        self._enter(group, tensor)
        return Pending(dist.all_reduce(tensor, async_op=True))

    def gather(self, group: str, tensor: Tensor) -> list[Tensor]:
        """``tensor`` of every rank, in rank order; the same shape on all."""
        if not self.grouped:
            return [tensor]
        self._enter(group, tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def gather_objects(self, group: str, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order; small, picklable. Synchronises the host."""
        if not self.grouped:
            return [value]
        self._enter(group, None)
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, group: str, value: Value) -> Value:
        """The first rank's ``value``; small, picklable. Synchronises the host."""
        if not self.grouped:
            return value
        self._enter(group, None)
        holder: list[Any] = [value]
        dist.broadcast_object_list(holder, src=0)
        first: Value = holder[0]
        return first

    def barrier(self, group: str) -> None:
        """Waits for every rank. Synchronises the host."""
        self.gather_objects(group, None)

    def _enter(self, group: str, tensor: Tensor | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"collective {group} was asked for by thread {threading.current_thread().name}; "
                "only the main thread may, because several reach the process group in an order that timing decides"
            )
        if tensor is None:
            self.collectives.record(group, 0, torch.uint8)
        else:
            self.collectives.record(group, tensor.numel(), tensor.dtype)
