"""Which calls go to compiled forwards, without compiling: Inductor itself is tested on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from schedule_cases import CPU, assert_same, make_batch, make_config, make_model, tower

from erase_rec.batch import Batch, StepOutput
from erase_rec.compiled import compiled_forwards
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import FiniteGuard
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.held_batch import HeldBatch
from erase_rec.schedule.plan import OVER_ARCH, Plan
from erase_rec.schedule.step import ScheduledStep
from erase_rec.schedule.step_graphs import StepParts, launched
from erase_rec.schedule.streams import NullStreams
from models.ctr_model import build_local_losses

CONFIG = make_config([tower("deep"), tower("dot", target="joint")])
CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row counts of the calls that reach a compiled forward."""
    rows: list[int] = []

    def compile(module: Callable[..., Any], *, dynamic: bool, fullgraph: bool, options: dict[str, object]) -> Any:
        assert (dynamic, fullgraph, options["triton.cudagraphs"]) == (False, True, False)

        def run(*inputs: Any) -> Any:
            rows.append((inputs[0] if isinstance(inputs[0], torch.Tensor) else inputs[0][0]).shape[0])
            return module(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    return rows


def test_on_the_cpu_nothing_is_compiled_and_a_remark_says_so(calls: list[int]) -> None:
    said: list[str] = []
    assert compiled_forwards(make_model(CONFIG), 9, 1, CPU, said.append) == {}
    assert said == ["model.compile: towers and over-arch are compiled on CUDA only; here they run as they are"]


@pytest.mark.parametrize(("micro_batches", "expected"), [(1, [9] * 3), (2, [4] * 3 + [5] * 3)])
def test_full_batches_are_compiled_from_the_second_on_and_others_run_plainly(
    calls: list[int], micro_batches: int, expected: list[int]
) -> None:
    config = make_config(
        [tower("deep"), tower("dot", target="joint")], train={"steps": 1, "micro_batches": micro_batches}
    )
    model, said = make_model(config), list[str]()
    forwards = compiled_forwards(model, 9, micro_batches, CUDA, said.append)
    assert set(forwards) == {"deep", "dot", OVER_ARCH}
    plan, losses = Plan.from_config(config), build_local_losses(config)
    program = GradientProgram(model, plan, losses, NullStreams(), device=CPU, forwards=forwards)
    plain = GradientProgram(model, plan, losses, NullStreams(), device=CPU)
    for size in (3, 9, 9, 3, 9):
        batch = make_batch(size, size)
        assert_same(program.gradients(batch).parameters, plain.gradients(batch).parameters, 0)
    assert sorted(calls) == sorted(2 * expected)
    assert said == [f"model.compile: compiled {3 * micro_batches} blocks in 0 s"]


class LaunchedTwice:
    """In the place of graphs: a step in its warm-up, then as a capture sees it."""

    def run(self, batch: Batch, measure: bool, exact: bool, parts: StepParts) -> tuple[StepOutput, None]:
        held = HeldBatch(batch, batch.sparse.values.numel(), None)
        held.fill(batch)
        launched(parts, batch, measure, exact)
        return launched(parts, held.batch, measure, exact), None

    def keep_until(self, read: Any) -> None:
        pass


def test_a_capture_shows_towers_the_shapes_of_the_steps_before_it() -> None:
    """Otherwise it would be compiled again in the middle of a capture."""
    shapes: dict[str, set[tuple[int, ...]]] = {"deep": set(), "dot": set()}

    def watched(name: str, module: Callable[..., Any]) -> Callable[..., Any]:
        def run(dense: torch.Tensor, *inputs: Any) -> Any:
            shapes[name].add(tuple(dense.shape))
            return module(dense, *inputs)

        return run

    model, plan = make_model(CONFIG), Plan.from_config(CONFIG)
    forwards = {name: watched(name, model.tower(name)) for name in shapes}
    losses = build_local_losses(CONFIG)
    program = GradientProgram(model, plan, losses, NullStreams(), device=CPU, forwards=forwards)
    optimizer = DenseOptimizer(CONFIG.optimizer.dense, program.blocks)
    graphs: Any = LaunchedTwice()
    ScheduledStep(program, optimizer, FiniteGuard(lambda ids: []), graphs=graphs)(make_batch(1, 9))
    assert shapes == {"deep": {(9, 8)}, "dot": {(9, 8)}}
