"""Progressive evaluation: each training row is scored by the parameters before the update that learns from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from erase_rec.batch import StepOutput
from eval.metrics import ClickSums, click_sums
from eval.registry import SUM_METRICS

logger = logging.getLogger(__name__)

TOWER_METRICS = ("ne", "prediction_std")


class ProgressiveEvaluation:
    """Implements :class:`erase_rec.protocols.ProgressiveMetrics` for the model and its towers.

    Sums are float64 [1 + T, 5] (the model, then the towers; columns of :class:`eval.metrics.ClickSums`) on the
    step's device; counts stay exact up to 2**53 rows. The lifetime sums take a window in when it is closed.
    """

    def __init__(self, towers: Sequence[str], device: torch.device) -> None:
        """Starts at zero rows.

        Args:
            towers: names in the model's order.
            device: where the step's outputs are.
        """
        self._towers = tuple(towers)
        self._window = torch.zeros(1 + len(towers), 5, dtype=torch.float64, device=device)
        self._closed = torch.zeros_like(self._window)
        self._warned = False

    def update(self, output: StepOutput, label: Tensor) -> None:
        """Adds a step's rows on the current stream, without host synchronisation."""
        logits = torch.stack([output.logit, *(output.tower_logits[name] for name in self._towers)])
        self._window += click_sums(logits, label)

    def window(self) -> dict[str, float]:
        """Metrics since the last call, as ``train/<metric>`` and ``tower/<name>/<metric>``. Synchronises the host."""
        values = self._values(self._window)
        self._closed += self._window
        self._window.zero_()
        if math.isnan(values["train/ne"]) and not self._warned:
            self._warned = True
            logger.warning("train/ne is undefined (nan): the window's labels are of one class; this is said once")
        return values

    def lifetime(self) -> dict[str, float]:
        """The same tags over the whole run. Synchronises the host."""
        return self._values(self._closed + self._window)

    def state_dict(self) -> dict[str, Tensor]:
        """The sums of the open window and of the closed ones; share storage with the metrics."""
        return {"window": self._window, "closed": self._closed}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies in what :meth:`state_dict` gave."""
        self._window.copy_(state["window"])
        self._closed.copy_(state["closed"])

    def _values(self, sums: Tensor) -> dict[str, float]:
        model, *towers = (ClickSums(*row) for row in sums.tolist())
        values = {f"train/{name}": metric(model) for name, metric in SUM_METRICS.items()}
        for tower, tower_sums in zip(self._towers, towers, strict=True):
            values |= {f"tower/{tower}/{name}": SUM_METRICS[name](tower_sums) for name in TOWER_METRICS}
        return values
