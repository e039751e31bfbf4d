"""Which of two evaluations is better; early stopping, best checkpoint and plateau all ask here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from erase_rec.errors import UserError, nearest

COSTS: Mapping[str, Callable[[float], float]] = {
    "eval.ne": lambda value: value,
    "eval.logloss": lambda value: value,
    "eval.auc": lambda value: -value,
    "eval.calibration": lambda value: abs(value - 1.0),
}
"""The metrics that can be watched; each as a cost, where lower is better. Calibration is best at 1."""


@dataclass
class BestMetric:
    """The best value seen of one metric. nan is never an improvement.

    Attributes:
        metric: a key of :data:`COSTS`.
        min_delta: an improvement is larger than this.
        best: lowest cost so far.
        since: evaluations in a row without improvement.

    Raises:
        UserError: the metric is unknown.
    """

    metric: str
    min_delta: float = 0.0
    best: float = math.inf
    since: int = 0

    def __post_init__(self) -> None:
        if self.metric not in COSTS:
            raise UserError(
                f"cannot watch the metric {self.metric!r}, expected one of {', '.join(COSTS)}"
                f"{nearest(self.metric, tuple(COSTS))}"
            )

    def observe(self, value: float) -> bool:
        """Counts an evaluation; True where it improves on the best."""
        cost = COSTS[self.metric](value)
        if cost < self.best - self.min_delta:  # False for nan
            self.best, self.since = cost, 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint; JSON, without ``best`` as long as there is none."""
        return {"since": self.since} | ({} if math.isinf(self.best) else {"best": self.best})

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self.best, self.since = state.get("best", math.inf), int(state["since"])
