"""Embedding backends on CUDA against the float64 tables on the CPU, which tests/unit ties to a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import IdRangeError, Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.embeddings.torchrec_backend import TorchRecEmbeddings

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TABLES = [
    Table("weighted", 50, 8, mean=False),
    Table("average", 70, 4, mean=True),
    Table("plain", 30, 8, mean=False),
    Table("tags", 60, 64, mean=True),
]
ROWS = 257
KINDS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
# Rounding of float32 over five steps; sums of up to some fifty ids a row.
TOLERANCE = 1e-4


def build(backend: str, kind: str) -> Any:
    config = SparseOptimizerConfig(kind=kind, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3)  # type: ignore[arg-type]
    if backend == "torchrec":
        return TorchRecEmbeddings(TABLES, config, seed=1, device=CUDA)
    if backend == "torch":
        return TorchEmbeddings(TABLES, config, seed=1, device=CUDA)
    return TorchEmbeddings(TABLES, config, seed=1, device=torch.device("cpu"), dtype=torch.float64)


def bags(seed: int, *, single_valued: bool = False) -> SparseBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(TABLES), ROWS)
    lengths = torch.randint(0, 5, shape, generator=generator, dtype=torch.int32)
    if single_valued:
        lengths = torch.ones(shape, dtype=torch.int32)
    counts = lengths.sum(dim=1).tolist()
    values = torch.cat(
        [
            torch.randint(0, table.rows, (count,), generator=generator)
            for table, count in zip(TABLES, counts, strict=True)
        ]
    )
    weights = torch.ones(values.numel())
    weights[: counts[0]] = torch.rand(counts[0], generator=generator) + 0.5
    return SparseBatch(values, lengths.flatten(), weights, len(TABLES), single_valued)


def gradient(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(ROWS, sum(table.dim for table in TABLES), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_steps_equal_the_float64_tables(backend: str, kind: str) -> None:
    """With a learning rate that changes, evaluation and lookups without an update in between."""
    embeddings, reference = build(backend, kind), build("reference", kind)
    for step in range(5):
        batch = bags(step, single_valued=step == 2)
        embeddings(bags(90 + step).to(CUDA))
        with torch.no_grad():
            embeddings(bags(50 + step).to(CUDA))
        for each in (embeddings, reference):
            each.set_lr(0.1 / (step + 1))
        pooled, expected = embeddings(batch.to(CUDA)), reference(batch)
        torch.testing.assert_close(pooled.detach().cpu().double(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        embeddings.backward_and_update(pooled, gradient(step).to(CUDA))
        reference.backward_and_update(expected, gradient(step).double())
    for name, weight in embeddings.tables().items():
        torch.testing.assert_close(weight.cpu().double(), reference.tables()[name], rtol=TOLERANCE, atol=TOLERANCE)
    for name, entries in embeddings.optimizer_state().items():
        for key, value in entries.items():
            expected = reference.optimizer_state()[name][key]
            torch.testing.assert_close(value.cpu().to(expected.dtype), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_torch_repeats_bitwise() -> None:
    """The order of summation is fixed, also on CUDA."""
    first, second = build("torch", "rowwise_adagrad"), build("torch", "rowwise_adagrad")
    for step in range(5):
        for embeddings in (first, second):
            embeddings.backward_and_update(embeddings(bags(step).to(CUDA)), gradient(step).to(CUDA))
    for name, weight in first.tables().items():
        assert torch.equal(weight, second.tables()[name])


# Torch warns that the mode may miss a synchronisation.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single_valued", [True, False])
def test_torchrec_never_waits_for_the_device(single_valued: bool, kind: str) -> None:
    embeddings = build("torchrec", kind)
    batch, upstream = bags(0, single_valued=single_valued).to(CUDA), gradient(0).to(CUDA)
    embeddings.backward_and_update(embeddings(batch), upstream)  # warms up; Adam's first lookup reads its count
    torch.cuda.set_sync_debug_mode("error")
    try:
        embeddings.set_lr(0.05)
        embeddings.backward_and_update(embeddings(batch), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bad", [-1, 30, 31])
def test_torch_names_an_id_outside_its_table(bad: int) -> None:
    batch = bags(0)
    batch.values[int(batch.lengths[: 2 * ROWS].sum())] = bad
    with pytest.raises(IdRangeError, match=f"feature 'plain': id {bad} is outside"):
        build("torch", "sgd")(batch.to(CUDA))
