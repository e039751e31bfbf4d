"""What is said and refused about tables that are spread over ranks; drawing and picking without the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from erase_rec.batch import SparseBatch
from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from erase_rec.config.sharding_rules import SHARDING_RULES
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.distributed.table_plan import Place, ShardingPlan, TablePlan
from models.embeddings.layout import Table, select_features


def make(kind: str = "adagrad", **sections: Any) -> Config:
    plain: dict[str, Any] = {
        "data": {"kind": "csv"},
        "features": {"sparse": [{"name": "user", "embedding_dim": 24}, {"name": "item", "embedding_dim": 8}]},
        "towers": [{"name": "deep", "kind": "mlp", "loss": {"kind": "bce"}}],
        "schedule": {"preset": "erase"},
        "optimizer": {"sparse": {"kind": kind}},
        "train": {"steps": 5},
    }
    return apply_preset(Config.model_validate(plain | sections))[0]


def broken(config: Config) -> list[tuple[str, str]]:
    return [
        (".".join(map(str, finding.path)), rule.message(finding))
        for rule in SHARDING_RULES
        for finding in rule.find(config)
    ]


def spread(*tables: dict[str, Any], sharding: str = "auto", **keys: Any) -> dict[str, Any]:
    return {"embedding": {"sharding": sharding, "tables": list(tables)} | keys}


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown", spread({"name": "usr"}), "embedding.tables.0.name", "did you mean 'user'"),
    ("twice", spread({"name": "user"}, {"name": "user"}), "embedding.tables.1.name", "listed before"),
    (
        "row statistics of a table",
        spread({"name": "item", "sharding": "column_wise"}) | {"optimizer": {"sparse": {"kind": "rowwise_adagrad"}}},
        "embedding.tables.0.sharding",
        "learning rate of its own",
    ),
    (
        "no divisor",
        spread({"name": "user", "sharding": "column_wise", "column_width": 16}),
        "embedding.tables.0.column_width",
        "is 16, of a table of 24 columns",
    ),
    (
        "no multiple of 4",
        spread({"name": "user", "sharding": "column_wise", "column_width": 6}),
        "embedding.tables.0.column_width",
        "multiples of 4",
    ),
    (
        "width of rows",
        spread({"name": "user", "sharding": "row_wise", "column_width": 8}),
        "embedding.tables.0.column_width",
        "the table's sharding is row_wise",
    ),
    (
        "host memory of the host",
        spread({"name": "user", "kernel": "fused_uvm"}) | {"train": {"steps": 5, "device": "cpu"}},
        "embedding.tables.0.kernel",
        "train.device is cpu",
    ),
]
"""Beside the one example of each rule in ``test_config_rules.py``."""
GOOD: list[dict[str, Any]] = [
    {},
    spread(),
    spread(sharding="column_wise"),
    spread({"name": "user", "sharding": "column_wise", "column_width": 12}, {"name": "item", "kernel": "fused"}),
    spread({"name": "item", "column_width": 4}, sharding="column_wise"),
    spread({"name": "item", "kernel": "fused_uvm_caching"}),
]


@pytest.mark.parametrize(("sections", "key", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_work_is_refused_with_the_way_out(sections: dict[str, Any], key: str, words: str) -> None:
    ((found, message),) = broken(make(**sections))
    assert found == key
    assert words in message


@pytest.mark.parametrize("sections", GOOD)
def test_what_works_is_not_refused(sections: dict[str, Any]) -> None:
    assert broken(make(**sections)) == []


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [({}, "dense"), ({"dispatch": "non_blocking"}, "tower"), ({"early_backward": False}, "dense")],
)
def test_a_preset_that_captures_leaves_the_exchange_out(schedule: dict[str, Any], expected: str) -> None:
    assert make(**spread(), schedule={"preset": "erase"} | schedule).schedule.cuda_graph == expected
    assert make(schedule={"preset": "erase"}).schedule.cuda_graph == "step"


def test_a_table_is_drawn_piece_by_piece_as_it_is_drawn_whole() -> None:
    table = Table("user", 1000, 12, mean=False)
    pieces: dict[int, torch.Tensor] = {}
    table.draw(7, pieces.__setitem__, rows_at_once=64)
    assert torch.equal(torch.cat(list(pieces.values())), table.initial_weight(7))
    assert list(pieces) == list(range(0, 1000, 64))


@pytest.mark.parametrize("single", [True, False])
def test_features_are_picked_with_their_bags_and_weights(single: bool) -> None:
    lengths = torch.ones(6, dtype=torch.int32) if single else torch.tensor([2, 0, 1, 1, 0, 3], dtype=torch.int32)
    count = int(lengths.sum())
    batch = SparseBatch(torch.arange(count), lengths, torch.arange(count) / 2, 3, single)
    found = select_features(batch, [2, 0])
    assert found.values.tolist() == ([4, 5, 0, 1] if single else [4, 5, 6, 0, 1])
    assert found.weights is not None
    assert found.weights.tolist() == [value / 2 for value in found.values.tolist()]
    assert found.lengths.tolist() == [*lengths[4:].tolist(), *lengths[:2].tolist()]
    assert found.num_features == 2
    assert found.single_valued is single


def test_a_plan_says_what_is_where(tmp_path: Path) -> None:
    plan = ShardingPlan(
        2,
        {
            "días": TablePlan(
                2**20, 8, "row_wise", "fused", (Place(0, (0, 2**19), (0, 8)), Place(1, (2**19, 2**20), (0, 8)))
            ),
            "small": TablePlan(2**18, 4, "table_wise", "fused", (Place(1, (0, 2**18), (0, 4)),)),
        },
    )
    assert plan.text().splitlines() == [
        "2 tables over 2 ranks; weights of a rank: 16.00 to 20.00 MiB",
        "  días   1,048,576 x 8  row_wise (fused), ranks 0, 1",
        "  small    262,144 x 4  table_wise (fused), rank 1",
    ]
    plan.write(tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert written["world_size"] == 2
    assert written["tables"]["small"]["places"] == [{"rank": 1, "rows": [0, 2**18], "columns": [0, 4]}]


def test_the_log_counts_bytes_and_tells_ranks_apart_by_entries_alone() -> None:
    first, second = CollectiveLog(), CollectiveLog()
    for log, count in ((first, 100), (second, 300)):
        log.record("tower:deep", 5, torch.float32)
        log.record("tables.exchange", 0, torch.uint8)
        log.sent("tables.exchange", count)
    assert first.sent_bytes == {"tower:deep": 20, "tables.exchange": 100}
    assert second.sent_bytes["tables.exchange"] == 300
    assert first.digest() == second.digest()
