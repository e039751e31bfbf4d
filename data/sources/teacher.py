"""The hidden function behind the synthetic click log.

    logit = base + scale * standardized(  a * sum_f effect_f[c_f]                        per-category effects
                                        + b * sum_{f<g} <factor_f[c_f], factor_g[c_g]>   low-rank pairwise interactions
                                        + c * sum_j (w_j t_j + v_j t_j t_{j+1}))         nonlinear dense terms

where a, b and c set the parts' shares of the variance and t_j = tanh(slope_j * (z_j - centre_j)) bends the standardized
log of a dense value. It reads what the log shows and nothing else (a missing value has an effect of its own), so a
model can reach it: its cross-entropy is the floor. The interactions are those of a factorization machine (Rendle,
"Factorization Machines", ICDM 2010, equation 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RANK = 2
INTERACTING = 3
"""Every third sparse feature interacts."""
SHARES = np.array([0.7, 0.15, 0.15])
"""Variance of the unscaled parts: effects, interactions, dense terms."""
PAIR_WEIGHT = 0.4
"""Spread of the weights of the dense products, against 1 for the single terms."""
CALIBRATION_ROWS = 32768


@dataclass(frozen=True)
class Rows:
    """What the teacher reads.

    Attributes:
        dense: float64 [J, B], standardized logs; 0 where missing.
        dense_missing: bool [J, B].
        categories: int64 [F, B]; a feature's category count stands for missing.
    """

    dense: FloatArray
    dense_missing: npt.NDArray[np.bool_]
    categories: IntArray


class Teacher:
    """A fixed function from rows to click probabilities."""

    def __init__(
        self, rng: np.random.Generator, num_dense: int, num_categories: list[int], scale: float, base_rate: float
    ) -> None:
        """Draws the function; :meth:`calibrate` must follow before probabilities are asked for."""
        self._scale, self._base_rate = scale, base_rate
        self._effects = [rng.normal(size=count + 1) for count in num_categories]
        self._factors = [rng.normal(size=(count + 1, RANK)) for count in num_categories[::INTERACTING]]
        self._slopes = rng.uniform(0.55, 1.4, size=(num_dense, 1))
        self._centres = rng.normal(scale=0.5, size=(num_dense, 1))
        self._dense_missing = rng.normal(scale=0.5, size=(num_dense, 1))
        self._weights = rng.normal(size=num_dense)
        self._pair_weights = rng.normal(scale=PAIR_WEIGHT, size=num_dense - 1)
        self._parts = np.ones(3)
        self._mean, self._base = 0.0, 0.0

    def calibrate(self, rows: Rows) -> None:
        """Sets the parts' shares, the logit's spread and the base so that ``rows`` click at the base rate."""
        parts = self._raw_parts(rows)
        spread = parts.std(axis=1)
        self._parts = np.divide(np.sqrt(SHARES), spread, out=np.zeros(3), where=spread > 0)
        raw = self._parts @ parts
        self._mean, deviation = float(raw.mean()), float(raw.std())
        self._parts *= self._scale / deviation
        self._mean *= self._scale / deviation
        logit = self._parts @ parts - self._mean
        low, high = -30.0, 30.0
        for _ in range(60):
            self._base = (low + high) / 2
            too_high = _sigmoid(logit + self._base).mean() > self._base_rate
            low, high = (low, self._base) if too_high else (self._base, high)

    def probabilities(self, rows: Rows) -> FloatArray:
        """Click probability of each row, float64 [B]."""
        return _sigmoid(self._parts @ self._raw_parts(rows) - self._mean + self._base)

    def _raw_parts(self, rows: Rows) -> FloatArray:
        """The unscaled sums: effects, interactions, dense terms; [3, B]."""
        num_rows = rows.dense.shape[1]
        effects = np.zeros(num_rows)
        for effect, category in zip(self._effects, rows.categories, strict=True):
            effects += effect[category]
        total, squares = np.zeros((num_rows, RANK)), np.zeros(num_rows)
        for factor, category in zip(self._factors, rows.categories[::INTERACTING], strict=True):
            total += factor[category]
            squares += (factor * factor).sum(axis=1)[category]
        interactions = ((total * total).sum(axis=1) - squares) / 2
        bent = np.tanh(self._slopes * (rows.dense - self._centres))
        bent = np.where(rows.dense_missing, self._dense_missing, bent)
        dense = self._weights @ bent + self._pair_weights @ (bent[:-1] * bent[1:])
        return np.stack([effects, interactions, dense])


def _sigmoid(logit: FloatArray) -> FloatArray:
    return 1 / (1 + np.exp(-logit))
