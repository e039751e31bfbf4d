"""What holds training state together on CUDA: the delayed finiteness guard, fused optimizers, random generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from erase_rec import checkpoint
from erase_rec.checkpoint import CheckpointManager
from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import LAG_STEPS, FiniteGuard, NonFiniteLossError, all_finite
from erase_rec.random_state import restore_rng, rng_state

pytestmark = pytest.mark.gpu


NAMES = ("cross", "deep")


def flags(cross: float = 0.6, deep: float = 0.7) -> Tensor:
    return all_finite([torch.tensor(value, device="cuda") for value in (cross, deep)])


def locate(row_ids: Tensor) -> list[str]:
    return [f"day.tsv:{row + 1}" for row in row_ids.tolist()]


def test_drain_reports_the_step_and_its_rows_once() -> None:
    guard = FiniteGuard(locate)
    guard.check(flags(cross=math.inf), NAMES, torch.arange(1))
    guard.check(flags(), NAMES, torch.arange(5, 6))
    with pytest.raises(NonFiniteLossError, match=r"^step 0: the loss of cross .*day\.tsv:1;"):
        guard.drain()
    guard.drain()


def test_poll_reads_what_is_far_enough_behind() -> None:
    guard = FiniteGuard(locate)
    guard.check(flags(deep=math.nan), NAMES, torch.arange(1))
    for _ in range(LAG_STEPS - 1):
        guard.poll()
        guard.check(flags(), NAMES, torch.arange(1))
    with pytest.raises(NonFiniteLossError, match=r"^step 0: the loss of deep"):
        guard.poll()


def test_check_does_not_wait_for_the_device(host_never_waits: Callable[[], AbstractContextManager[None]]) -> None:
    guard = FiniteGuard(locate)
    now = flags()
    guard.check(flags(), NAMES, torch.arange(1))  # warms up
    guard.drain()
    with host_never_waits():
        guard.check(now, NAMES, torch.arange(1))
    guard.drain()


def test_flags_are_read_beside_the_steps_that_follow() -> None:
    guard = FiniteGuard(locate)
    bad = flags(cross=math.inf)
    done = torch.cuda.current_stream().record_event()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # about 0.2 s of the next step
    copied = guard.check(bad, NAMES, torch.arange(1), after=done)
    assert copied is not None
    copied.synchronize()
    assert not torch.cuda.current_stream().query(), "the main stream is still at it"
    torch.cuda.current_stream().wait_event(copied)
    bad.fill_(True)
    with pytest.raises(NonFiniteLossError, match=r"^step 0: the loss of cross"):
        guard.drain()


def trained(optimizer: DenseOptimizer, weight: nn.Parameter, start: int, end: int) -> None:
    for step in range(start, end):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.step("dense", {"w": gradient}, max_norm=1.0)


@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad", "sgd"])
def test_optimizer_resumes_bitwise_through_a_checkpoint(tmp_path: Path, kind: str) -> None:
    momentum = 0.9 if kind == "sgd" else 0.0
    config = DenseOptimizerConfig.model_validate({"kind": kind, "momentum": momentum, "weight_decay": 0.01})
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).cuda()
    whole, first, second = (nn.Parameter(start.clone()) for _ in range(3))
    trained(DenseOptimizer(config, {"dense": {"w": whole}}), whole, 0, 6)

    stopped = DenseOptimizer(config, {"dense": {"w": first}})
    trained(stopped, first, 0, 2)
    path = CheckpointManager(tmp_path, keep=1).save(2, stopped.masters() | stopped.state(), {}, is_best=False)
    resumed = DenseOptimizer(config, {"dense": {"w": second}})
    checkpoint.load(path, resumed.masters() | resumed.state())
    resumed.refresh()
    trained(resumed, second, 2, 6)
    assert torch.equal(second, whole)


def test_random_numbers_of_the_device_go_on_where_they_stopped() -> None:
    device = torch.device("cuda")
    saved = {name: state.clone() for name, state in rng_state(device).items()}
    expected = torch.rand(5, device=device)
    restore_rng(saved, device)
    assert torch.equal(torch.rand(5, device=device), expected)
    assert set(saved) == {"cpu", "cuda"}
