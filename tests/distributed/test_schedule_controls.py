"""What the schedules avoid, shown on plain torch: each set-up fails, for the reason that the rules give.

The model is two towers whose backward is called inside the wrapped forward, as a naive early backward does, and an
over-arch on their cut outputs.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World

Early = Literal["hooks", "no hooks", "after forward"]
RANKS = 2
SET_UPS: dict[str, tuple[Early, bool, dict[str, bool]]] = {
    "FUP=True": ("hooks", False, {"find_unused_parameters": True}),
    "FUP=True, without hooks": ("no hooks", False, {"find_unused_parameters": True}),
    "FUP=True, after forward": ("after forward", False, {"find_unused_parameters": True}),
    "FUP=False": ("hooks", False, {"find_unused_parameters": False}),
    "FUP=False, touching all": ("hooks", True, {"find_unused_parameters": False}),
    "static graph": ("hooks", False, {"static_graph": True}),
    "static graph, touching all": ("hooks", True, {"static_graph": True}),
}
UNFINISHED = "raises: Expected to have finished reduction in the prior iteration before starting a new one"
TWICE = "raises: Expected to mark a variable ready only once"


class NaiveEarly(nn.Module):
    """Towers, their local losses and an over-arch; ``early`` says how a tower's gradient reaches ``.grad``."""

    def __init__(self, early: Early, *, touch_all: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.over_arch = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)
        self.early, self.touch_all = early, touch_all
        self.local_losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        outputs = [tower(x) for tower in self.towers]
        self.local_losses = [output.square().mean() for output in outputs]
        for tower, loss in zip(self.towers, self.local_losses, strict=True):
            if self.early == "hooks":
                loss.backward()
            elif self.early == "no hooks":
                parameters = list(tower.parameters())
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
        main = self.over_arch(torch.cat([output.detach() for output in outputs], dim=1)).square().mean()
        return main + sum(0 * parameter.sum() for parameter in self.towers.parameters()) if self.touch_all else main


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def tower_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.towers.parameters()])  # type: ignore[union-attr]


def local_gradient(state: dict[str, Tensor], x: Tensor) -> Tensor:
    alone = NaiveEarly("hooks")
    alone.load_state_dict(state)
    alone(x)
    return tower_gradient(alone)


def outcomes(world: World, early: Early, touch_all: bool, options: dict[str, bool]) -> list[str]:
    """What happens to the towers' gradient in each of three steps, and whether the ranks' towers are equal then."""
    found = []
    model = NaiveEarly(early, touch_all=touch_all)
    ddp = DistributedDataParallel(model, **options)  # type: ignore[arg-type]
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        state = {name: value.clone() for name, value in model.state_dict().items()}
        shares = [local_gradient(state, rows(step, rank)) for rank in range(RANKS)]
        try:
            loss = ddp(rows(step, world.rank))
            if early == "after forward":
                for local in model.local_losses:
                    local.backward()
            loss.backward()
        except RuntimeError as error:
            found.append(f"raises: {str(error).partition('.')[0]}")
            break
        gradient = tower_gradient(model)
        if torch.allclose(gradient, sum(shares) / RANKS):
            found.append("right")
        else:
            found.append("unreduced" if torch.allclose(gradient, shares[world.rank]) else "wrong")
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    towers = world.gather("towers", nn.utils.parameters_to_vector(model.towers.parameters()).detach())
    return [*found, "replicas agree" if torch.equal(towers[0], towers[1]) else "replicas differ"]


def every_outcome() -> dict[str, list[str]]:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        return {name: outcomes(world, *set_up) for name, set_up in SET_UPS.items()}


@pytest.mark.timeout(90)
def test_distributed_data_parallel_goes_wrong_where_the_rules_say(run_ranks: Any) -> None:
    """Right are hooks with FUP=True, and a final loss that touches every parameter; never a static graph."""
    for found in run_ranks(RANKS, every_outcome):
        assert found == {
            "FUP=True": ["right", "right", "right", "replicas agree"],
            "FUP=True, without hooks": ["unreduced", "unreduced", "unreduced", "replicas differ"],
            "FUP=True, after forward": [TWICE, "replicas agree"],
            "FUP=False": ["unreduced", UNFINISHED, "replicas differ"],
            "FUP=False, touching all": ["right", "right", "right", "replicas agree"],
            "static graph": ["right", "unreduced", UNFINISHED, "replicas differ"],
            "static graph, touching all": ["right", "unreduced", UNFINISHED, "replicas differ"],
        }


def two_threads_issue() -> tuple[list[float], list[str]]:
    """Sums ``cross`` and ``deep`` over two ranks, one thread each; rank 1's threads come in the other order."""
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        values = {"cross": torch.tensor([1.0]), "deep": torch.tensor([10.0])}
        values = {name: value * (100 if world.rank else 1) for name, value in values.items()}
        refused: list[str] = []
        works: list[Any] = []

        def issue(name: str) -> None:
            works.append(dist.all_reduce(values[name], async_op=True))
            try:
                world.sum(name, values[name])
            except RuntimeError as error:
                refused.append(str(error))

        for name in ("deep", "cross") if world.rank else ("cross", "deep"):
            thread = threading.Thread(target=issue, args=(name,), name=f"worker of {name}")
            thread.start()
            thread.join()
        for work in works:
            work.wait()
        return [values["cross"].item(), values["deep"].item()], refused


@pytest.mark.timeout(90)
def test_threads_that_issue_collectives_mix_up_tensors(run_ranks: Any) -> None:
    """No error on either rank, and every value is wrong; the one door to collectives refuses such threads by name."""
    (first, first_refused), (second, second_refused) = run_ranks(RANKS, two_threads_issue)
    right = [1.0 + 100.0, 10.0 + 1000.0]
    assert first == [1.0 + 1000.0, 10.0 + 100.0] != right
    assert second == [100.0 + 10.0, 1000.0 + 1.0] != right
    for refused in (first_refused, second_refused):
        assert sorted(message.partition(";")[0] for message in refused) == [
            f"collective {name} was asked for by thread worker of {name}" for name in ("cross", "deep")
        ]
