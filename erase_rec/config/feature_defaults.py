"""``features.dense_defaults`` and ``features.sparse_defaults``: what the entries of the two lists leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from erase_rec.config.relevance import SPARSE_FEATURES, is_read
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, DenseDefaults, DenseFeatureConfig, SparseDefaults, SparseFeatureConfig


def apply_feature_defaults(config: Config) -> Config:
    """Fills the entries and empties the defaults, so that the result means the same when it is read again.

    What an entry says itself stays. A default goes to the entries that can read it: ``min_count`` to those with a
    vocabulary, ``separator`` and ``max_length`` to bags.
    """
    features = config.features
    update = {
        "dense": tuple(_filled_dense(feature, features.dense_defaults) for feature in features.dense),
        "sparse": tuple(_filled_sparse(feature, features.sparse_defaults) for feature in features.sparse),
        "dense_defaults": DenseDefaults(),
        "sparse_defaults": SparseDefaults(),
    }
    return config.model_copy(update={"features": features.model_copy(update=update)})


def _idle(config: Config) -> Iterator[Finding]:
    """Sparse defaults that no feature would read; ``config`` still has its defaults."""
    filled = apply_feature_defaults(config).features.sparse
    for key in _given(config.features.sparse_defaults):
        if filled and not any(is_read(SPARSE_FEATURES, feature, key) for feature in filled):
            path = ("features", "sparse_defaults", key)
            yield Finding(path, "no feature of features.sparse would read it", also=(SPARSE_FEATURES,))


IDLE_DEFAULTS = Rule(
    "a key of `features.sparse_defaults` that no feature would read",
    "it would be ignored",
    "leave it out, or set it to null where it comes from a _base_",
    _idle,
)
"""The one rule that is asked before the defaults are applied."""


def _given(defaults: DenseDefaults | SparseDefaults) -> dict[str, Any]:
    return {key: value for key, value in defaults if value is not None}


def _filled_dense(feature: DenseFeatureConfig, defaults: DenseDefaults) -> DenseFeatureConfig:
    left_out = {key: value for key, value in _given(defaults).items() if key not in feature.model_fields_set}
    return feature.model_copy(update=left_out)


def _filled_sparse(feature: SparseFeatureConfig, defaults: SparseDefaults) -> SparseFeatureConfig:
    left_out = {key: value for key, value in _given(defaults).items() if key not in feature.model_fields_set}
    filled = feature.model_copy(update=left_out)
    read = {key: value for key, value in left_out.items() if is_read(SPARSE_FEATURES, filled, key)}
    return feature.model_copy(update=read)
