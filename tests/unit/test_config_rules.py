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
    Launch,
    Reduction,
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


def reading(*names: str) -> dict[str, Any]:
    return {"inputs": {"towers": list(names)}}


def sparse(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"sparse": [{"name": f"C{at}", "encoding": "vocabulary"} | entry for at, entry in enumerate(entries)]}


def spread(*tables: dict[str, Any], sharding: str = "auto", **keys: Any) -> dict[str, Any]:
    """An embedding section that spreads tables over ranks."""
    return {"embedding": {"sharding": sharding, "tables": list(tables)} | keys}


def split(**keys: Any) -> dict[str, Any]:
    """A data section whose ``split`` holds ``keys``; ``eval`` and ``eval_fraction`` are its neighbours."""
    beside = {key: keys.pop(key) for key in ("eval", "eval_fraction", "label", "row_id") if key in keys}
    return {"data": {"kind": "csv", "split": keys} | beside}


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
    (
        "sampled at no rate",
        {"data": {"kind": "csv", "negatives_sampled": True}},
        "data.negatives_sampled",
        "give data.negative_sampling_rate",
    ),
    ("tables of copies", spread({"name": "C1"}, sharding="replicated"), "embedding.tables", "embedding.sharding: auto"),
    ("table of nothing", spread({"name": "C2"}), "embedding.tables.0.name", "named 'C2'"),
    ("spread without TorchRec", spread(backend="torch"), "embedding.backend", "embedding.backend: auto"),
    (
        "captured exchange",
        spread() | {"schedule": {"preset": "erase", "cuda_graph": "step"}},
        "schedule.cuda_graph",
        "use cuda_graph: dense",
    ),
    ("cut row statistics", spread(sharding="column_wise"), "embedding.sharding", "optimizer.sparse.kind: adagrad"),
    ("width of rows", spread({"name": "C1", "column_width": 4}), "embedding.tables.0.column_width", "sharding is auto"),
    (
        "kernel of a copy",
        spread({"name": "C1", "kernel": "fused"}, sharding="data_parallel"),
        "embedding.tables.0.kernel",
        "leave kernel out",
    ),
    (
        "cache of what lies on the device",
        spread({"name": "C1", "cache_share": 0.1}),
        "embedding.tables.0.cache_share",
        "the table's kernel is fused",
    ),
    ("two eval sets", {"data": {"kind": "csv", "eval": "e", "eval_fraction": 0.1}}, "data.eval_fraction", "drop one"),
    (
        "split beside files",
        split(eval="e", by="time", column="t", since="5"),
        "data.split.by",
        "is time beside files in data.eval",
    ),
    ("split by nothing", split(by="hash", eval_fraction=0.1), "data.split.column", "by: hash names no column"),
    ("hash of how many", split(by="hash", column="user"), "data.eval_fraction", "give data.eval_fraction"),
    ("column of what", split(by="column", column="day"), "data.split.values", "list the values"),
    ("time from when", split(by="time", column="day"), "data.split.since", "give data.split.since"),
    (
        "fraction of a time",
        split(by="time", column="day", since="5", eval_fraction=0.1),
        "data.eval_fraction",
        "split.by: time",
    ),
    ("no time", split(by="time", column="day", since="June"), "data.split.since", "found 'June'"),
    ("no finite time", split(by="time", column="day", since="nan"), "data.split.since", "finite"),
    (
        "split by the label",
        split(by="column", column="y", values=["1"], label={"column": "y"}),
        "data.split.column",
        "split by another column",
    ),
    ("label as row id", split(row_id="y", label={"column": "y"}), "data.row_id", "the label's column 'y'"),
    (
        "prepared stream",
        {"data": {"kind": "csv", "prepared": "p", "reading": "stream"}},
        "data.reading",
        "data.prepared: null",
    ),
    ("idle split column", split(column="user"), "data.split.column", "by: hash or column or time only"),
    (
        "idle split values",
        split(by="hash", column="u", values="1", eval_fraction=0.1),
        "data.split.values",
        "by: column",
    ),
    ("idle since", split(since="5"), "data.split.since", "by: time only"),
    ("idle share", {"data": {"kind": "csv", "max_bad_share": 0.5}}, "data.max_bad_share", "skip or quarantine"),
    ("idle window", {"data": {"kind": "csv", "shuffle": False, "shuffle_window": 5}}, "data.shuffle_window", "true"),
    ("untrained tower", {"towers": towers({}, {"loss": None})}, "towers.1.loss", "'t1' is detached and has no loss"),
    ("weightless", {"towers": towers({}, {"loss": {"weight": 0}})}, "towers.1.loss", "a loss of weight 0"),
    (
        "early, exact",
        {"schedule": {"preset": "exact", "early_backward": True}},
        "schedule.early_backward",
        "no tower is detached",
    ),
    ("tower twice", {"towers": towers({"name": "a"}, {"name": "a"})}, "towers.1.name", "2 towers are called 'a'"),
    ("reserved name", {"towers": towers({"name": "over_arch"})}, "towers.0.name", "a tower is called 'over_arch'"),
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
            "schedule": {"preset": "erase", "cuda_graph": "tower"},
            "distributed": {"reduction": "ddp", "find_unused_parameters": True},
        },
        "distributed.reduction",
        "use find_unused_parameters: false, or reduction: bucket",
    ),
    ("tower graph, exact", {"schedule": {"preset": "exact", "cuda_graph": "tower"}}, "schedule.cuda_graph", "or early"),
    (
        "step graph, non-blocking",
        {"schedule": {"preset": "erase", "cuda_graph": "step", "dispatch": "non_blocking"}},
        "schedule.dispatch",
        "use dispatch: blocking",
    ),
    (
        "autotune, towers captured",
        {"schedule": {"preset": "erase", "cuda_graph": "tower", "autotune": True}},
        "schedule.autotune",
        "use cuda_graph: step",
    ),
    (
        "autotune of what is said",
        {"schedule": {"preset": "erase", "autotune": True, "high_priority": ["deep"]}},
        "schedule.high_priority",
        "leave out one of them",
    ),
    (
        "parameters beside nothing",
        {"schedule": {"preset": "erase", "cuda_graph": "none", "parameters_beside": True}},
        "schedule.parameters_beside",
        "leave parameters_beside out",
    ),
    (
        "an order that lacks a tower",
        {"schedule": {"preset": "erase", "launch_order": ["deep"]}},
        "schedule.launch_order",
        "expected each of",
    ),
    (
        "priority of no tower",
        {"schedule": {"preset": "erase", "high_priority": ["depe"]}},
        "schedule.high_priority",
        "did you mean 'deep'",
    ),
    (
        "priority on the main stream",
        {"schedule": {"preset": "detached", "high_priority": ["deep"]}},
        "schedule.high_priority",
        "runs on the main stream",
    ),
    (
        "strict, nothing captured",
        {"schedule": {"preset": "exact", "strict": True}},
        "schedule.strict",
        "leave strict out",
    ),
    (
        "tables, all frozen",
        {"schedule": {"preset": "detached"}, "towers": towers({"frozen": True, "loss": None})},
        "schedule.embedding_gradient",
        "use embedding_gradient: none",
    ),
    (
        "early, all frozen",
        {
            "features": {"dense": ["I1"]},
            "schedule": {"preset": "erase"},
            "towers": towers({"frozen": True, "loss": None}),
        },
        "schedule.early_backward",
        "no tower is detached and trained",
    ),
    ("frozen, loss", {"towers": towers({}, {"frozen": True})}, "towers.1.loss", "'t1' is frozen and has a loss"),
    (
        "cut inside, not cut",
        {"towers": towers({}, {"cut_at": 1, "detach": False})},
        "towers.1.cut_at",
        "is not detached",
    ),
    (
        "cut inside, frozen",
        {"towers": towers({}, {"cut_at": 1, "frozen": True, "loss": None})},
        "towers.1.cut_at",
        "'t1' is frozen",
    ),
    ("cut inside, read", {"towers": towers({"cut_at": 2}, reading("t0"))}, "towers.0.cut_at", "use cut_at: 0"),
    (
        "pairs across parts",
        {"towers": towers({"loss": {"kind": "bce_pairwise"}}), "train": {"steps": 1, "micro_batches": 2}},
        "towers.0.loss.kind",
        "use train.micro_batches: 1",
    ),
    (
        "exact of nothing",
        {"schedule": {"preset": "exact", "exact_every": 2}},
        "schedule.exact_every",
        "leave exact_every out",
    ),
    (
        "exact under a reducer",
        {"schedule": {"preset": "paper_row2", "exact_every": 2}},
        "schedule.exact_every",
        "use distributed.reduction: bucket",
    ),
    ("reads itself", {"towers": towers(reading("t0"))}, "towers.0.inputs.towers", "'t0' reads itself"),
    (
        "reads nobody",
        {"towers": towers({"name": "deep"}, reading("deap"))},
        "towers.1.inputs.towers",
        "did you mean 'deep'?",
    ),
    ("reads later", {"towers": towers(reading("t1"), {})}, "towers.0.inputs.towers", "'t1' comes after 't0'"),
    ("reads twice", {"towers": towers({}, reading("t0", "t0"))}, "towers.1.inputs.towers", "named twice"),
    (
        "reads uncut",
        {"towers": towers({"detach": False}, reading("t0"))},
        "towers.1.inputs.towers",
        "'t1' reads 't0', which is not detached",
    ),
    (
        "reads uncut frozen",
        {"towers": towers({"detach": False, "frozen": True, "loss": None}, reading("t0"))},
        "towers.1.inputs.towers",
        "set detach: true",
    ),
    (
        "dispatch, aggregate",
        {"schedule": {"preset": "exact", "dispatch": "non_blocking"}},
        "schedule.dispatch",
        "use dispatch: blocking",
    ),
    ("workers", {"schedule": {"preset": "erase", "workers": 2}}, "schedule.workers", "dispatch: non_blocking only"),
    (
        "bucket size",
        {"distributed": {"reduction": "ddp_per_tower", "bucket_mib": 1}},
        "distributed.bucket_mib",
        "reduction: bucket or null only",
    ),
    (
        "global clip",
        {
            "schedule": {"preset": "erase", "optimizer": "per_tower"},
            "optimizer": {"dense": {"max_grad_norm": 1}},
        },
        "optimizer.dense.clip",
        "use optimizer.dense.clip: per_tower, or schedule.optimizer: end",
    ),
    (
        "clip without norm",
        {"optimizer": {"dense": {"clip": "per_tower"}}},
        "optimizer.dense.clip",
        "give optimizer.dense.max_grad_norm",
    ),
    (
        "micro-batches",
        {"train": {"steps": 1, "local_batch_size": 4, "micro_batches": 5}},
        "train.micro_batches",
        "4 rows cannot be cut into 5 parts",
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
    {"data": {"kind": "csv", "eval": "e"}},
    split(eval_fraction=0.1),
    split(by="hash", column="user", eval_fraction=0.1, row_id="id"),
    split(by="column", column="day", values=["6", ""]),
    split(by="time", column="hour", since="14102110"),
    split(by="time", column="at", since="2019-11-24T00:00:00+09:00"),
    {"data": {"kind": "csv", "bad_rows": "quarantine", "max_bad_share": 0.5}},
    {"data": {"kind": "csv", "prepared": "p", "shuffle_window": 5}},
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
    {"towers": towers({}, reading("t0"), reading("t1", "t0"))},
    {"towers": towers({}, {"inputs": {"dense": False, "sparse": False, "towers": ["t0"]}})},
    {"schedule": {"preset": "exact"}, "towers": towers({"loss": None}, reading("t0"))},
    {"towers": towers({}, reading("t0") | {"detach": False})},
    {"towers": towers({"detach": False}, reading("t0") | {"frozen": True, "loss": None}, {})},
    {"towers": towers({"frozen": True, "loss": None}, reading("t0"), {"frozen": True, "loss": {"weight": 0}})},
    {"schedule": {"preset": "exact"}, "towers": towers({"frozen": True, "loss": None})},
    {
        "schedule": {"preset": "detached", "embedding_gradient": "none"},
        "towers": towers({"frozen": True, "loss": None}),
    },
    {"schedule": {"preset": "erase", "dispatch": "non_blocking", "workers": 2, "optimizer": "per_tower"}},
    {
        "schedule": {"preset": "erase", "optimizer": "per_tower"},
        "optimizer": {"dense": {"max_grad_norm": 1, "clip": "per_tower"}},
    },
    {"optimizer": {"dense": {"max_grad_norm": 1, "clip": "per_tower"}}},
    {"distributed": {"bucket_mib": 1}},
    {"distributed": {"reduction": "bucket", "bucket_mib": 1, "check_every": 1, "timeout_s": 5}},
    {"train": {"steps": 1, "local_batch_size": 4, "micro_batches": 4}},
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
    "tower graph": [{"preset": preset, "cuda_graph": "tower"} for preset in ("exact", "erase")],
    "dense graph": [{"preset": preset, "cuda_graph": "dense"} for preset in ("exact", "exact_streams", "erase")],
    "step graph": [{"preset": preset, "cuda_graph": "step"} for preset in ("exact", "exact_streams", "erase")],
}


@pytest.mark.parametrize(("launch", "reduction"), list(product(LAUNCHES, FLAGS)))
def test_the_reduction_table_decides_every_combination(launch: Any, reduction: Any) -> None:
    for schedule in LAUNCHES[launch]:
        found = broken(make(schedule=schedule, distributed=FLAGS[reduction]))
        refused = any(key == "distributed.reduction" for key, _ in found)
        assert refused != REDUCTION_TABLE[launch, reduction].legal


@pytest.mark.parametrize(
    ("schedule", "reduction", "ways_out"),
    [
        (
            {"dispatch": "non_blocking"},
            "ddp_per_tower",
            [{"dispatch": "blocking"}, {"reduction": "bucket"}],
        ),
        (
            {"cuda_graph": "tower"},
            "ddp, FUP=True",
            [{"find_unused_parameters": False}, {"reduction": "bucket", "find_unused_parameters": None}],
        ),
        (
            {"cuda_graph": "tower"},
            "ddp_per_tower",
            [{"reduction": "bucket"}, {"reduction": "ddp", "find_unused_parameters": False}],
        ),
    ],
)
def test_the_way_out_of_a_refused_reduction_is_legal(
    schedule: dict[str, Any], reduction: str, ways_out: list[dict[str, Any]]
) -> None:
    schedule = {"preset": "erase"} | schedule
    ((_, message),) = broken(make(schedule=schedule, distributed=FLAGS[reduction]))
    for way_out in ways_out:
        for key, value in way_out.items():
            assert value is None or f"{key}: {str(value).lower()}" in message
        distributed = FLAGS[reduction] | {key: value for key, value in way_out.items() if key != "dispatch"}
        dispatch = {key: value for key, value in way_out.items() if key == "dispatch"}
        assert broken(make(schedule=schedule | dispatch, distributed=distributed)) == []


def test_the_reduction_table_is_complete() -> None:
    assert set(REDUCTION_TABLE) == set(product(get_args(Launch), get_args(Reduction)))
    refused = {cell for cell, entry in REDUCTION_TABLE.items() if not entry.legal}
    assert refused == {
        ("non_blocking", "ddp_per_tower"),
        ("tower graph", "ddp, FUP=True"),
        ("tower graph", "ddp_per_tower"),
        ("dense graph", "ddp, FUP=True"),
        ("dense graph", "ddp, FUP=False"),
        ("dense graph", "ddp_per_tower"),
        ("step graph", "ddp, FUP=True"),
        ("step graph", "ddp, FUP=False"),
        ("step graph", "ddp_per_tower"),
    }


def test_every_preset_is_declared() -> None:
    assert set(PRESETS) == set(get_args(PresetName))


@pytest.mark.parametrize(
    ("preset", "detach", "stream", "early", "cuda_graph"),
    [
        ("exact", False, "main", False, "none"),
        ("exact_streams", False, "own", False, "none"),
        ("detached", True, "main", False, "none"),
        ("erase", True, "own", True, "step"),
    ],
)
def test_presets_fill_what_is_open(preset: str, detach: bool, stream: str, early: bool, cuda_graph: str) -> None:
    config = make(schedule={"preset": preset})
    assert [(tower.detach, tower.stream) for tower in config.towers] == [(detach, stream)] * 2
    schedule = config.schedule
    assert (schedule.early_backward, schedule.dispatch, schedule.cuda_graph) == (early, "blocking", cuda_graph)
    assert schedule.optimizer == ("per_tower" if preset == "erase" else "end")
    assert schedule.embedding_gradient == "both"


@pytest.mark.parametrize(
    ("schedule", "distributed", "cuda_graph"),
    [
        ({}, {"reduction": "bucket"}, "step"),
        ({"dispatch": "non_blocking"}, {}, "tower"),
        ({}, {"reduction": "ddp", "find_unused_parameters": False}, "tower"),
        ({}, {"reduction": "ddp", "find_unused_parameters": True}, "none"),
        ({}, {"reduction": "ddp_per_tower"}, "none"),
        ({"early_backward": False}, {}, "step"),
        ({"early_backward": False}, {"reduction": "ddp"}, "none"),
        ({"cuda_graph": "none"}, {}, "none"),
    ],
)
def test_the_erase_preset_captures_where_it_can(schedule: Any, distributed: Any, cuda_graph: str) -> None:
    config = make(schedule={"preset": "erase", **schedule}, distributed=distributed)
    assert config.schedule.cuda_graph == cuda_graph
    assert not broken(config)


def test_the_erase_preset_updates_all_at_once_where_one_norm_is_asked_for() -> None:
    clipped = {"dense": {"max_grad_norm": 1.0}}
    config = make(schedule={"preset": "erase"}, optimizer=clipped)
    assert config.schedule.optimizer == "end"
    assert not broken(config)


def test_presets_never_change_what_is_said() -> None:
    said = {"preset": "erase", "early_backward": False, "embedding_gradient": "local"}
    config = make(schedule=said, towers=towers({"detach": False, "stream": "main"}, {}))
    assert (config.towers[0].detach, config.towers[0].stream) == (False, "main")
    assert (config.towers[1].detach, config.towers[1].stream) == (True, "own")
    assert (config.schedule.early_backward, config.schedule.embedding_gradient) == (False, "local")
    _, filled = apply_preset(config)
    assert filled == frozenset()


@pytest.mark.parametrize("preset", ["paper_row2", "paper_row3"])
def test_presets_fill_nothing_that_would_be_ignored(preset: str) -> None:
    """FUP of a paper's row with another reduction: it could not be taken back otherwise."""
    config = make(schedule={"preset": preset}, distributed={"reduction": "bucket"})
    assert config.distributed.find_unused_parameters is None
    assert broken(config) == []


@pytest.mark.parametrize("name", get_args(PresetName))
def test_every_preset_is_a_legal_combination(name: str) -> None:
    assert broken(make(schedule={"preset": name})) == []


def test_the_documented_rules_are_the_loaders(checkout: Path) -> None:
    """Write the page again with `python -m erase_rec.config.rules_page`."""
    page = (checkout / "docs" / "configuration_rules.md").read_text(encoding="utf-8")
    assert page == rules_as_markdown()
    shown: Sequence[str] = [rule.refused for rule in (*RULES, IDLE_DEFAULTS)]
    assert all(text in page for text in shown)
