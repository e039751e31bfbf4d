"""Which columns the features read, and what messages call them."""

from __future__ import annotations

from erase_rec.config.schema import DenseFeatureConfig, FeaturesConfig, SparseFeatureConfig

FeatureConfig = DenseFeatureConfig | SparseFeatureConfig


def features_of(config: FeaturesConfig) -> tuple[FeatureConfig, ...]:
    """All features in model order, the dense ones first."""
    return (*config.dense, *config.sparse)


def column_of(feature: FeatureConfig) -> str:
    """The column that a feature reads."""
    return feature.name if feature.column is None else feature.column


def columns_of(*features: FeatureConfig) -> list[str]:
    """Columns that the features read, each once."""
    weights = [
        feature.weights
        for feature in features
        if isinstance(feature, SparseFeatureConfig) and feature.weights is not None
    ]
    return list(dict.fromkeys([*map(column_of, features), *weights]))


def subject_of(feature: FeatureConfig) -> str:
    """What messages call a feature."""
    column = column_of(feature)
    return f"feature {feature.name!r}" + ("" if column == feature.name else f" (column {column!r})")


def size_of(feature: SparseFeatureConfig) -> int:
    """``num_embeddings`` of an encoding that needs it."""
    assert feature.num_embeddings is not None, "the configuration's rules demand num_embeddings"
    return feature.num_embeddings
