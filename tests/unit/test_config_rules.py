"""Combinations: every rule fires where it should, nowhere else, and says the way out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from erase_rec.config.feature_defaults import IDLE_DEFAULTS
from erase_rec.config.legality import (
    REDUCTION_TABLE,
    RULES,
    UNAVAILABLE,
    Launch,
    Reduction,
    available_presets,
    unavailable,
)
from erase_rec.config.presets import PRESETS, apply_preset
from erase_rec.config.relevance import RELEVANCE
from erase_rec.config.rules_page import rules_as_markdown
from erase_rec.config.schema import Config, PresetName


def make(**sections: Any) -> Config:
    plain: dict[str, Any] = {
        "data": {"kind": "csv"},
        "features": {"dense": ["I1", "I2"], "sparse": [{"name": "C1", "encoding": "vocabulary"}]},
        "towers": [
            {"name": "deep", "kind": "mlp", "loss": {"kind": "bce"}},
            {"name": "cross", "kind": "mlp", "loss": {"kind": "bce"}},
        ],
        "schedule": {"preset": "erase"},
        "train": {"steps": 5},
    }
    config, _ = apply_preset(Config.model_validate(plain | sections))
    return config


def towers(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": f"t{at}", "kind": "mlp", "loss": {}} | change for at, change in enumerate(changes)]


def sparse(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"sparse": [{"name": f"C{at}", "encoding": "vocabulary"} | entry for at, entry in enumerate(entries)]}


def broken(config: Config) -> list[tuple[str, str]]:
    """Key and message of every finding."""
    return [
        (".".join(map(str, finding.path)), rule.message(finding)) for rule in RULES for finding in rule.find(config)
    ]


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("no feature", {"features": {}, "towers": towers({})}, "features", "names a feature"),
    ("nameless", {"features": {"dense": ["I1", ""]}}, "features.dense.1.name", "column: ''"),
    ("twice", {"features": {"dense": ["I1", "I1"]}}, "features.dense.1.name", "'I1' is listed 2 times"),
    ("dense and sparse", {"features": {"dense": ["C0"]} | sparse({})}, "features.sparse.0.name", "'C0' is listed 2"),
    ("label listed", {"data": {"kind": "csv", "label": {"column": "I1"}}}, "features.dense.0.name", "'I1'"),
    (
        "label by column",
        {"data": {"kind": "csv", "label": {"column": "y"}}, "features": sparse({"column": "y"})},
        "features.sparse.0.column",
        "'y'",
    ),
    (
        "label as weights",
        {
            "data": {"kind": "csv", "label": {"column": "y"}},
            "features": sparse({"multi_valued": True, "weights": "y"}),
        },
        "features.sparse.0.weights",
        "the label's column 'y'",
    ),
    ("hash size", {"features": sparse({"encoding": "hash"})}, "features.sparse.0.num_embeddings", "encoding: hash"),
    ("id size", {"features": sparse({"encoding": "id"})}, "features.sparse.0.num_embeddings", "vocabulary"),
    (
        "two label rules",
        {"data": {"kind": "csv", "label": {"positive": "5", "at_least": 4}}},
        "data.label.at_least",
        "beside positive",
    ),
    ("negative alone", {"data": {"kind": "csv", "label": {"negative": "0"}}}, "data.label.negative", "positive"),
    ("no values", {"data": {"kind": "csv", "label": {"positive": []}}}, "data.label.positive", "names no value"),
    (
        "both classes",
        {"data": {"kind": "csv", "label": {"positive": ["1", "2"], "negative": ["2"]}}},
        "data.label.negative",
        "'2'",
    ),
    ("two eval sets", {"data": {"kind": "csv", "eval": "e", "eval_fraction": 0.1}}, "data.eval_fraction", "drop one"),
    ("untrained tower", {"towers": towers({}, {"loss": None})}, "towers.1.loss", "'t1' is detached and has no loss"),
    ("weightless", {"towers": towers({}, {"loss": {"weight": 0}})}, "towers.1.loss", "a loss of weight 0"),
    (
        "early, exact",
        {"schedule": {"preset": "exact", "early_backward": True}},
        "schedule.early_backward",
        "no tower is detached",
    ),
    ("tower twice", {"towers": towers({"name": "a"}, {"name": "a"})}, "towers.1.name", "2 towers are called 'a'"),
    ("stream name", {"towers": towers({"stream": "a b"})}, "towers.0.stream", "'a b'"),
    ("stream case", {"towers": towers({"stream": "Main"})}, "towers.0.stream", "did you mean 'main'?"),
    ("stream of tower", {"towers": towers({}, {"stream": "t0"})}, "towers.1.stream", "runs on 'own'"),
    (
        "unknown input",
        {"towers": towers({"inputs": {"sparse": ["C1", "C11"]}})},
        "towers.0.inputs.sparse",
        "did you mean 'C1'?",
    ),
    ("wrong list", {"towers": towers({"inputs": {"dense": ["C1"]}})}, "towers.0.inputs.dense", "no 'C1'"),
    ("blind", {"towers": towers({"inputs": {"dense": False, "sparse": []}})}, "towers.0.inputs", "reads no feature"),
    (
        "blind, no dense",
        {"features": sparse({}), "towers": towers({"inputs": {"sparse": False}})},
        "towers.0.inputs",
        "reads no feature",
    ),
    (
        "tables, main",
        {"schedule": {"preset": "erase", "embedding_gradient": "main"}},
        "schedule.embedding_gradient",
        "every tower is detached",
    ),
    (
        "tables, local",
        {"schedule": {"preset": "exact", "embedding_gradient": "local"}, "towers": towers({"loss": None})},
        "schedule.embedding_gradient",
        "no tower has a loss",
    ),
    ("no duration", {"train": {}}, "train", "none of steps, epochs, samples"),
    ("two durations", {"train": {"steps": 1, "samples": 5}}, "train.samples", "given beside steps"),
    (
        "stopping metric",
        {"train": {"steps": 1, "early_stopping": {"metric": "eval.nee"}}},
        "train.early_stopping.metric",
        "did you mean 'eval.ne'?",
    ),
    (
        "plateau metric",
        {"optimizer": {"lr_schedule": {"kind": "plateau", "metric": "train.ne"}}},
        "optimizer.lr_schedule.metric",
        "eval.auc",
    ),
    ("step", {"optimizer": {"lr_schedule": {"kind": "step"}}}, "optimizer.lr_schedule.step_every", "step_every"),
    ("ignored", {"optimizer": {"lr_schedule": {"kind": "cosine", "power": 2}}}, "optimizer.lr_schedule.power", "poly"),
    ("momentum", {"optimizer": {"dense": {"momentum": 0.9}}}, "optimizer.dense.momentum", "kind: sgd only"),
    ("beta", {"optimizer": {"sparse": {"beta2": 0.9}}}, "optimizer.sparse.beta2", "found kind: rowwise_adagrad"),
    (
        "min_count",
        {"features": sparse({"encoding": "hash", "num_embeddings": 3, "min_count": 2})},
        "features.sparse.0.min_count",
        "vocabulary",
    ),
    ("separator", {"features": sparse({"separator": "|"})}, "features.sparse.0.separator", "multi_valued: true only"),
    (
        "mean weights",
        {"features": sparse({"multi_valued": True, "weights": "w", "pooling": "mean"})},
        "features.sparse.0.weights",
        "pooling: sum only",
    ),
    (
        "FUP alone",
        {"distributed": {"find_unused_parameters": True}},
        "distributed.find_unused_parameters",
        "reduction: ddp only",
    ),
    (
        "FUP, bucket",
        {"distributed": {"reduction": "bucket", "find_unused_parameters": False}},
        "distributed.find_unused_parameters",
        "found reduction: bucket",
    ),
    (
        "graph, FUP",
        {
            "schedule": {"preset": "erase", "cuda_graph": "step"},
            "distributed": {"reduction": "ddp", "find_unused_parameters": True},
        },
        "distributed.reduction",
        "drift apart",
    ),
]


@pytest.mark.parametrize(("sections", "key", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_combination_is_one_finding(sections: dict[str, Any], key: str, words: str) -> None:
    found = broken(make(**sections))
    assert len(found) == 1, found
    assert found[0][0] == key
    assert words in found[0][1]


def test_every_rule_has_a_bad_example() -> None:
    seen = {rule.refused for row in BAD for rule in RULES if list(rule.find(make(**row[1])))}
    assert {rule.refused for rule in RULES} - seen == set()


GOOD: list[dict[str, Any]] = [
    {},
    {"schedule": {"preset": "exact"}, "towers": towers({"loss": None})},
    {"schedule": {"preset": "exact"}, "towers": towers({"loss": {"weight": 0}})},
    {"towers": towers({"stream": "shared"}, {"stream": "shared"}, {"stream": "main"})},
    {"towers": towers({"stream": "t0"}, {"stream": "t0"})},
    {
        "towers": towers({"detach": False, "loss": None}, {}),
        "schedule": {"preset": "erase", "embedding_gradient": "main"},
    },
    {"features": {"dense": ["I1"]}, "schedule": {"preset": "erase", "embedding_gradient": "main"}},
    {"data": {"kind": "csv", "label": {"positive": "1", "negative": "0"}}},
    {"data": {"kind": "csv", "label": {"column": "I1"}}, "features": {"dense": [{"name": "I1", "column": "other"}]}},
    {"features": {"dense": [{"name": "a", "column": "x"}, {"name": "b", "column": "x"}]}},
    {"features": sparse({"multi_valued": True, "weights": "w", "separator": "|", "max_length": 3})},
    {"features": sparse({"pooling": "mean"})},
    {"optimizer": {"lr_schedule": {"kind": "constant", "warmup_steps": 5, "min_factor": 0, "power": 1}}},
    {"optimizer": {"lr_schedule": {"kind": "plateau", "metric": "eval.auc", "gamma": 0.5, "min_factor": 0.1}}},
    {"optimizer": {"dense": {"kind": "sgd", "momentum": 0.9}, "sparse": {"kind": "adam", "beta1": 0.8}}},
    {"train": {"samples": 5, "precision": "bf16", "early_stopping": {"metric": "eval.calibration"}}},
]


@pytest.mark.parametrize("sections", GOOD)
def test_a_legal_combination_breaks_no_rule(sections: dict[str, Any]) -> None:
    assert broken(make(**sections)) == []


@pytest.mark.parametrize("row", RELEVANCE, ids=lambda row: f"{row.section[-1]}.{row.key}-{row.selector}")
def test_relevance_names_real_keys_and_values(row: Any) -> None:
    """A row with a misspelt key or value would refuse everything or nothing."""
    section: Any = make(features=sparse({}))
    for key in row.section:
        section = getattr(section, key)
    item = section[0] if isinstance(section, tuple) else section
    assert row.key in type(item).model_fields
    for value in row.values:
        assert getattr(type(item).model_validate(dict(item) | {row.selector: value}), row.selector) == value


FLAGS = {
    "ddp, FUP=True": {"reduction": "ddp", "find_unused_parameters": True},
    "ddp, FUP=False": {"reduction": "ddp"},
    "ddp_per_tower": {"reduction": "ddp_per_tower"},
    "bucket": {"reduction": "bucket"},
}
LAUNCHES: dict[str, list[dict[str, Any]]] = {
    "aggregate backward": [{"preset": "exact"}, {"preset": "detached"}],
    "blocking": [{"preset": "erase"}],
    "non_blocking": [{"preset": "erase", "dispatch": "non_blocking"}],
    "tower or step graph": [
        {"preset": preset, "cuda_graph": g} for preset, g in product(("exact", "erase"), ("tower", "step"))
    ],
}


@pytest.mark.parametrize(("launch", "reduction"), list(product(LAUNCHES, FLAGS)))
def test_the_reduction_table_decides_every_combination(launch: Any, reduction: Any) -> None:
    for schedule in LAUNCHES[launch]:
        found = broken(make(schedule=schedule, distributed=FLAGS[reduction]))
        assert (found == []) == REDUCTION_TABLE[launch, reduction].legal


def test_the_reduction_table_is_complete() -> None:
    assert set(REDUCTION_TABLE) == set(product(get_args(Launch), get_args(Reduction)))
    refused = {cell for cell, entry in REDUCTION_TABLE.items() if not entry.legal}
    assert refused == {
        ("non_blocking", "ddp_per_tower"),
        ("tower or step graph", "ddp, FUP=True"),
        ("tower or step graph", "ddp_per_tower"),
    }


def test_every_preset_is_declared() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    assert available_presets() == ["exact", "exact_streams", "detached", "erase"]


@pytest.mark.parametrize(
    ("preset", "detach", "stream", "early"),
    [
        ("exact", False, "main", False),
        ("exact_streams", False, "own", False),
        ("detached", True, "main", False),
        ("erase", True, "own", True),
    ],
)
def test_presets_fill_what_is_open(preset: str, detach: bool, stream: str, early: bool) -> None:
    config = make(schedule={"preset": preset})
    assert [(tower.detach, tower.stream) for tower in config.towers] == [(detach, stream)] * 2
    schedule = config.schedule
    assert (schedule.early_backward, schedule.dispatch, schedule.cuda_graph) == (early, "blocking", "none")
    assert (schedule.optimizer, schedule.embedding_gradient) == ("end", "both")


def test_presets_never_change_what_is_said() -> None:
    said = {"preset": "erase", "early_backward": False, "embedding_gradient": "local"}
    config = make(schedule=said, towers=towers({"detach": False, "stream": "main"}, {}))
    assert (config.towers[0].detach, config.towers[0].stream) == (False, "main")
    assert (config.towers[1].detach, config.towers[1].stream) == (True, "own")
    assert (config.schedule.early_backward, config.schedule.embedding_gradient) == (False, "local")
    _, filled = apply_preset(config)
    assert filled == frozenset()


def unavailable_keys(**sections: Any) -> list[tuple[str, str]]:
    plain = make().model_dump() | {"schedule": {"preset": "erase"}} | sections
    config, filled = apply_preset(Config.model_validate(plain))
    return [(".".join(map(str, path)), message) for path, message in unavailable(config, filled)]


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"schedule": {"dispatch": "non_blocking"}}, "schedule.dispatch", "non_blocking is not available"),
        ({"schedule": {"cuda_graph": "tower"}}, "schedule.cuda_graph", "use none"),
        ({"schedule": {"cuda_graph": "step"}}, "schedule.cuda_graph", "use none"),
        ({"schedule": {"optimizer": "per_tower"}}, "schedule.optimizer", "use end"),
        ({"distributed": {"reduction": "ddp"}}, "distributed.reduction", "one process"),
        ({"distributed": {"find_unused_parameters": False}}, "distributed.find_unused_parameters", "false is not"),
        ({"schedule": {"preset": "paper_row3"}}, "schedule.preset", "reduction: ddp"),
        ({"schedule": {"preset": "paper_row2"}}, "schedule.preset", "find_unused_parameters: true"),
        ({"schedule": {"preset": "paper_row1"}}, "schedule.preset", "cuda_graph: tower"),
        ({"schedule": {"preset": "paper_row0"}}, "schedule.preset", "exact, exact_streams, detached, erase"),
    ],
)
def test_what_this_version_lacks_is_refused(sections: dict[str, Any], key: str, words: str) -> None:
    found = unavailable_keys(**sections)
    assert [entry[0] for entry in found] == [key]
    assert words in found[0][1]


@pytest.mark.parametrize("preset", ["exact", "exact_streams", "detached", "erase"])
def test_what_this_version_has_is_not_refused(preset: str) -> None:
    assert unavailable_keys(schedule={"preset": preset}) == []


@pytest.mark.parametrize("name", ["paper_row3", "paper_row2", "paper_row1", "paper_row0"])
def test_the_papers_rows_are_legal_combinations(name: str) -> None:
    """They are unavailable, not wrong."""
    assert broken(make(schedule={"preset": name})) == []


def test_the_documented_rules_are_the_loaders(checkout: Path) -> None:
    """Write the page again with `python -m erase_rec.config.rules_page`."""
    page = (checkout / "docs" / "configuration_rules.md").read_text(encoding="utf-8")
    assert page == rules_as_markdown()
    shown: Sequence[str] = [rule.refused for rule in (*RULES, IDLE_DEFAULTS)]
    assert all(text in page for text in (*shown, *(".".join(entry.path) for entry in UNAVAILABLE)))
