"""Rules on label and features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from erase_rec.config.document import KeyPath
from erase_rec.config.rules import Finding, Rule
from erase_rec.config.schema import Config, DenseFeatureConfig, SparseFeatureConfig

DENSE: KeyPath = ("features", "dense")
SPARSE: KeyPath = ("features", "sparse")
LABEL: KeyPath = ("data", "label")


def _features(config: Config) -> Iterator[tuple[KeyPath, DenseFeatureConfig | SparseFeatureConfig]]:
    for position, dense in enumerate(config.features.dense):
        yield (*DENSE, position), dense
    for position, sparse in enumerate(config.features.sparse):
        yield (*SPARSE, position), sparse


def _no_feature(config: Config) -> Iterator[Finding]:
    if not config.features.dense and not config.features.sparse:
        yield Finding(("features",), "neither features.dense nor features.sparse names a feature")


def _nameless(config: Config) -> Iterator[Finding]:
    for path, feature in _features(config):
        if not feature.name:
            yield Finding((*path, "name"), "the name is empty")


def _repeated(config: Config) -> Iterator[Finding]:
    counts = Counter(feature.name for _, feature in _features(config))
    seen: set[str] = set()
    for path, feature in _features(config):
        if feature.name in seen:
            found = f"the feature {feature.name!r} is listed {counts[feature.name]} times"
            yield Finding((*path, "name"), found)
        seen.add(feature.name)


def _label_as_feature(config: Config) -> Iterator[Finding]:
    label = config.data.label.column
    if label is None:
        return
    for path, feature in _features(config):
        key = "name" if feature.column is None else "column"
        if (feature.name if feature.column is None else feature.column) == label:
            yield Finding((*path, key), f"the feature {feature.name!r} reads the label's column {label!r}", (LABEL,))
        if isinstance(feature, SparseFeatureConfig) and feature.weights == label:
            yield Finding((*path, "weights"), f"the weights are the label's column {label!r}", (LABEL,))


def _tables_without_size(config: Config) -> Iterator[Finding]:
    for position, feature in enumerate(config.features.sparse):
        if feature.encoding != "vocabulary" and feature.num_embeddings is None:
            path = (*SPARSE, position)
            found = f"the feature {feature.name!r} has encoding: {feature.encoding} and no num_embeddings"
            yield Finding((*path, "num_embeddings"), found, also=((*path, "encoding"),))


def _two_label_rules(config: Config) -> Iterator[Finding]:
    label = config.data.label
    if label.at_least is not None and (label.positive is not None or label.negative is not None):
        other = "positive" if label.positive is not None else "negative"
        yield Finding((*LABEL, "at_least"), f"is given beside {other}", also=((*LABEL, other),))


def _negative_alone(config: Config) -> Iterator[Finding]:
    label = config.data.label
    for key in ("positive", "negative"):
        if getattr(label, key) == ():
            yield Finding((*LABEL, key), "names no value")
    if label.negative and label.positive is None:
        yield Finding((*LABEL, "negative"), "is given without positive", also=((*LABEL, "positive"),))


def _both_classes(config: Config) -> Iterator[Finding]:
    label = config.data.label
    for value in sorted(set(label.positive or ()) & set(label.negative or ())):
        found = f"the value {value!r} is in positive and in negative"
        yield Finding((*LABEL, "negative"), found, also=((*LABEL, "positive"),))


FEATURE_RULES = (
    Rule(
        "`features.dense` and `features.sparse` both empty",
        "a model needs something to read",
        "name at least one feature",
        _no_feature,
    ),
    Rule(
        "a feature with an empty name",
        "messages, tables and checkpoints go by the name",
        "name it, and give a nameless column as column: ''",
        _nameless,
    ),
    Rule(
        "two features of one name, dense or sparse",
        "they would share a table or a place",
        "rename one and keep its column: {name: NEW, column: OLD}",
        _repeated,
    ),
    Rule(
        "the label's column read by a feature or as weights",
        "the model would read what it is to predict",
        "take it out of the features, or correct data.label.column",
        _label_as_feature,
    ),
    Rule(
        "`encoding: hash` or `id` without `num_embeddings`",
        "the table's size does not follow from the data",
        "give num_embeddings (in the entry or in features.sparse_defaults), or use encoding: vocabulary",
        _tables_without_size,
    ),
    Rule(
        "`label.at_least` together with `label.positive` or `label.negative`",
        "one rule makes the label",
        "keep either the threshold or the lists; null takes one back",
        _two_label_rules,
    ),
    Rule(
        "`label.negative` without `label.positive`, or an empty list of values",
        "nothing says which values mean 1",
        "list the values that mean 1 in data.label.positive",
        _negative_alone,
    ),
    Rule(
        "a value in both `label.positive` and `label.negative`",
        "a row has one label",
        "keep it in one list",
        _both_classes,
    ),
)
