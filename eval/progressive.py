"""Progressive evaluation: each training row is scored by the parameters before the update that learns from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from erase_rec.batch import StepOutput
from erase_rec.distributed.world import World
from eval.metrics import ClickSums, add_click_sums
from eval.registry import SUM_METRICS

logger = logging.getLogger(__name__)

TOWER_METRICS = ("ne", "prediction_std")


class ProgressiveEvaluation:
    """Implements :class:`erase_rec.protocols.ProgressiveMetrics` for the model and its towers.

    Sums are float64 [1 + T, 5] (the model, then the towers; columns of :class:`eval.metrics.ClickSums`) on the
    step's device; counts stay exact up to 2**53 rows. A rank's window holds its own rows; the lifetime sums take the
    window of all ranks in when it is closed, and are the same on every rank.
    """

    def __init__(self, towers: Sequence[str], device: torch.device, world: World) -> None:
        """Starts at zero rows.

        Args:
            towers: names in the model's order.
            device: where the step's outputs are.
            world: the ranks whose rows are pooled.
        """
        self._towers = tuple(towers)
        self._window = torch.zeros(1 + len(towers), 5, dtype=torch.float64, device=device)
        self._closed = torch.zeros_like(self._window)
        self._recent = math.nan
        self._world = world
        self._warned = False

    def update(self, output: StepOutput, label: Tensor) -> None:
        """Adds a step's rows on the current stream, without host synchronisation."""
        logits = torch.stack([output.logit, *(output.tower_logits[name] for name in self._towers)])
        add_click_sums(self._window, logits, label)

    def window(self, *, closes: bool = True) -> dict[str, float]:
        """Metrics of the open window, as ``train/<metric>`` and ``tower/<name>/<metric>``; collective.

        Synchronises the host. ``closes``: the next row begins a new one.
        """
        self._world.sum("progressive", self._window).wait()
        values = self._values(self._window)
        self._recent = values["train/base_rate"]
        if closes:
            self._closed += self._window
            self._window.zero_()
        else:
            self._keep_on_first()
        if math.isnan(values["train/ne"]) and not self._warned:
            self._warned = True
            logger.warning("train/ne is undefined (nan): the window's labels are of one class; this is said once")
        return values

    def lifetime(self) -> dict[str, float]:
        """The same tags over the whole run; collective. Synchronises the host."""
        self._pool()
        return self._values(self._closed + self._world.gather("progressive", self._window)[0])

    def recent_base_rate(self) -> float:
        """Share of clicks in the window that was closed last; before the first one, in all rows so far. Collective.

        Synchronises the host where no window was closed.
        """
        return self.lifetime()["train/base_rate"] if math.isnan(self._recent) else self._recent

    def state_dict(self) -> dict[str, Tensor]:
        """The sums of the open window and of the closed ones; share storage with the metrics. Collective.

        The first rank's are those of all ranks, and the others' window is empty: a run that goes on adds up in the
        order of one that is resumed from here.
        """
        self._pool()
        return {"window": self._window, "closed": self._closed}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what the first rank's :meth:`state_dict` gave, whatever the number of ranks."""
        self._window.copy_(state["window"])
        self._closed.copy_(state["closed"])
        self._keep_on_first()

    def _pool(self) -> None:
        """Moves the open window of all ranks to the first."""
        self._world.sum("progressive", self._window).wait()
        self._keep_on_first()

    def _keep_on_first(self) -> None:
        if not self._world.is_first:
            self._window.zero_()

    def _values(self, sums: Tensor) -> dict[str, float]:
        model, *towers = (ClickSums(*row) for row in sums.tolist())
        values = {f"train/{name}": metric(model) for name, metric in SUM_METRICS.items()}
        for tower, tower_sums in zip(self._towers, towers, strict=True):
            values |= {f"tower/{tower}/{name}": SUM_METRICS[name](tower_sums) for name in TOWER_METRICS}
        return values
