"""Writing while training goes on: a copy of the state in host memory, and a thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.errors import UserError


class HostCopy:
    """Copies of tensors in host memory, which the next copy overwrites; page-locked where they come from a GPU."""

    def __init__(self) -> None:
        """Takes no memory before the first copy."""
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def of(self, tensors: Mapping[str, Held]) -> dict[str, Held]:
        """The present values of ``tensors``, on any device. Synchronises the host: they may change afterwards.

        Raises:
            UserError: the host has no memory for them.
        """
        copies: dict[str, Held] = {}
        devices = set()
        for name, held in tensors.items():
            parts = held.parts if isinstance(held, Shards) else (Shard((), held),)
            copied = [Shard(part.offsets, self._copy((name, at), part.tensor)) for at, part in enumerate(parts)]
            copies[name] = Shards(held.shape, held.dtype, copied) if isinstance(held, Shards) else copied[0].tensor
            devices |= {part.tensor.device for part in parts if part.tensor.device.type == "cuda"}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _copy(self, key: tuple[str, int], tensor: Tensor) -> Tensor:
        found = self._buffers.get(key)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            try:
                found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            except RuntimeError as error:
                raise UserError(
                    f"train.checkpoint_async: no host memory for a copy of the state: {key[0]} takes "
                    f"{tensor.nbytes / 2**30:.2f} GiB; use train.checkpoint_async=false"
                ) from error
            self._buffers[key] = found
        return found.copy_(tensor.detach(), non_blocking=True)


class Writing:
    """Work in a thread, which ends with the process: a disk that hangs keeps nobody from ending."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Starts ``work``."""
        self._outcome: Future[None] = Future()
        threading.Thread(target=self._run, args=(work,), name="checkpoint writer", daemon=True).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001, raised again in the thread that asks
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)

    def done(self, timeout_s: float | None = 0.0) -> bool:
        """Whether the work has ended, in whatever way; waits for at most ``timeout_s``, None: as long as it takes."""
        try:
            self._outcome.exception(timeout_s)
        except TimeoutError:
            return False
        return True

    def check(self) -> None:
        """Raises what the work raised; it has ended."""
        self._outcome.result(0)
