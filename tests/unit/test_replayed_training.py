"""Training by replays, of the whole step or of all but the tables, is plain training bit for bit.

A replay is played on the CPU: what was captured runs again, over the same held tensors and into the same results. So
whatever a replay would read that no held tensor gives it, such as the batch of the capture, gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest
import torch
from schedule_cases import CPU, assert_same, make_batch, make_config, make_gradients, make_model, state_of, tower, train
from torch.utils._pytree import tree_leaves

from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.finite import FiniteGuard
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.program import program
from erase_rec.schedule.step import DENSE_BLOCK, ScheduledStep
from erase_rec.schedule.step_graphs import WARM_UP_STEPS, Holds, StepGraphs
from erase_rec.schedule.streams import NullStreams
from models.embeddings.torch_backend import TorchEmbeddings

TOWERS = [
    tower("deep"),
    tower("dot", "deep", target="joint"),
    tower("cross", target="joint", loss=0.5, stream="main"),
    tower("pairs", loss=None, detach=False),
]
PLANS: dict[str, dict[str, Any]] = {
    "per tower": {},
    "at the end, in parts": {"optimizer": "end", "embedding_gradient": "local"},
    "no tables": {"embedding_gradient": "none"},
    "one backward": {"early_backward": False},
}


class Rerun:
    """Implements :class:`erase_rec.schedule.replays.Replays`; the run of a capture is its first replay."""

    def __init__(self) -> None:
        self.replays = 0

    def copy(self, work: Callable[[], None], after: Iterable[Any]) -> None:
        work()

    def on_main(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> None:
        pass

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        made, fresh = work(), True

        def replay() -> None:
            nonlocal fresh
            self.replays += 1
            if fresh:
                fresh = False
                return
            with torch.no_grad():
                again = results(torch.enable_grad()(work)())
                for old, new in zip(results(made), again, strict=True):
                    old.copy_(new)

        return replay, made

    def forget(self) -> None:
        pass


def results(made: Any) -> list[torch.Tensor]:
    """Every tensor of an output and of the tables' gradient."""
    output, gradient = made
    return [each for each in tree_leaves([vars(output), gradient]) if isinstance(each, torch.Tensor)]


class Unmoved(FiniteGuard):
    """Looks at losses where they are made; what is looked at once more counts no further step."""

    def check(self, finite: torch.Tensor, names: Any, row_ids: torch.Tensor, after: Any = None) -> None:
        assert bool(finite.all()), names


@pytest.mark.parametrize("holds", get_args(Holds))
@pytest.mark.parametrize("plan", PLANS)
def test_replays_train_as_plain_steps_do(plan: str, holds: Holds, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU nothing is in the way of what a device could not capture.
    monkeypatch.setattr(TorchEmbeddings, "capture_problem", lambda tables, sparse: None)
    parts = 2 if "parts" in plan else 1
    sections: dict[str, Any] = {"train": {"steps": 1, "micro_batches": parts}}
    config = make_config(TOWERS, schedule=PLANS[plan] | {"cuda_graph": holds}, **sections)
    batches = [make_batch(number, 4 if number == 7 else 9) for number in range(14)]
    model = make_model(config)
    streams = MeasuredStreams(NullStreams(), CPU)
    gradients = make_gradients(model, config, streams=streams)
    blocks = (
        gradients.blocks if gradients.plan.optimizer == "per_tower" else {DENSE_BLOCK: gradients.dense_parameters()}
    )
    replays = Rerun()
    graphs = StepGraphs(replays, streams, model.embeddings, CollectiveLog(), holds=holds)
    optimizer = DenseOptimizer(config.optimizer.dense, blocks)
    step = ScheduledStep(gradients, optimizer, Unmoved(lambda ids: []), graphs=graphs)
    for number, batch in enumerate(batches):
        step(batch, measure=number in {9, 11})
    assert replays.replays == len(batches) - WARM_UP_STEPS - 1
    assert [each.op for each in streams.intervals()] == [*program(gradients.plan)]
    assert_same(state_of(model), train(config, batches), 0)
