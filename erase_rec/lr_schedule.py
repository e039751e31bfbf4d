"""Learning-rate schedules: a factor on the base rates, a pure function of the step (and of plateau's state).

``factor(s)`` belongs to the update of step ``s``, counted from 0. With ``w = warmup_steps`` and ``d = decay_steps``
(``None``: ``total_steps - w``):

- warm-up, ``s < w``: ``(s + 1) / w``, so step 0 has ``1 / w`` and step ``w - 1``, the last of warm-up, has 1.
- decay, ``s >= w``, from ``t = min((s - w) / d, 1)`` with ``low = min_factor``: step ``w`` has 1, step ``w + d`` and
  all later ones have ``low``. Decaying to the end of training, the last update (``s = total_steps - 1``) is
  thus one step above ``low``: it is never wasted on a rate of 0.

  - ``linear``: ``low + (1 - low) (1 - t)``
  - ``cosine``: ``low + (1 - low) (1 + cos(pi t)) / 2`` (Loshchilov and Hutter, SGDR, arXiv 1608.03983, eq. 5)
  - ``poly``: ``low + (1 - low) (1 - t)^power``
  - ``step``: ``max(gamma^floor((s - w) / step_every), low)``; ``d`` plays no part
  - ``plateau``: ``max(gamma^drops, low)``; ``d`` plays no part
  - ``constant``: 1

Nothing counts calls, so a resumed run uses the very rates that it would have used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from erase_rec.best_metric import BestMetric
from erase_rec.config.schema import LRScheduleConfig


class LRSchedule:
    """The factor of each step."""

    def __init__(self, config: LRScheduleConfig, total_steps: int) -> None:
        """Binds the schedule to the planned length of training, in steps.

        Raises:
            UserError: ``kind: plateau`` watches an unknown metric.
        """
        self._config = config
        self._decay_steps = config.decay_steps or max(total_steps - config.warmup_steps, 1)
        self._plateau = BestMetric(config.metric) if config.kind == "plateau" else None
        self._plateau_factor = 1.0

    @property
    def watched_metric(self) -> str | None:
        """Metric that :meth:`observe` wants; None unless ``kind: plateau``."""
        return None if self._plateau is None else self._plateau.metric

    def factor(self, step: int) -> float:
        """Factor on the base learning rates for the update of step ``step`` (from 0)."""
        config = self._config
        since = step - config.warmup_steps
        if since < 0:
            return (step + 1) / config.warmup_steps
        progress = min(since / self._decay_steps, 1.0)
        if config.kind == "linear":
            return _above(config.min_factor, 1.0 - progress)
        if config.kind == "cosine":
            return _above(config.min_factor, 0.5 * (1.0 + math.cos(math.pi * progress)))
        if config.kind == "poly":
            return _above(config.min_factor, (1.0 - progress) ** config.power)
        if config.kind == "step":
            assert config.step_every is not None  # checked when the configuration was read
            return max(config.gamma ** (since // config.step_every), config.min_factor)
        return self._plateau_factor

    def observe(self, value: float) -> bool:
        """Counts an evaluation for ``plateau``; True where the factor drops.

        After ``patience`` evaluations in a row without improvement (nan is none) the factor is multiplied by
        ``gamma``, for all steps from now on, and the count starts again. The best value stays.
        """
        assert self._plateau is not None, "only plateau watches evaluations"
        self._plateau.observe(value)
        if self._plateau.since < self._config.patience:
            return False
        self._plateau.since = 0
        before = self._plateau_factor
        self._plateau_factor = max(before * self._config.gamma, self._config.min_factor)
        return self._plateau_factor < before

    def state_dict(self) -> dict[str, float]:
        """Plateau's state, for the checkpoint; JSON. Empty for every other kind."""
        return {} if self._plateau is None else self._plateau.state_dict() | {"factor": self._plateau_factor}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        if self._plateau is not None:
            self._plateau.load_state_dict(state)
            self._plateau_factor = state["factor"]


def _above(low: float, share: float) -> float:
    return low + (1.0 - low) * share
