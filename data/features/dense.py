"""Transforms of numeric features. Whatever the input, the result is finite.

In this order: a missing value becomes ``fill``; infinities and values that no float32 holds are clipped to float32's
finite range (and counted); the transform is computed in float64; the result is clipped to float32's range again, which
only ``standardize`` can leave, and rounded to float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.features.cells import FloatArray
from erase_rec.config.schema import DenseFeatureConfig

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Standard:
    """Mean and standard deviation (of the population) of a feature's present training values."""

    mean: float = 0.0
    std: float = 1.0


class Moments:
    """Running mean and variance in float64, merged block by block (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: FloatArray) -> None:
        """Adds raw values [n]; nan is left out."""
        present = np.clip(values[~np.isnan(values)], -LARGEST, LARGEST)
        if not len(present):
            return
        mean = float(present.mean())
        delta, count = mean - self._mean, self._count + len(present)
        between = delta * delta * self._count * len(present) / count
        self._squares += float(np.square(present - mean).sum()) + between
        self._mean += delta * len(present) / count
        self._count = count

    def finish(self) -> Standard:
        """The moments; a constant column has standard deviation 1, so that it becomes 0."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        return Standard(self._mean, std or 1.0)


def transform(
    values: FloatArray, config: DenseFeatureConfig, standard: Standard
) -> tuple[npt.NDArray[np.float32], int]:
    """Transforms raw values.

    Args:
        values: float64 [n]; nan: missing.
        config: which transform.
        standard: moments, for ``standardize``.

    Returns:
        Finite float32 [n], and how many raw values were clipped.
    """
    filled = np.where(np.isnan(values), config.fill, values)
    raw = np.clip(filled, -LARGEST, LARGEST)
    num_clipped = int(np.count_nonzero(raw != filled))
    match config.transform:
        case "log":
            result = np.sign(raw) * np.log1p(np.abs(raw))
        case "standardize":
            with np.errstate(over="ignore"):
                result = np.clip((raw - standard.mean) / standard.std, -LARGEST, LARGEST)
        case "none":
            result = raw
    return result.astype(np.float32), num_clipped
