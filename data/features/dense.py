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
    """Running mean and variance in float64, merged part by part (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def add(self, part: FloatArray) -> None:
        """Adds what :func:`moments_of` found in a part of the rows. The order of the parts shows in the last bits."""
        count, mean, squares = part.tolist()
        if not count:
            return
        delta, total = mean - self._mean, self._count + count
        self._squares += squares + delta * delta * self._count * count / total
        self._mean += delta * count / total
        self._count = total

    def finish(self) -> Standard:
        """The moments; a constant column has standard deviation 1, so that it becomes 0."""
        std = math.sqrt(self._squares / self._count) if self._count else 0.0
        return Standard(self._mean, std or 1.0)


def moments_of(values: FloatArray) -> FloatArray:
    """Count, mean and sum of squared deviations of raw values, float64 [3]; nan is left out."""
    present = np.clip(values[~np.isnan(values)], -LARGEST, LARGEST)
    if not len(present):
        return np.zeros(3)
    mean = present.mean()
    return np.array([len(present), mean, np.square(present - mean).sum()])


def count_clipped(values: FloatArray, fill: float) -> int:
    """Raw values that :func:`transform` clips, ``fill`` counted where it takes a missing value's place."""
    clipped = np.count_nonzero(np.abs(values) > LARGEST)
    return int(clipped + (np.count_nonzero(np.isnan(values)) if abs(fill) > LARGEST else 0))


def transform(values: FloatArray, config: DenseFeatureConfig, standard: Standard) -> npt.NDArray[np.float32]:
    """Transforms raw values.

    Args:
        values: float64 [n]; nan: missing.
        config: which transform.
        standard: moments, for ``standardize``.

    Returns:
        Finite float32 [n].
    """
    raw = np.where(np.isnan(values), config.fill, values)
    np.clip(raw, -LARGEST, LARGEST, out=raw)
    match config.transform:
        case "log":
            result = np.abs(raw)
            np.copysign(np.log1p(result, out=result), raw, out=result)
        case "standardize":
            with np.errstate(over="ignore"):
                result = np.clip((raw - standard.mean) / standard.std, -LARGEST, LARGEST)
        case "none":
            result = raw
    narrow: npt.NDArray[np.float32] = result.astype(np.float32)
    return narrow
