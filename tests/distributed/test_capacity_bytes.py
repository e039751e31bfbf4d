"""What ``erase-rec plan`` expects of the network, against what ranks give to their collectives in a real step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from schedule_cases import CPU, make_batch, make_config, make_gradients, make_step, rank_share, tower

from erase_rec.capacity.cluster import Cluster
from erase_rec.capacity.traffic import of_dense, of_tables
from erase_rec.cli.plan_workshop import Question, dense_demand, place
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.table_plan import ShardingPlan
from models.ctr_model import build_model
from models.embeddings.build import build_rank_embeddings
from models.embeddings.layout import tables_of

ROWS_OF = {"a": 11, "b": 7, "c": 5}
ROWS, STEPS = 6, 3
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "row_wise": {"sharding": "row_wise"},
    "table_wise": {"sharding": "table_wise"},
    "column_wise": {"sharding": "column_wise", "tables": [{"name": name, "column_width": 4} for name in ROWS_OF]},
    "data_parallel": {"sharding": "data_parallel"},
    "mixed": {
        "sharding": "auto",
        "tables": [
            {"name": "a", "sharding": "row_wise"},
            {"name": "b", "sharding": "column_wise", "column_width": 4},
            {"name": "c", "sharding": "data_parallel"},
        ],
    },
}
TOWERS = [tower("deep"), tower("dot", loss=0.5, target="joint"), tower("cross", loss=0.5, detach=False)]


def config_of(way: str) -> Config:
    return make_config(
        TOWERS,
        embedding={"dim": 8} | WAYS[way],
        schedule={"cuda_graph": "none"},
        distributed={"reduction": "bucket", "bucket_mib": 1e-4},
        optimizer={"sparse": {"kind": "adagrad", "lr": 0.05, "eps": 1e-2}},
        train={"steps": 1, "local_batch_size": ROWS},
    )


def given() -> dict[str, tuple[Counter[str], ShardingPlan | None]]:
    """Bytes that this rank gave in all steps, by way and group, and the plan that it followed."""
    found = {}
    with join_world(on_cuda=False, timeout_s=60, grouped=True) as world:
        for way in WAYS:
            config = config_of(way)
            embeddings, plan = build_rank_embeddings(config, ROWS_OF, CPU, torch.float32, world)
            step = make_step(config, make_gradients(build_model(config, embeddings, CPU), config, world))
            before = world.collectives.sent_bytes.copy()
            for number in range(STEPS):
                batch = make_batch(number, ROWS * world.size, torch.float32)
                step(rank_share(batch, world.rank, world.size))
            found[way] = world.collectives.sent_bytes - before, plan
    return found


def test_every_rank_gives_what_is_expected(run_ranks: Any) -> None:
    ranks = 2
    results = run_ranks(ranks, given, timeout_s=120)
    for way in WAYS:
        config, cluster = config_of(way), Cluster(ranks)
        tables = tables_of(config, ROWS_OF)
        demand = dense_demand(config, tables, cluster)
        expected = place(Question(config, tables, demand, cluster, 0, None))
        plan = results[0][way][1] or expected
        kinds = [each.sharding for each in plan.tables.values()]
        assert [each.sharding for each in expected.tables.values()] == kinds, "planned for GPUs as for these ranks"
        # The planner balances by bandwidths of devices, so that parts may lie elsewhere: bytes are of the real plan.
        placed = replace(demand, tables=[replace(each, plan=plan.tables[each.name]) for each in demand.tables])
        transfers = [*of_tables(placed, ranks), *(transfer for _, transfer in of_dense(placed, ranks))]
        for rank, result in enumerate(results):
            wanted: Counter[str] = Counter()
            for transfer in transfers:
                wanted[transfer.group] += STEPS * transfer.given[rank]
            measured = Counter(
                {group: count for group, count in result[way][0].items() if group != "tables.input_sizes"}
            )
            assert measured == +wanted, (way, rank)
