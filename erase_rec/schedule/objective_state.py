"""What local objectives keep from one step to the next: weights that follow the losses, and a teacher.

Both are tensors on the model's device that are written in place, so that a captured step reads and writes them too,
and both are saved with the run. Shapes: B rows, T towers whose weight follows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from erase_rec.protocols import CTRModel, OverArch
from erase_rec.schedule.plan import Plan, TowerPlan

FACTORS = "loss_factors"
"""Name of the factors among the saved tensors."""
TEACHER = "teacher."
"""What the names of the teacher's tensors start with."""


class ObjectiveState:
    """The factors of the local losses and the teacher of one run.

    Factors are those of Tri-BCE (DCNv3, arXiv 2407.13349, equation 12): a loss l_i that is worse than the main loss L
    gets the weight l_i - L. The losses are those of the step before, so that no backward waits for the over-arch, and
    a floor keeps a detached tower, which nothing else trains, from standing still. The first step has factor 1.

    The teacher is an exponential average of the over-arch's parameters, the model's final logit head: it reads the
    towers' outputs and logits of the batch under stop-gradient, and starts as the over-arch.
    """

    def __init__(self, model: CTRModel, plan: Plan, device: torch.device, saved: Mapping[str, Tensor] | None = None):
        """Starts anew, or as ``saved``, which :meth:`tensors` of another gave."""
        self._floors = {
            tower.name: tower.loss.weight_floor
            for tower in plan.towers
            if tower.loss is not None and tower.loss.weight_floor is not None
        }
        self._factors = torch.ones(len(self._floors), dtype=torch.float64, device=device)
        self._floor = torch.tensor([*self._floors.values()], dtype=torch.float64, device=device)
        self._decay = plan.teacher_decay
        self._teacher: nn.Module | None = None
        if plan.taught():
            self._teacher = copy.deepcopy(cast(nn.Module, model.over_arch)).requires_grad_(False).eval()
        if saved is not None:
            for name, value in self.tensors().items():
                value.copy_(saved[name])

    def tensors(self) -> dict[str, Tensor]:
        """What the next step reads, by name; shares storage. Empty where no objective keeps anything."""
        found = {FACTORS: self._factors} if self._floors else {}
        if self._teacher is not None:
            found |= {f"{TEACHER}{name}": value for name, value in self._teacher.state_dict().items()}
        return found

    def factor(self, tower: TowerPlan) -> Tensor | None:
        """Scalar that the weight of a tower's loss is multiplied by; None: by nothing."""
        return self._factors[[*self._floors].index(tower.name)] if tower.name in self._floors else None

    def follow(self, main: Tensor, losses: Mapping[str, Tensor]) -> Tensor:
        """Writes the next step's factors from this step's losses, which no backward may still read.

        Args:
            main: scalar, mean over the batch.
            losses: likewise, of each tower, before their weights.

        Returns:
            The factors, [T], before their floor: each l_i - L. Their mean over the ranks is what :meth:`settle` takes.
        """
        worse = [losses[name].detach().double() - main.detach().double() for name in self._floors]
        return self._factors.copy_(torch.stack(worse))

    def settle(self) -> None:
        """Applies the floors."""
        torch.maximum(self._factors, self._floor, out=self._factors)

    def teach(self, outputs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        """The teacher's prediction for each row, [B], without a gradient."""
        assert self._teacher is not None
        with torch.no_grad():
            logit: Tensor = self._teacher(outputs, logits)
            return logit.sigmoid()

    def average(self, over_arch: OverArch) -> None:
        """Moves the teacher towards the over-arch by 1 - decay, in place; buffers are copied."""
        assert self._teacher is not None
        learnt = cast(nn.Module, over_arch)
        with torch.no_grad():
            for old, new in zip(self._teacher.parameters(), learnt.parameters(), strict=True):
                old.lerp_(new, 1 - self._decay)
            for kept, now in zip(self._teacher.buffers(), learnt.buffers(), strict=True):
                kept.copy_(now)


def saved_factor(state: Mapping[str, Tensor], plan: Plan, tower: TowerPlan) -> float:
    """The factor of a tower's loss in the tensors of :meth:`ObjectiveState.tensors`; 1 where nothing follows."""
    following = [each.name for each in plan.towers if each.loss is not None and each.loss.weight_floor is not None]
    if tower.name not in following or FACTORS not in state:
        return 1.0
    return float(state[FACTORS][following.index(tower.name)])
