"""Replicated tables: equal on all ranks bit for bit, and to one process with the ranks' batches joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.replicated_tables import ReplicatedTables
from models.embeddings.layout import IdRangeError, Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.embeddings.torchrec_backend import TorchRecEmbeddings

CPU = torch.device("cpu")
TABLES = [Table("a", 5, 8, mean=False), Table("b", 7, 4, mean=True), Table("c", 3, 8, mean=False)]
ROWS = 4
STEPS = 3


def build(backend: str, kind: str) -> Any:
    config = SparseOptimizerConfig(kind=kind, lr=0.3, eps=1e-3)  # type: ignore[arg-type]
    if backend == "torchrec":
        return TorchRecEmbeddings(TABLES, config, seed=1, device=CPU)
    return TorchEmbeddings(TABLES, config, seed=1, device=CPU, dtype=torch.float64)


Bags = list[list[tuple[Tensor, Tensor]]]
"""Ids and weights of each feature and row."""


def make_bags(seed: int, batches: str) -> Bags:
    generator = torch.Generator().manual_seed(seed)
    bags: Bags = []
    for table in TABLES:
        lengths = torch.randint(0, 5, (ROWS,), generator=generator).tolist() if batches == "bags" else [1] * ROWS
        if batches == "bags" and seed % 3 == 1:
            lengths = [0] * ROWS  # a rank whose bags are all empty
        bags.append(
            [
                (torch.randint(0, table.rows, (n,), generator=generator), torch.rand(n, generator=generator) + 0.5)
                for n in lengths
            ]
        )
    return bags


def to_batch(shares: list[Bags], batches: str) -> SparseBatch:
    """The rows of ``shares``, one after the other."""
    cells = [cell for feature in range(len(TABLES)) for share in shares for cell in share[feature]]
    lengths = torch.tensor([len(ids) for ids, _ in cells], dtype=torch.int32)
    weights = torch.cat([weight for _, weight in cells]) if batches != "single ids" else None
    values = torch.cat([ids for ids, _ in cells])
    return SparseBatch(values, lengths, weights, len(TABLES), single_valued=batches != "bags")


def padded(batch: SparseBatch, count: int) -> SparseBatch:
    """The same bags with ``count`` weighted ids of no table after them."""
    weights = None if batch.weights is None else torch.cat([batch.weights, torch.full((count,), torch.nan)])
    return replace(batch, values=torch.cat([batch.values, torch.full((count,), -1)]), weights=weights)


def gradient_of(seed: int) -> Tensor:
    return torch.randn(ROWS, 20, generator=torch.Generator().manual_seed(1000 + seed))


def train_ranks(backend: str, kind: str, batches: str) -> dict[str, Any]:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        embeddings = ReplicatedTables(build(backend, kind), world)
        pooled = []
        for step in range(STEPS):
            seed = step * world.size + world.rank
            batch = to_batch([make_bags(seed, batches)], batches)
            if batches == "bags":
                batch = padded(batch, world.rank)
            found = embeddings(batch)
            embeddings.backward_and_update(found, gradient_of(seed).to(found.dtype), embeddings.order(batch))
            pooled.append(found)
        issued = world.collectives.count
        with torch.no_grad():
            embeddings(to_batch([make_bags(world.rank, batches)] * (1 + world.rank), batches))
        assert world.collectives.count == issued, "evaluation asks the other ranks for nothing"
        return {"pooled": pooled, "tables": dict(embeddings.tables()), "state": embeddings.optimizer_state()}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batches", ["bags", "single ids", "weighted ids"])
@pytest.mark.parametrize(
    ("backend", "kind"), [("torch", "rowwise_adagrad"), ("torch", "adam"), ("torchrec", "adagrad")]
)
def test_ranks_equal_one_process_with_the_joined_batch(
    run_ranks: Any, size: int, batches: str, backend: str, kind: str
) -> None:
    results = run_ranks(size, train_ranks, backend, kind, batches)
    reference = build(backend, kind)
    # torch in float64; the fused kernels compute in float32, where joined gradients divided first round alike.
    tolerance = 1e-12 if backend == "torch" else 1e-6
    for step in range(STEPS):
        seeds = [step * size + rank for rank in range(size)]
        joined = to_batch([make_bags(seed, batches) for seed in seeds], batches)
        pooled = reference(joined)
        found = torch.cat([result["pooled"][step] for result in results])
        assert torch.allclose(found, pooled, rtol=tolerance, atol=tolerance)
        gradient = torch.cat([gradient_of(seed) for seed in seeds]).to(pooled.dtype) / size
        reference.backward_and_update(pooled, gradient, reference.order(joined))
    for name, expected in reference.tables().items():
        assert torch.allclose(results[0]["tables"][name], expected, rtol=tolerance, atol=tolerance)
        for result in results[1:]:
            assert torch.equal(result["tables"][name], results[0]["tables"][name])
            for key, value in result["state"][name].items():
                assert torch.equal(value, results[0]["state"][name][key])


def refuse() -> str:
    with join_world(on_cuda=False, timeout_s=20, grouped=False) as world:
        embeddings = ReplicatedTables(build("torch", "sgd"), world)
        batch = to_batch([make_bags(3, "single ids")], "single ids")
        if world.rank == 1:
            batch.values[0] = 99
        with pytest.raises(IdRangeError) as caught:
            embeddings(batch)
        return str(caught.value)


def test_an_id_outside_its_table_is_refused_on_every_rank(run_ranks: Any) -> None:
    for message in run_ranks(2, refuse):
        assert "feature 'a': id 99 is outside its embedding table" in message
