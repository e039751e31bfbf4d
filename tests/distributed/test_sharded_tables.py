"""Tables spread over ranks equal one process with the ranks' batches joined, whatever the plan; bytes as counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.presets import apply_preset
from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.prefetch import prefetch
from models.embeddings.build import build_rank_embeddings
from models.embeddings.exchanged import EXCHANGE, GRADIENT
from models.embeddings.layout import IdRangeError, tables_of
from models.embeddings.sent_ids import INPUT
from models.embeddings.torchrec_backend import TorchRecEmbeddings

CPU = torch.device("cpu")
ROWS_OF = {"a": 50, "b": 7, "c": 2, "d": 31}
DIMS = {"a": 8, "b": 16, "c": 8, "d": 4}
POOLINGS = {"a": "sum", "b": "mean", "c": "sum", "d": "sum"}
STEPS = 4
TOLERANCE = 2e-6
"""float32: sums of gradients of a row in another order, and means of means, over some steps of size 0.3."""
SHARDINGS: dict[str, list[dict[str, Any]]] = {
    "table_wise": [],
    "row_wise": [],
    "column_wise": [{"name": "a", "column_width": 4}, {"name": "b", "column_width": 4}],
    "data_parallel": [],
    "auto": [{"name": "a", "sharding": "row_wise"}, {"name": "d", "sharding": "data_parallel"}],
}


def make_config(sharding: str, kind: str) -> Config:
    plain = {
        "data": {"kind": "synthetic"},
        "features": {
            "sparse": [
                {
                    "name": name,
                    "num_embeddings": rows,
                    "embedding_dim": DIMS[name],
                    "pooling": POOLINGS[name],
                    "multi_valued": True,
                }
                for name, rows in ROWS_OF.items()
            ]
        },
        "embedding": {"sharding": sharding, "tables": SHARDINGS.get(sharding, [])},
        "towers": [{"name": "deep", "kind": "mlp", "loss": {}}],
        "schedule": {"preset": "erase"},
        "optimizer": {"sparse": {"kind": kind, "lr": 0.3, "eps": 1e-3}},
        "train": {"steps": 1, "local_batch_size": 6},
    }
    return apply_preset(Config.model_validate(plain))[0]


Bags = list[list[Tensor]]
"""Ids of each feature and row."""


def make_bags(seed: int, batches: str) -> Bags:
    """Rows of a rank in a step; their number depends on the step alone, ranks in steps count by 10."""
    generator = torch.Generator().manual_seed(seed)
    rows = 6 if seed // 10 < STEPS - 1 else 2
    bags: Bags = []
    for table_rows in ROWS_OF.values():
        lengths = torch.randint(0, 4, (rows,), generator=generator).tolist() if batches == "bags" else [1] * rows
        if batches == "bags" and seed % 10 == 1:
            lengths = [0] * rows  # a rank whose bags are all empty
        bags.append([torch.randint(0, table_rows, (count,), generator=generator) for count in lengths])
    return bags


def to_batch(shares: list[Bags], batches: str) -> SparseBatch:
    """The rows of ``shares``, one after the other."""
    cells = [cell for feature in range(len(ROWS_OF)) for share in shares for cell in share[feature]]
    lengths = torch.tensor([len(ids) for ids in cells], dtype=torch.int32)
    values = torch.cat([*cells, torch.empty(0, dtype=torch.int64)])
    return SparseBatch(values, lengths, None, len(ROWS_OF), single_valued=batches != "bags")


def gradient_of(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, sum(DIMS.values()), generator=torch.Generator().manual_seed(1000 + seed))


@contextlib.contextmanager
def bytes_given() -> Iterator[dict[str, int]]:
    """Bytes that this rank gives to torch's collectives, by their function; announcements of sizes aside."""
    given = {"all_to_all_single": 0, "reduce_scatter_tensor": 0, "all_gather_into_tensor": 0}
    originals = {name: getattr(dist, name) for name in given}

    def spy(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            tensor = keywords.get("input", arguments[1] if len(arguments) > 1 else None)
            if keywords.get("input_split_sizes") is not None or len(arguments) > 2 or name != "all_to_all_single":
                given[name] += tensor.numel() * tensor.element_size()
            return originals[name](*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in given:
            patch.setattr(dist, name, spy(name))
        yield given


def of_rank(rank: int, batches: str) -> Iterator[Batch]:
    """A rank's batches; in those of bags there is padding after the last one."""
    for step in range(STEPS):
        sparse = to_batch([make_bags(10 * step + rank, batches)], batches)
        if batches == "bags":
            sparse = replace(sparse, values=torch.cat([sparse.values, torch.full((rank,), -1)]))
        rows = torch.arange(sparse.lengths.numel() // sparse.num_features)
        yield Batch(torch.empty(len(rows), 0), sparse, torch.zeros(len(rows)), rows)


def train(world: World, sharding: str, kind: str, batches: str) -> dict[str, Any]:
    config = make_config(sharding, kind)
    embeddings, plan = build_rank_embeddings(config, ROWS_OF, CPU, torch.float32, world)
    assert plan is not None
    pooled, given = [], 0
    before = sum(world.collectives.sent_bytes[group] for group in (INPUT, EXCHANGE, GRADIENT))
    for step, full in enumerate(prefetch(of_rank(world.rank, batches), CPU, expect=embeddings.expect)):
        batch, seed = full.sparse, 10 * step + world.rank
        world.collectives.step = step
        with bytes_given() as calls:
            found = embeddings(batch)
            embeddings.backward_and_update(found, gradient_of(seed, found.shape[0]), embeddings.order(batch))
        given += sum(calls.values())
        pooled.append(found.detach())
        if step == 1:  # between two steps ids are under way, and nobody else's lookup takes them
            with torch.no_grad():
                embeddings(to_batch([make_bags(7, batches)], batches))
    counted = sum(world.collectives.sent_bytes[group] for group in (INPUT, EXCHANGE, GRADIENT)) - before
    assert counted == given
    with torch.no_grad():  # ranks may have different numbers of rows in evaluation, or none
        share = [make_bags(world.rank, batches)] * (world.rank + 1)
        scored = embeddings(to_batch(share, batches))
        if world.rank:
            embeddings.idle()
        else:
            embeddings(to_batch(share, batches))
    whole = {name: gather(world, held) for name, held in embeddings.tables().items()}
    state = {
        name: {key: gather(world, held) for key, held in entries.items()}
        for name, entries in embeddings.optimizer_state().items()
    }
    shardings = {name: table.sharding for name, table in plan.tables.items()}
    return {
        "pooled": pooled,
        "scored": scored,
        "tables": whole,
        "state": state,
        "digest": world.collectives.digest(),
        "plan": shardings,
    }


def gather(world: World, held: Tensor | Shards) -> Tensor:
    """The whole tensor; parts of several ranks must not overlap."""
    if not isinstance(held, Shards):
        return held.clone()
    parts = [(part.offsets, part.tensor.clone()) for part in held.parts]
    whole = torch.full(held.shape, torch.nan)
    for of_rank in world.gather_objects("test", parts):
        for offsets, tensor in of_rank:
            view = whole[tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))]
            assert view.isnan().all()
            view.copy_(tensor)
    assert not whole.isnan().any()
    return whole


def train_all(kind: str, batches: str) -> dict[str, Any]:
    with join_world(on_cuda=False, timeout_s=30, grouped=False) as world:
        skipped = {"column_wise"} if kind == "rowwise_adagrad" else set()
        return {sharding: train(world, sharding, kind, batches) for sharding in SHARDINGS if sharding not in skipped}


@pytest.mark.parametrize(
    ("size", "kind", "batches"),
    [(2, "rowwise_adagrad", "bags"), (3, "rowwise_adagrad", "single ids"), (3, "adagrad", "bags"), (2, "sgd", "bags")],
)
def test_every_plan_equals_one_process_with_the_joined_batch(
    run_ranks: Any, size: int, kind: str, batches: str
) -> None:
    ranks = run_ranks(size, train_all, kind, batches, timeout_s=120)
    config = make_config("table_wise", kind)
    for sharding in ranks[0]:
        reference = TorchRecEmbeddings(
            tables_of(config, ROWS_OF), config.optimizer.sparse, seed=config.seed, device=CPU
        )
        results = [rank[sharding] for rank in ranks]
        for step in range(STEPS):
            seeds = [10 * step + rank for rank in range(size)]
            joined = to_batch([make_bags(seed, batches) for seed in seeds], batches)
            pooled = reference(joined)
            found = torch.cat([result["pooled"][step] for result in results])
            torch.testing.assert_close(found, pooled.detach(), rtol=TOLERANCE, atol=TOLERANCE)
            rows = pooled.shape[0] // size
            gradient = torch.cat([gradient_of(seed, rows) for seed in seeds]) / size
            reference.backward_and_update(pooled, gradient, reference.order(joined))
        for name, expected in reference.tables().items():
            for result in results:
                torch.testing.assert_close(result["tables"][name], expected, rtol=TOLERANCE, atol=TOLERANCE)
                for key, value in reference.optimizer_state()[name].items():
                    torch.testing.assert_close(result["state"][name][key], value, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for rank, result in enumerate(results):
                expected = reference(to_batch([make_bags(rank, batches)] * (rank + 1), batches))
                torch.testing.assert_close(result["scored"], expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert len({result["digest"] for result in results}) == 1, "every rank asks for the same collectives"
        if sharding != "auto":
            # Of two rows, three ranks cannot have one each.
            tiny = "data_parallel" if size == 3 and sharding == "row_wise" else sharding
            assert results[0]["plan"] == dict.fromkeys(ROWS_OF, sharding) | {"c": tiny}
        else:
            assert results[0]["plan"] | {"a": "row_wise", "d": "data_parallel"} == results[0]["plan"]


def refuse() -> str:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        embeddings, _ = build_rank_embeddings(make_config("row_wise", "sgd"), ROWS_OF, CPU, torch.float32, world)
        batch = to_batch([make_bags(0, "single ids")], "single ids")
        batch.values[0] = 50
        with pytest.raises(IdRangeError) as caught:
            embeddings(batch)
        return str(caught.value)


def test_an_id_outside_its_table_is_refused_before_it_is_sent(run_ranks: Any) -> None:
    for message in run_ranks(2, refuse):
        assert "feature 'a': id 50 is outside its embedding table" in message


def overfill() -> str:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        rows = dict.fromkeys(ROWS_OF, 10**13)
        with pytest.raises(UserError) as caught:
            build_rank_embeddings(make_config("table_wise", "sgd"), rows, CPU, torch.float32, world)
        return str(caught.value)


def test_tables_that_fit_nowhere_are_refused_on_every_rank(run_ranks: Any) -> None:
    for message in run_ranks(2, overfill):
        assert "TorchRec's planner finds no place for the tables on 2 ranks" in message
