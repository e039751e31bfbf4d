"""Who launches, on which thread, in which order; and what happens to an error there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from schedule_cases import CPU, make_batch, make_config, make_gradients, make_model, make_step, state_of, tower
from torch import Tensor

from erase_rec.schedule.dispatch import BlockingDispatch, WorkerDispatch, make_dispatch
from erase_rec.schedule.program import Op
from erase_rec.schedule.tower_state import IllegalTransitionError, Phase
from models.ctr_model import build_local_losses

WAIT_S = 30.0
"""No test waits that long: a dispatch that blocks where it must not fails instead of hanging."""


def early(tower_name: str, worker: int) -> Op:
    return Op("early_backward", tower=tower_name, worker=worker)


def test_a_plan_names_its_dispatch() -> None:
    assert isinstance(make_dispatch("blocking", 1, CPU), BlockingDispatch)
    assert isinstance(make_dispatch("non_blocking", 1, CPU), WorkerDispatch)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_takes_what_is_handed_to_it_in_order_while_main_goes_on(workers: int) -> None:
    dispatch, gate = WorkerDispatch(workers, CPU), threading.Event()
    launched: list[tuple[str, str]] = []

    def run(name: str) -> None:
        assert gate.wait(WAIT_S)
        launched.append((name, threading.current_thread().name))

    names = [f"tower{at}" for at in range(6)]
    for at, name in enumerate(names):
        dispatch.launch(early(name, 1 + at % workers), lambda name=name: run(name))
    on_main: list[str] = []
    dispatch.launch(Op("over_arch"), lambda: on_main.append(threading.current_thread().name))
    assert on_main == [threading.main_thread().name]
    assert launched == []
    gate.set()
    for name in names:
        dispatch.join(f"early_backward:{name}")
    for worker in range(workers):
        assert [name for name, thread in launched if thread == f"early-backward-{worker}_0"] == names[worker::workers]


def test_a_worker_differentiates_on_its_own_thread_with_gradients_on_and_autocast_off() -> None:
    seen: dict[str, Any] = {}

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen["backward"] = threading.current_thread().name
            return gradient

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(Identity.apply(x).sum(), x)  # type: ignore[no-untyped-call]
        seen["grad"], seen["autocast"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen["engine threads"] = torch.autograd.is_multithreading_enabled()  # type: ignore[attr-defined]

    dispatch = WorkerDispatch(1, CPU)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        dispatch.launch(early("deep", 1), run)
        dispatch.join("early_backward:deep")
    assert seen == {"backward": "early-backward-0_0", "grad": True, "autocast": False, "engine threads": False}


def test_an_error_surfaces_at_its_join_once_nobody_is_at_work() -> None:
    dispatch, done = WorkerDispatch(2, CPU), threading.Event()

    def fail() -> None:
        raise ValueError("planted")

    def take_time() -> None:
        assert not done.wait(0.2)  # longer than the failure needs to surface where nobody waits for this
        done.set()

    dispatch.launch(early("cross", 2), take_time)
    dispatch.launch(early("deep", 1), fail)
    with pytest.raises(ValueError, match="planted"):
        dispatch.join("early_backward:deep")
    assert done.is_set()
    assert dispatch.drain() == []


TOWERS = [tower("deep"), tower("dot", "deep"), tower("cross", target="joint"), tower("mask", detach=False)]


class PlantedError(RuntimeError):
    """What a tower raises."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logit: Tensor) -> Tensor:
        return logit.view_as(logit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise PlantedError("planted")


@pytest.mark.parametrize(
    "schedule", [{"dispatch": "blocking"}, {"dispatch": "non_blocking"}, {"dispatch": "non_blocking", "workers": 3}]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("failing", [("dot",), ("deep", "cross")])
def test_a_backward_that_raises_ends_the_step_by_name_and_changes_nothing(
    schedule: dict[str, Any], micro_batches: int, failing: tuple[str, ...]
) -> None:
    schedule = schedule | {"optimizer": "end"}  # one that updates towers by themselves may have updated another
    config = make_config(TOWERS, schedule=schedule, train={"steps": 1, "micro_batches": micro_batches})
    model, honest = make_model(config), build_local_losses(config)
    losses = honest | {
        name: lambda logit, label, name=name: honest[name](FailingBackward.apply(logit), label) for name in failing
    }
    gradients = make_gradients(model, config, losses=losses)
    step, before = make_step(config, gradients), state_of(model)
    threads = set(threading.enumerate())
    with pytest.raises(PlantedError, match="planted") as raised:
        step(make_batch())
    assert raised.value.__notes__[0] == f"in early_backward of tower {failing[0]}"
    assert gradients._states.phase(failing[0]) is Phase.FAILED
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    assert gradients._dispatch.drain() == []
    started = set(threading.enumerate()) - threads
    assert {thread.name.partition("_")[0] for thread in started} <= {f"early-backward-{at}" for at in range(3)}
    with pytest.raises(IllegalTransitionError, match=f"tower {failing[0]} cannot start a step: it is still failed"):
        step(make_batch())


@pytest.mark.parametrize("kind", ["forward", "local_loss"])
def test_a_tower_that_raises_on_the_main_thread_is_named_and_workers_are_drained(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(TOWERS, schedule={"dispatch": "non_blocking", "workers": 3})
    model, losses = make_model(config), build_local_losses(config)

    def fail(*_: object) -> Tensor:
        raise PlantedError("planted")

    if kind == "forward":
        monkeypatch.setattr(model.tower("cross"), "forward", fail)
    gradients = make_gradients(model, config, losses=losses | ({"cross": fail} if kind == "local_loss" else {}))
    with pytest.raises(PlantedError) as raised:
        gradients.gradients(make_batch())
    assert raised.value.__notes__ == [f"in {kind} of tower cross"]
    assert gradients._dispatch.drain() == []
    with pytest.raises(IllegalTransitionError, match="tower cross cannot start a step"):
        gradients.gradients(make_batch())
