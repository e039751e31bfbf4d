"""Learning-rate schedules: a factor on the base rates, a pure function of the step (and of plateau's state).

With ``w = warmup_steps`` the update of step ``s`` (from 0) uses ``(s + 1) / w`` while ``s < w``; decay then runs
over ``decay_steps`` (default: to the last step) and stays at its end value. Nothing is counted by calls, so a
resumed run uses the very rates that it would have used.
"""

from __future__ import annotations

import math

from erase_rec.best_metric import BestMetric
from erase_rec.config.schema import LRScheduleConfig


class LRSchedule:
    """The factor of each step."""

    def __init__(self, config: LRScheduleConfig, total_steps: int) -> None:
        """Binds the schedule to the planned length of training, in steps."""
        self._config = config
        self._decay_steps = config.decay_steps or max(total_steps - config.warmup_steps, 1)
        self._plateau = BestMetric(config.metric)
        self._plateau_factor = 1.0

    @property
    def watched_metric(self) -> str | None:
        """Metric that :meth:`observe` wants; None unless ``kind: plateau``."""
        return self._config.metric if self._config.kind == "plateau" else None

    def factor(self, step: int) -> float:
        """Factor on the base learning rates for the update of step ``step`` (from 0)."""
        config = self._config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        since = step - config.warmup_steps
        progress = min(since / self._decay_steps, 1.0)
        if config.kind == "linear":
            return _between(config.min_factor, 1.0 - progress)
        if config.kind == "cosine":
            return _between(config.min_factor, 0.5 * (1.0 + math.cos(math.pi * progress)))
        if config.kind == "poly":
            return _between(config.min_factor, (1.0 - progress) ** config.power)
        if config.kind == "step":
            assert config.step_every is not None
            return max(config.gamma ** (since // config.step_every), config.min_factor)
        return self._plateau_factor

    def observe(self, value: float) -> bool:
        """Counts an evaluation for ``plateau``; True where the factor drops.

        After more than ``patience`` evaluations in a row without improvement the factor is multiplied by
        ``gamma`` and the count starts again.
        """
        self._plateau.observe(value)
        if self._plateau.since <= self._config.patience:
            return False
        self._plateau.since = 0
        self._plateau_factor = max(self._plateau_factor * self._config.gamma, self._config.min_factor)
        return True

    def state_dict(self) -> dict[str, float]:
        """Plateau's state, for the checkpoint."""
        return self._plateau.state_dict() | {"factor": self._plateau_factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self._plateau.load_state_dict(state)
        self._plateau_factor = state["factor"]


def _between(low: float, share: float) -> float:
    return low + (1.0 - low) * share
