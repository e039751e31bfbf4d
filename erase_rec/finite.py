"""Stops training on a nan or infinite loss, before poisoned parameters reach a checkpoint."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from erase_rec.distributed.world import CollectiveError
from erase_rec.errors import UserError

SHOWN_ROWS = 5
LAG_STEPS = 8
"""Steps that the host may be ahead of the last one whose losses it has seen, on CUDA."""
POLL_S = 5e-5
"""Time between two looks at the device: short beside the steps that the host is ahead."""


class NonFiniteLossError(UserError):
    """A loss is nan or infinite. Names the step, the losses (a tower's or ``over_arch``) and rows of the batch.

    Attributes:
        step: the number of the step.
    """

    def __init__(self, step: int, problem: str) -> None:
        """``problem`` goes on after the step's number."""
        super().__init__(f"step {step}: {problem}")
        self.step = step


@dataclass
class _Pending:
    step: int
    names: tuple[str, ...]
    on_device: Tensor  # kept, so that its memory is not used again before the copy is done
    finite: Tensor
    row_ids: Tensor
    copied: torch.cuda.Event


class FiniteGuard:
    """Looks at the losses of each step.

    On the CPU :meth:`check` raises before the optimizer, and parameters stay untouched. On CUDA reading a value in
    every step would stall the launches, so :meth:`check` copies the flags asynchronously, on a stream of its own, so
    that the main stream goes from one step straight to the next; :meth:`poll`, at the start of
    a step and before its first collective, reads those of the step :data:`LAG_STEPS` before it, and :meth:`drain` all:
    call it before anything is saved or evaluated. So at most :data:`LAG_STEPS` poisoned updates are made in memory, and
    none is kept.

    Attributes:
        step: number of the step that :meth:`check` is called for next; set it when a run is resumed.
    """

    def __init__(self, locate: Callable[[Tensor], list[str]], *, timeout_s: float | None = None) -> None:
        """Starts at step 0.

        Args:
            locate: says where rows come from, for the message.
            timeout_s: longest wait for a step on the device, where it waits for other ranks; None: there are none.
        """
        self.step = 0
        self._locate = locate
        self._timeout_s = timeout_s
        self._pending: deque[_Pending] = deque()
        self._free: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def check(
        self, finite: Tensor, names: Sequence[str], row_ids: Tensor, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Takes the flags of the current step and advances :attr:`step`.

        Args:
            finite: bool [losses], as :func:`all_finite` gives; on CUDA it may change after the returned event.
            names: of the losses.
            row_ids: int64 [B] on the host, the batch's rows.
            after: the flags are there after this event; None: after what the current stream was given so far.

        Returns:
            On CUDA, what whoever writes to ``finite`` again has to wait for.

        Raises:
            NonFiniteLossError: one is not finite (on the CPU; on CUDA :meth:`poll` or :meth:`drain` raises it).
        """
        step, self.step = self.step, self.step + 1
        if finite.device.type != "cuda":
            self._raise_unless(finite, step, tuple(names), row_ids)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(finite.device)  # type: ignore[no-untyped-call]
        host, copied = self._place(finite)
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(finite.device))
        else:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            host.copy_(finite, non_blocking=True)
        copied.record(self._stream)
        self._pending.append(_Pending(step, tuple(names), finite, host, row_ids, copied))
        return copied

    def poll(self) -> None:
        """Reads all but the newest; on CUDA the host waits until the device is fewer than :data:`LAG_STEPS` behind.

        Raises:
            NonFiniteLossError: a loss of such a step was not finite.
            CollectiveError: the device waited for other ranks for too long.
        """
        self._read(down_to=LAG_STEPS - 1)

    def drain(self) -> None:
        """Reads all that is still under way. Synchronises the host on CUDA.

        Raises:
            NonFiniteLossError: a loss of a step since the last call was not finite.
            CollectiveError: the device waited for other ranks for too long.
        """
        self._read(down_to=0)

    def _place(self, finite: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Page-locked memory for the flags, and an event, that no pending step uses."""
        if self._free and self._free[0][0].shape == finite.shape:
            return self._free.popleft()  # the oldest: others may wait for the newest events yet
        return torch.empty(finite.shape, dtype=torch.bool, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _read(self, *, down_to: int) -> None:
        while len(self._pending) > down_to:
            pending = self._pending.popleft()
            self._wait(pending)
            self._free.append((pending.finite, pending.copied))
            self._raise_unless(pending.finite, pending.step, pending.names, pending.row_ids)

    def _wait(self, pending: _Pending) -> None:
        """Host synchronisation. NCCL's watchdog does not see collectives that are replayed: the host counts itself.

        Between two looks signals are handled, which a wait inside CUDA would hold up.
        """
        if self._timeout_s is None:
            pending.copied.synchronize()
            return
        deadline = time.monotonic() + self._timeout_s
        while not pending.copied.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"step {pending.step} did not end on the device within distributed.timeout_s "
                    f"({self._timeout_s:g} s): another rank has ended, hangs, or asked for another collective"
                )
            time.sleep(POLL_S)

    def _raise_unless(self, finite: Tensor, step: int, names: tuple[str, ...], row_ids: Tensor) -> None:
        if bool(finite.all()):
            return
        bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
        places = self._locate(row_ids[:SHOWN_ROWS])
        more = f" and {len(row_ids) - len(places)} more" if len(row_ids) > len(places) else ""
        raise NonFiniteLossError(
            step,
            f"the loss of {', '.join(bad)} is nan or infinite on the rows {', '.join(places)}{more}; "
            "lower optimizer.dense.lr or optimizer.sparse.lr, or set optimizer.dense.max_grad_norm",
        )


def all_finite(losses: Iterable[Tensor], place: Tensor | None = None) -> Tensor:
    """Whether each scalar loss is finite: bool [losses], on their device, in the beginning of ``place`` if given."""
    sizes = torch.stack([loss.detach().float() for loss in losses]).abs()
    # One comparison (of a nan it is false), where isfinite would launch four kernels.
    return torch.lt(sizes, math.inf, out=None if place is None else place[: sizes.numel()])
