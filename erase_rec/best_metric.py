"""Which of two evaluations is better; early stopping, best checkpoint and plateau all ask here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from erase_rec.config.schema import EarlyStoppingConfig


def cost(metric: str, value: float) -> float:
    """Turns a metric into a cost: lower is better.

    Args:
        metric: ``eval.ne``, ``eval.logloss`` (lower is better), ``eval.auc`` (higher), ``eval.calibration``
            (nearer to 1).
        value: its value; nan stays nan.
    """
    if metric == "eval.auc":
        return -value
    return abs(value - 1.0) if metric == "eval.calibration" else value


@dataclass
class BestMetric:
    """The best value seen of one metric. nan is never an improvement.

    Attributes:
        metric: name, such as ``eval.ne``.
        min_delta: an improvement is larger than this.
        best: lowest cost so far.
        since: evaluations in a row without improvement.
    """

    metric: str
    min_delta: float = 0.0
    best: float = math.inf
    since: int = 0

    def observe(self, value: float) -> bool:
        """Counts an evaluation; True where it improves on the best."""
        new = cost(self.metric, value)
        if not math.isnan(new) and new < self.best - self.min_delta:
            self.best, self.since = new, 0
            return True
        self.since += 1
        return False

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint; JSON, with infinity as a missing entry."""
        return {"since": self.since} | ({} if math.isinf(self.best) else {"best": self.best})

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self.best, self.since = state.get("best", math.inf), int(state["since"])


class EarlyStopping:
    """Says when ``patience`` evaluations in a row brought no improvement."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        """Starts without a best value."""
        self.metric = config.metric
        self._patience = config.patience
        self._best = BestMetric(config.metric, config.min_delta)

    def observe(self, value: float) -> bool:
        """Counts an evaluation; True where training should stop."""
        self._best.observe(value)
        return self._best.since >= self._patience

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint."""
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self._best.load_state_dict(state)
