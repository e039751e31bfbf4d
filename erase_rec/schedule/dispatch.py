"""Who launches an early backward: the main thread (blocking) or a worker (non-blocking)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from erase_rec.schedule.program import Op


class Dispatch(Protocol):
    """Launches operations; their order on each thread is that of the calls."""

    def launch(self, op: Op, run: Callable[[], None]) -> None:
        """Calls ``run`` here, or hands it to the worker of ``op``."""
        ...

    def join(self, key: str) -> None:
        """Blocks the host until the operation of ``key`` is launched. Raises what it raised, once no worker is busy."""
        ...

    def drain(self) -> list[BaseException]:
        """Blocks the host until no worker is busy, forgets what they did, and returns what they raised."""
        ...


class BlockingDispatch:
    """Everything on the calling thread."""

    def launch(self, op: Op, run: Callable[[], None]) -> None:
        """Calls ``run``."""
        run()

    def join(self, key: str) -> None:
        """Nothing to wait for."""

    def drain(self) -> list[BaseException]:
        """Nothing to wait for."""
        return []


class WorkerDispatch:
    """Workers that take operations first in, first out.

    A worker sets what is a thread's own in torch: device, grad mode and the autograd engine's use of threads.
    The stream is set by each operation. With the engine's threads off, ``torch.autograd`` runs a backward on the thread
    that calls it; with them on, one thread a device runs the backwards of all callers, in an order that timing decides.
    """

    def __init__(self, workers: int, device: torch.device, *, engine_threads: bool = False) -> None:
        """Starts no thread before it is needed.

        Args:
            workers: their number.
            device: that they work on.
            engine_threads: let the autograd engine use its own threads for CUDA nodes.
        """
        self._device, self._engine_threads = device, engine_threads
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"early-backward-{number}", initializer=self._prepare_thread)
            for number in range(workers)
        ]
        self._futures: dict[str, Future[None]] = {}

    def launch(self, op: Op, run: Callable[[], None]) -> None:
        """Hands operations of a worker to it."""
        if op.worker:
            self._futures[op.key] = self._pools[op.worker - 1].submit(run)
        else:
            run()

    def join(self, key: str) -> None:
        """Waits for one operation; on an error for all, so that none is at work when it is raised."""
        error = self._futures[key].exception()
        if error is not None:
            self.drain()
            raise error

    def drain(self) -> list[BaseException]:
        """Waits for all."""
        wait(self._futures.values())
        errors = [future.exception() for future in self._futures.values()]
        self._futures.clear()
        return [error for error in errors if error is not None]

    def _prepare_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_grad_enabled(True)
        torch.autograd.set_multithreading_enabled(self._engine_threads)


def make_dispatch(dispatch: str, workers: int, device: torch.device) -> Dispatch:
    """The dispatch that a plan names."""
    return WorkerDispatch(workers, device) if dispatch == "non_blocking" else BlockingDispatch()
