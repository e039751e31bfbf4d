"""Ends training when held-out rows stop getting better."""

from __future__ import annotations

from collections.abc import Mapping

from erase_rec.best_metric import BestMetric
from erase_rec.config.schema import EarlyStoppingConfig


class EarlyStopping:
    """Says when ``patience`` evaluations in a row brought no improvement of more than ``min_delta``."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        """Starts without a best value.

        Raises:
            UserError: the metric is unknown.
        """
        self.metric = config.metric
        self._patience = config.patience
        self._best = BestMetric(config.metric, config.min_delta)

    @property
    def exhausted(self) -> bool:
        """Whether training should stop, by the evaluations so far."""
        return self._best.since >= self._patience

    def observe(self, value: float) -> bool:
        """Counts an evaluation; True where training should stop. nan is no improvement."""
        self._best.observe(value)
        return self.exhausted

    def state_dict(self) -> dict[str, float]:
        """For the checkpoint; JSON."""
        return self._best.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self._best.load_state_dict(state)
