"""Placements: which are tried, what is chosen, and that trying them leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from schedule_cases import make_config, tower

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.config.load import load_config
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from erase_rec.schedule import autotune as module
from erase_rec.schedule.autotune import SHARES, Choice, Tuning, autotune, candidates, nothing_learnt
from erase_rec.schedule.plan import Plan


def plan_of(*towers: dict[str, Any]) -> Plan:
    return Plan.from_config(make_config(towers, schedule={"preset": "erase"}))


def test_candidates_start_with_the_configured_one_and_follow_the_slowest() -> None:
    plan = plan_of(tower("deep"), tower("dot"), tower("cross"))
    found = candidates(plan, {"deep": 1.0, "dot": 3.0, "cross": 2.0})
    assert found[0] == Choice(launch_order=("deep", "dot", "cross"), high_priority=())
    assert Choice(launch_order=("dot", "cross", "deep"), high_priority=("dot",)) in found
    assert Choice(launch_order=("deep", "cross", "dot"), high_priority=("dot",)) in found
    assert Choice(launch_order=found[0].launch_order, high_priority=("dot", "cross"), parameters_beside=True) in found
    one_by_one = replace(plan, may_run_beside=False)
    assert not any(
        choice.parameters_beside for choice in candidates(one_by_one, {"deep": 1.0, "dot": 3.0, "cross": 2.0})
    )
    assert len(found) == len(set(found))


def test_a_chain_keeps_its_order_and_the_main_stream_its_priority() -> None:
    plan = plan_of(tower("deep"), tower("dot", "deep"), tower("cross", stream="main"))
    for choice in candidates(plan, {"deep": 1.0, "dot": 5.0, "cross": 9.0}):
        assert choice.launch_order.index("deep") < choice.launch_order.index("dot")
        assert "cross" not in choice.high_priority


def test_the_configured_placement_stays_unless_another_saves_enough() -> None:
    first, second = (Choice(launch_order=("a", "b"), high_priority=named) for named in ((), ("a",)))
    assert Tuning.by([(first, 1.0), (second, 0.999)]).choice == first
    chosen = Tuning.by([(first, 1.0), (second, 0.9)])
    assert chosen.choice == second
    assert "0.900 ms a step instead of 1.000" in chosen.sentence()
    assert "schedule.high_priority=[a]" in chosen.sentence()
    assert Tuning.model_validate_json(chosen.model_dump_json()) == chosen


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that tried placements first is the run that did not, bit for bit: states, statistics, random numbers."""
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "STEPS", 2)
    overrides = [
        "data.params={rows: 4000, eval_rows: 500}",
        "train.local_batch_size=64",
        "train.device=cpu",
        "towers.deep.params={hidden: [16], out_dim: 8, dropout: 0.3, batch_norm: true}",
        "optimizer.sparse.kind=adam",
    ]
    config = load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog()).config
    datasets, machine = build_datasets(config), Machine.prepare(config)
    batches: list[Batch] = list(datasets.train.batches(0))[:8]

    def trained(tuned: bool) -> dict[str, torch.Tensor]:
        parts = build_parts(config, datasets, RunFolder(Path()), machine, World())
        if tuned:

            def trial(plan: Plan) -> Any:
                other = build_parts(config, datasets, RunFolder(Path()), machine, World())
                assert other.plan.towers == plan.towers
                return parts.step, parts.streams

            with nothing_learnt(parts.model, parts.optimizer, machine.device):
                tuning = autotune(replace(parts.plan), batches, trial, World())
            assert len(tuning.measured) > 3 + len(SHARES)
            assert [choice.matmul_share for choice, _ in tuning.measured[-len(SHARES) :]] == list(SHARES)
            parts.guard.step = 0
        torch.manual_seed(7)
        parts.optimizer.set_lr(0.01)
        parts.model.embeddings.set_lr(0.02)
        for batch in batches:
            parts.step(batch)
        tables = parts.model.embeddings.tables()
        state = {f"{t}/{n}": v for t, e in parts.model.embeddings.optimizer_state().items() for n, v in e.items()}
        return {**parts.model.dense_state(), **tables, **parts.optimizer.state(), **state}

    expected, found = trained(False), trained(True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
