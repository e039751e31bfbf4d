"""Transforms of numeric features: finite whatever comes, and moments that do not depend on where rows were read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data.features.dense import LARGEST, Moments, Standard, count_clipped, moments_of, transform
from erase_rec.config.schema import DenseFeatureConfig

HARD = [-3.0, -100.0, 0.0, 2147483648.0, 1e40, -1e40, 3.5e38, math.inf, -math.inf, math.nan, 5e-324, -1e-30]


@pytest.mark.parametrize("kind", ["log", "standardize", "none"])
@pytest.mark.parametrize("standard", [Standard(), Standard(1e38, 1e-300), Standard(-LARGEST, LARGEST)])
@pytest.mark.parametrize("fill", [0.0, -1.0, 1e300])
def test_every_transformed_value_is_finite(kind: str, standard: Standard, fill: float) -> None:
    config = DenseFeatureConfig.model_validate({"name": "d", "transform": kind, "fill": fill})
    result = transform(np.array(HARD), config, standard)
    assert result.dtype == np.float32
    assert np.isfinite(result).all()
    assert count_clipped(np.array(HARD), fill) == 5 + (fill == 1e300)


def test_the_log_transform_is_odd_and_takes_missing_as_fill() -> None:
    config = DenseFeatureConfig(name="d", transform="log", fill=3.0)
    result = transform(np.array([-3.0, 3.0, math.nan, 0.0]), config, Standard())
    np.testing.assert_array_equal(result, np.float32([-math.log(4), math.log(4), math.log(4), 0]))


def test_moments_merged_over_parts_are_those_of_all_rows() -> None:
    values = np.random.default_rng(0).normal(1e6, 1, 1000)
    moments = Moments()
    for part in np.array_split(np.append(values, math.nan), 7):
        moments.add(moments_of(part))
    moments.add(moments_of(np.array([math.nan])))
    found = moments.finish()
    # float64 with a mean a million times the deviation: about 1e-10 of the deviation is rounding.
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(), rel=1e-8)


def test_moments_of_nothing_and_of_a_constant() -> None:
    assert Moments().finish() == Standard(0.0, 1.0)
    constant = Moments()
    constant.add(moments_of(np.array([5.0, 5.0])))
    assert constant.finish() == Standard(5.0, 1.0)
