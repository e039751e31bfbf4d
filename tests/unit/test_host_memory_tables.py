"""Tables whose rows lie in host memory: TorchRec's planner is told of their kernels, and of the device's share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from models.embeddings import sharding_plan
from models.embeddings.exchanged import collection_of
from models.embeddings.layout import tables_of
from models.embeddings.sharding_plan import key_of, plan_sharding

ROWS_OF = {"user": 10_000_000, "item": 1000}
GIB = 2**30


def config_of(table: dict[str, Any]) -> Config:
    plain: dict[str, Any] = {
        "data": {"kind": "csv"},
        "features": {"sparse": [{"name": name, "embedding_dim": 64} for name in ROWS_OF]},
        "towers": [{"name": "deep", "kind": "mlp", "loss": {}}],
        "embedding": {"sharding": "table_wise", "tables": [{"name": "user"} | table]},
        "schedule": {"preset": "erase"},
        "optimizer": {"sparse": {"kind": "adagrad"}},
        "train": {"steps": 5, "local_batch_size": 64},
    }
    return apply_preset(Config.model_validate(plain))[0]


def plan(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, device_gib: float) -> tuple[str, Any]:
    """Kernel of the large table, of 2.4 GiB, and what TorchRec is told of its cache."""
    monkeypatch.setattr(sharding_plan, "_memory", lambda *_: {"hbm_cap": int(device_gib * GIB), "ddr_cap": 64 * GIB})
    config = config_of(table)
    tables = tables_of(config, ROWS_OF)
    collection = collection_of(tables, [key_of(at) for at in range(len(tables))], weighted=False)
    found, parameters = plan_sharding(config, tables, collection, World(), torch.device("cuda"))
    return found.tables["user"].kernel, parameters[key_of(0)].cache_params


def test_the_device_holds_the_share_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, cache = plan({"kernel": "fused_uvm_caching", "cache_share": 0.05}, monkeypatch, device_gib=2)
    assert kernel == "fused_uvm_caching"
    assert cache.load_factor == 0.05
    assert plan({"kernel": "fused_uvm"}, monkeypatch, device_gib=2) == ("fused_uvm", None)


def test_what_the_device_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="finds no place for the tables"):
        plan({}, monkeypatch, device_gib=2)
    with pytest.raises(UserError, match="finds no place for the tables"):
        plan({"kernel": "fused_uvm_caching", "cache_share": 0.95}, monkeypatch, device_gib=2)
