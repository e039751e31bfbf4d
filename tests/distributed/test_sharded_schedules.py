"""Sharded tables under every legal schedule: 20 steps on 2 and 3 ranks equal one process with the whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from schedule_cases import (
    CPU,
    State,
    assert_same,
    make_batch,
    make_config,
    make_gradients,
    make_step,
    rank_share,
    refusals,
    state_of,
    tower,
)

from erase_rec.batch import Batch
from erase_rec.config.legality import REDUCTION_TABLE, Launch, Reduction
from erase_rec.config.schema import Config
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from models.ctr_model import build_model
from models.embeddings.build import build_rank_embeddings

ROWS_OF = {"a": 11, "b": 7, "c": 5}
STEPS = 20
LAUNCHES: dict[Launch, dict[str, Any]] = {
    "aggregate backward": {"early_backward": False},
    "blocking": {"dispatch": "blocking", "cuda_graph": "none"},
    "non_blocking": {"dispatch": "non_blocking", "cuda_graph": "none"},
    "tower graph": {"cuda_graph": "tower"},
    "dense graph": {"cuda_graph": "dense"},
}
"""Without CUDA graphs every operation is launched by itself; the step graph is refused, see below."""
REDUCTIONS: dict[Reduction, dict[str, Any]] = {
    "ddp, FUP=True": {"reduction": "ddp", "find_unused_parameters": True},
    "ddp, FUP=False": {"reduction": "ddp", "find_unused_parameters": False},
    "ddp_per_tower": {"reduction": "ddp_per_tower"},
    "bucket": {"reduction": "bucket", "bucket_mib": 1e-4},
}
CELLS = [
    cell
    for cell, entry in REDUCTION_TABLE.items()
    if entry.legal and cell[0] in LAUNCHES and cell not in {("tower graph", "ddp, FUP=False")}
]
"""What is left out needs a device's captures."""
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": "a", "sharding": "row_wise"},
        {"name": "b", "sharding": "column_wise", "column_width": 4},
        {"name": "c", "sharding": "table_wise"},
    ],
    3: [
        {"name": "a", "sharding": "table_wise"},
        {"name": "b", "sharding": "row_wise"},
        {"name": "c", "sharding": "data_parallel"},
    ],
}
"""Constraints of a run by its ranks; together all sharding types."""
TOLERANCE = 2e-5
"""float32: a gradient's sum over rows in another order differs in its last bits, 1e-7; Adagrad divides the first ones
by themselves and 20 steps of size 0.1 add them up."""
TOWERS = [
    tower("deep"),
    tower("dot", "deep", loss=0.5, target="joint", stream="shared"),
    tower("cross", "dot", loss=0.5, detach=False, stream="main"),
    tower("pairs", loss=2.0, target="joint", stream="shared"),
]


def cell_config(cell: tuple[Launch, Reduction], ranks: int) -> Config:
    spread = {"sharding": "auto", "tables": PLANS[ranks]} if ranks > 1 else {}
    return make_config(
        TOWERS,
        embedding={"dim": 8} | spread,
        schedule=LAUNCHES[cell[0]],
        distributed=REDUCTIONS[cell[1]],
        optimizer={"dense": {"kind": "sgd", "lr": 0.05}, "sparse": {"kind": "adagrad", "lr": 0.05, "eps": 1e-2}},
        train={"steps": 1, "local_batch_size": 6},
    )


def batches() -> list[Batch]:
    """Whole batches; every fifth, as an epoch's last one, is shorter."""
    return [make_batch(step, 6 if step % 5 == 4 else 12, torch.float32) for step in range(STEPS)]


def train(config: Config, world: World | None = None) -> State:
    """Parameters and whole tables after a step for each of the batches."""
    ranks = world or World()
    embeddings, _ = build_rank_embeddings(config, ROWS_OF, CPU, torch.float32, ranks)
    model = build_model(config, embeddings, CPU)
    step = make_step(config, make_gradients(model, config, world))
    for number, batch in enumerate(batches()):
        ranks.collectives.step = number
        step(rank_share(batch, ranks.rank, ranks.size))
    spread = {name: held for name, held in embeddings.tables().items() if isinstance(held, Shards)}
    state = state_of(model) if not spread else {name: value.clone() for name, value in model.dense_state().items()}
    for name, held in embeddings.tables().items():
        if not isinstance(held, Shards):
            state[f"tables.{name}"] = held.clone()
            continue
        whole = state[f"tables.{name}"] = torch.full(held.shape, torch.nan)
        for parts in ranks.gather_objects("test", [(part.offsets, part.tensor.clone()) for part in held.parts]):
            for (row, column), part in parts:
                whole[row : row + part.shape[0], column : column + part.shape[1]] = part
    return state


def train_cells() -> list[tuple[State, str, list[str]]]:
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        results = []
        for cell in CELLS:
            world.collectives = CollectiveLog()
            state = train(cell_config(cell, world.size), world)
            issued = [entry.group for entry in world.collectives.recent if entry.step == 1]
            results.append((state, world.collectives.digest(), issued))
        return results


@pytest.mark.timeout(270)
@pytest.mark.parametrize("size", [2, 3])
def test_every_sharding_under_every_legal_schedule_equals_one_process(run_ranks: Any, size: int) -> None:
    ranks = run_ranks(size, train_cells, timeout_s=240)
    expected = train(cell_config(("aggregate backward", "bucket"), 1))
    for number, cell in enumerate(CELLS):
        assert refusals(cell_config(cell, size)) == []
        results = [of_rank[number] for of_rank in ranks]
        for state, _, _ in results:
            assert_same(state, expected, TOLERANCE)
        assert len({digest for _, digest, _ in results}) == 1
        # One exchange, before any dense gradient is reduced through our door, and one for the tables' gradients.
        issued = results[0][2]
        assert issued[:3] == ["tables.input_sizes", "tables.input", "tables.exchange"]
        assert issued.count("tables.exchange") == issued.count("tables.gradient") == 1


def test_a_step_graph_of_spread_tables_is_refused_and_the_preset_captures_the_rest() -> None:
    config = make_config(TOWERS, embedding={"dim": 8, "sharding": "auto"})
    assert config.schedule.cuda_graph == "dense"
    assert refusals(config) == []
    config = make_config(TOWERS, embedding={"dim": 8, "sharding": "auto"}, schedule={"cuda_graph": "step"})
    assert any("which no capture can hold" in message for message in refusals(config))


def test_a_group_of_one_rank_has_its_tables_in_the_sharded_collection() -> None:
    """As on several, so that what that costs can be measured on one."""
    cell: tuple[Launch, Reduction] = ("dense graph", "bucket")
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        found = train(cell_config(cell, 2), world)
        issued = {entry.group for entry in world.collectives.recent}
    assert {"tables.input", "tables.exchange", "tables.gradient"} <= issued
    assert_same(found, train(cell_config(cell, 1)), TOLERANCE)


def test_nothing_is_spread_without_a_group() -> None:
    config = cell_config(("blocking", "bucket"), 2)
    embeddings, plan = build_rank_embeddings(config, ROWS_OF, CPU, torch.float32, World())
    assert plan is None
    assert all(isinstance(held, torch.Tensor) for held in embeddings.tables().values())
