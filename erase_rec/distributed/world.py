"""The ranks that train together, and the only door to their collectives.

Only the main thread of a rank issues collectives, in an order that the plan alone decides: several threads on one
process group reach it in an order that timing decides, and ranks would then mix up tensors without an error. Each
collective is logged before it is issued, so that the logs of the ranks can be compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.distributed.stop import Stop

Value = TypeVar("Value")


class CollectiveError(RuntimeError):
    """A collective failed: another rank has ended, did not answer in time, or asked for something else."""


@dataclass
class Waited:
    """Time that the host has spent in collectives, waiting for other ranks; those of NCCL wait on the device."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Pending:
    """A collective under way; ``work`` is None where there was nothing to do."""

    work: dist.Work | None = None
    name: str = ""
    waited: Waited = field(default_factory=Waited)

    def wait(self) -> None:
        """Lets the current stream wait for the result (NCCL), or the host (gloo).

        Raises:
            CollectiveError: it failed (gloo; NCCL ends the process).
        """
        if self.work is not None:
            with _named(self.name, self.waited):
                self.work.wait()


@contextmanager
def _named(name: str, waited: Waited) -> Iterator[None]:
    """Says which collective failed, and what that means; counts its time."""
    start_s = time.perf_counter()
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].partition(". This is typically caused by")[0]  # gloo goes on for long
        raise CollectiveError(
            f"collective {name}: another rank has ended, did not answer within distributed.timeout_s, or asked for "
            f"another collective ({reason})"
        ) from error
    finally:
        waited.seconds += time.perf_counter() - start_s


def _nothing() -> None:
    pass


class Captures(Protocol):
    """CUDA graphs that hold collectives."""

    def release(self) -> None:
        """Destroys them; none can be replayed any more."""
        ...


@dataclass
class World:
    """This process among the ranks.

    Attributes:
        rank: from 0.
        size: number of ranks.
        local_rank: rank on this machine; chooses the GPU.
        grouped: a process group exists; without one (and then ``size`` is 1) collectives are the identity.
        collectives: log of what was issued.
        last_words: what the first rank does, from a thread, before another rank's failure ends the process; touches
            no device and no collective.
        waited: time that the host has spent in collectives.
        stop: whether the run is told to end, and the places at which it can.
        captures: what is released before the process group is destroyed: NCCL waits there, for ever, for every graph
            that holds one of its collectives (pytorch/pytorch#115388). Held weakly.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    grouped: bool = False
    collectives: CollectiveLog = field(default_factory=CollectiveLog)
    last_words: Callable[[], None] = _nothing
    waited: Waited = field(default_factory=Waited)
    stop: Stop = field(default_factory=Stop)
    captures: WeakSet[Captures] = field(default_factory=WeakSet)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0

    def mean(self, group: str, tensor: Tensor) -> Pending:
        """Starts the mean of ``tensor`` over the ranks, in place; ready after ``wait``."""
        if not self.grouped:
            return Pending()
        if tensor.device.type == "cuda":
            return self._reduce(group, tensor, dist.ReduceOp.AVG)
        tensor.div_(self.size)  # gloo has no mean; divided first, as DDP does
        return self._reduce(group, tensor, dist.ReduceOp.SUM)

    def sum(self, group: str, tensor: Tensor) -> Pending:
        """Starts the sum of ``tensor`` over the ranks, in place; ready after ``wait``."""
        return self._reduce(group, tensor, dist.ReduceOp.SUM) if self.grouped else Pending()

    def gather(self, group: str, tensor: Tensor) -> list[Tensor]:
        """``tensor`` of every rank, in rank order; the same shape on all."""
        if not self.grouped:
            return [tensor]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._issuing(group, tensor):
            dist.all_gather(parts, tensor.contiguous())
        return parts

    def gather_to_first(self, group: str, tensor: Tensor) -> list[Tensor] | None:
        """``tensor`` of every rank, in rank order, on the first rank; None on the others. The same shape on all."""
        if not self.grouped:
            return [tensor]
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._issuing(group, tensor):
            dist.gather(tensor.contiguous(), parts if self.is_first else None)
        return parts if self.is_first else None

    def gather_objects(self, group: str, value: Value) -> list[Value]:
        """``value`` of every rank, in rank order; small, picklable. Synchronises the host."""
        if not self.grouped:
            return [value]
        values: list[Any] = [None] * self.size
        with self._issuing(group):
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, group: str, value: Value) -> Value:
        """The first rank's ``value``; small, picklable. Synchronises the host."""
        if not self.grouped:
            return value
        holder: list[Any] = [value]
        with self._issuing(group):
            dist.broadcast_object_list(holder, src=0)
        first: Value = holder[0]
        return first

    @contextmanager
    def lent(self, group: str) -> Iterator[None]:
        """A block in which a library issues collectives of its own over these ranks, logged as one entry.

        Every rank enters it at the same place of its program. What the rank sends there is told to
        :meth:`CollectiveLog.sent`.
        """
        with self._issuing(group):
            yield

    def barrier(self, group: str) -> None:
        """Waits for every rank. Synchronises the host."""
        self.gather_objects(group, None)

    def _reduce(self, group: str, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        with self._issuing(group, tensor) as name:
            return Pending(dist.all_reduce(tensor, operation, async_op=True), name, self.waited)

    @contextmanager
    def _issuing(self, group: str, tensor: Tensor | None = None) -> Iterator[str]:
        """Logs a collective and names it in errors."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"collective {group} was asked for by thread {threading.current_thread().name}; "
                "only the main thread may, because several reach the process group in an order that timing decides"
            )
        if tensor is None:
            self.collectives.record(group, 0, torch.uint8)
        else:
            self.collectives.record(group, tensor.numel(), tensor.dtype)
        name = str(self.collectives.recent[-1])
        with _named(name, self.waited):
            yield name
