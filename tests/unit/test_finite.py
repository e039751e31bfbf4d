"""The guard against nan and infinite losses: what it says, and when."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from erase_rec.distributed.world import CollectiveError
from erase_rec.errors import UserError
from erase_rec.finite import FiniteGuard, NonFiniteLossError, _Pending, all_finite


def locate(row_ids: Tensor) -> list[str]:
    return [f"day.tsv:{row + 1}" for row in row_ids.tolist()]


NAMES = ("over_arch", "cross", "deep")


def flags(main: float = 0.5, cross: float = 0.6, deep: float = 0.7) -> Tensor:
    return all_finite([torch.tensor(value, requires_grad=True) for value in (main, cross, deep)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_message_names_step_losses_and_rows(value: float) -> None:
    guard = FiniteGuard(locate)
    for _ in range(7):
        guard.check(flags(), NAMES, torch.arange(3))
    with pytest.raises(NonFiniteLossError) as caught:
        guard.check(flags(main=value, deep=value), NAMES, torch.arange(10, 18))
    message = str(caught.value)
    assert "step 7: the loss of over_arch, deep is nan or infinite" in message
    assert "day.tsv:11, day.tsv:12, day.tsv:13, day.tsv:14, day.tsv:15 and 3 more" in message
    assert "cross" not in message
    assert isinstance(caught.value, UserError)


def test_a_short_batch_is_named_whole() -> None:
    with pytest.raises(NonFiniteLossError, match=r"the rows day\.tsv:1, day\.tsv:2; lower"):
        FiniteGuard(locate).check(flags(cross=math.nan), NAMES, torch.arange(2))


def test_steps_count_on_after_a_resume() -> None:
    guard = FiniteGuard(locate)
    guard.step = 100
    guard.check(flags(), NAMES, torch.arange(1))
    with pytest.raises(NonFiniteLossError, match=r"^step 101:"):
        guard.check(flags(cross=math.inf), NAMES, torch.arange(1))


def test_finite_losses_pass_and_nothing_is_left_to_drain_on_the_cpu() -> None:
    guard = FiniteGuard(locate)
    guard.check(flags(main=3e38), NAMES, torch.arange(1))
    guard.drain()
    assert guard.step == 1


class Copied:
    """An event that the device reaches after some looks at it."""

    def __init__(self, looks: float) -> None:
        self._looks = looks

    def query(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def waiting(timeout_s: float, copied: Copied) -> FiniteGuard:
    """A guard of one of several ranks with step 3 under way."""
    guard = FiniteGuard(locate, timeout_s=timeout_s)
    value = flags()
    guard._pending.append(_Pending(3, NAMES, value, value, torch.arange(1), copied))  # type: ignore[arg-type]
    return guard


def test_a_step_that_waits_for_another_rank_for_ever_ends_the_run() -> None:
    """NCCL's own watchdog does not see the collectives of a replayed graph."""
    waiting(60, Copied(5)).drain()
    with pytest.raises(
        CollectiveError, match=r"step 3 did not end on the device within distributed.timeout_s \(0.01 s\)"
    ):
        waiting(0.01, Copied(math.inf)).drain()
