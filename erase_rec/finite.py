"""Stops training on a nan or infinite loss, before poisoned parameters reach a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from erase_rec.errors import UserError

SHOWN_ROWS = 5


class NonFiniteLossError(UserError):
    """A loss is nan or infinite. Names the step, the losses (a tower's or ``over_arch``) and rows of the batch."""


@dataclass
class _Pending:
    step: int
    names: tuple[str, ...]
    finite: Tensor
    row_ids: Tensor
    event: torch.cuda.Event


class FiniteGuard:
    """Checks the losses of each step.

    On the CPU the check is made before the optimizer and parameters stay untouched. On CUDA reading a value in
    every step would stall the launches, so :meth:`check` copies the flags asynchronously and :meth:`drain` reads them:
    call it at the start of a step, before its first collective, and before anything is saved or evaluated. So at most
    one poisoned update is made in memory, and none is kept.

    Attributes:
        step: number of the step that :meth:`check` is called for next; set it when a run is resumed.
    """

    def __init__(self, locate: Callable[[Tensor], list[str]]) -> None:
        """Starts at step 0.

        Args:
            locate: says where rows come from, for the message.
        """
        self.step = 0
        self._locate = locate
        self._pending: list[_Pending] = []

    def check(self, losses: Mapping[str, Tensor], row_ids: Tensor) -> None:
        """Checks scalar losses of the current step and advances :attr:`step`.

        Args:
            losses: by block, on one device.
            row_ids: int64 [B] on the host, the batch's rows.

        Raises:
            NonFiniteLossError: one is not finite (on the CPU; on CUDA :meth:`drain` raises it).
        """
        finite = torch.isfinite(torch.stack([loss.detach().float() for loss in losses.values()]))
        step, self.step = self.step, self.step + 1
        if finite.device.type != "cuda":
            self._raise_unless(finite, step, tuple(losses), row_ids)
            return
        host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append(_Pending(step, tuple(losses), host, row_ids, event))

    def drain(self) -> None:
        """Reads what is still under way. Synchronises the host on CUDA.

        Raises:
            NonFiniteLossError: a loss of a step since the last call was not finite.
        """
        while self._pending:
            pending = self._pending.pop(0)
            pending.event.synchronize()  # host synchronisation: one step behind the launches
            self._raise_unless(pending.finite, pending.step, pending.names, pending.row_ids)

    def _raise_unless(self, finite: Tensor, step: int, names: tuple[str, ...], row_ids: Tensor) -> None:
        if bool(finite.all()):
            return
        bad = [name for name, good in zip(names, finite.tolist(), strict=True) if not good]
        places = self._locate(row_ids[:SHOWN_ROWS])
        more = f" and {len(row_ids) - len(places)} more" if len(row_ids) > len(places) else ""
        raise NonFiniteLossError(
            f"step {step}: the loss of {', '.join(bad)} is nan or infinite on the rows {', '.join(places)}{more}; "
            "lower optimizer.dense.lr or optimizer.sparse.lr, or set optimizer.dense.max_grad_norm"
        )
