"""Spread tables beside a captured step, on one NCCL rank: the steps of the plain launch, and those of whole tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.dataset import Datasets, build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.lr_schedule import LRSchedule
from erase_rec.prefetch import prefetch
from erase_rec.run_folder import RunFolder
from erase_rec.schedule.program import program
from erase_rec.training_loop import Parts

pytestmark = pytest.mark.gpu
ROWS, STEPS = 512, 60
COMMON = [
    "data.params={rows: 12000, eval_rows: 1000}",
    f"train.local_batch_size={ROWS}",
    "train.device=cuda",
    "train.tf32=false",
    "optimizer.lr_schedule.warmup_steps=10",
    "optimizer.sparse.kind=adagrad",
    "schedule.preset=erase",
    "distributed.reduction=bucket",
]
WAYS = {
    "whole": ["schedule.cuda_graph=none"],
    "spread": ["embedding.sharding=auto", "schedule.cuda_graph=none"],
    "captured": ["embedding.sharding=auto", "schedule.strict=true"],
    "captured, cuts nothing now and then": [
        "embedding.sharding=auto",
        "schedule.strict=true",
        "schedule.exact_every=4",
    ],
}
SHARDING = {"C1": "row_wise", "C2": "column_wise", "C3": "table_wise", "C4": "data_parallel"}
TABLES = ", ".join(f"{{name: {name}, sharding: {sharding}}}" for name, sharding in SHARDING.items())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(on_cuda=True, timeout_s=60, grouped=True) as joined:
        yield joined


@pytest.fixture(scope="module")
def datasets() -> Datasets:
    return build_datasets(load([]), pin=True)


def load(overrides: list[str]) -> Config:
    spread = [f"embedding.tables=[{TABLES}]"] if "embedding.sharding=auto" in overrides else []
    return load_config("ctr_erase.yaml", [*COMMON, *overrides, *spread], catalog=ContentCatalog()).config


def train(overrides: list[str], datasets: Datasets, world: World) -> tuple[Parts, Tensor]:
    """Main and local losses of steps whose ids are sent ahead; the last two are measured."""
    world.collectives = CollectiveLog()
    config = load(overrides)
    parts = build_parts(config, datasets, RunFolder(Path()), Machine.prepare(config), world)
    embeddings, schedule, found = parts.model.embeddings, LRSchedule(config.optimizer.lr_schedule, STEPS), []
    full = (batch for _ in range(STEPS) for batch in datasets.train.batches(0) if batch.size == ROWS)
    expect = embeddings.expect if parts.sharding is not None else None
    for number, batch in enumerate(prefetch(full, parts.step.device(), expect=expect, count=STEPS)):
        world.collectives.step = number
        factor = schedule.factor(number)
        parts.optimizer.set_lr(config.optimizer.dense.lr * factor)
        embeddings.set_lr(config.optimizer.sparse.lr * factor)
        output = parts.step(batch, measure=number >= STEPS - 2)
        found.append(torch.stack([output.loss, *output.local_losses.values()]))
    parts.guard.drain()
    embeddings.verify()
    return parts, torch.stack(found).cpu()


def asked_for(world: World) -> list[tuple[str, int]]:
    """Collectives of the last steps."""
    return [(entry.group, entry.numel) for entry in world.collectives.recent if entry.step >= STEPS - 3]


def test_a_captured_step_beside_spread_tables_is_the_plain_step(world: World, datasets: Datasets) -> None:
    plain, expected = train(WAYS["spread"], datasets, world)
    log = asked_for(world)
    captured, found = train(WAYS["captured"], datasets, world)
    assert captured.plan.cuda_graph == "dense"
    assert {plan.sharding for plan in plain.sharding.tables.values()} >= {*SHARDING.values()}  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert asked_for(world) == log, "a replay tells of its collectives, in their order"
    for name, value in plain.model.dense_state().items():
        torch.testing.assert_close(captured.model.dense_state()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    tables = captured.model.embeddings.tables()
    for name, value in plain.model.embeddings.tables().items():
        pairs = zip(parts_of(tables[name]), parts_of(value), strict=True)
        for other, part in pairs:
            torch.testing.assert_close(other, part, rtol=1e-4, atol=1e-6, msg=name)
    assert [each.op for each in captured.streams.intervals()] == [*program(captured.plan)]


def parts_of(held: Tensor | Shards) -> list[Tensor]:
    return [part.tensor for part in held.parts] if isinstance(held, Shards) else [held]


def test_spread_tables_learn_as_whole_ones_do(world: World, datasets: Datasets) -> None:
    _, expected = train(WAYS["whole"], datasets, world)
    _, found = train(WAYS["captured"], datasets, world)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_steps_that_cut_nothing_have_captures_of_their_own(world: World, datasets: Datasets) -> None:
    way = WAYS["captured, cuts nothing now and then"]
    plain = [each for each in way if "strict" not in each]
    _, expected = train([*plain, "schedule.cuda_graph=none"], datasets, world)
    _, found = train(way, datasets, world)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
