"""Embedding backends on CUDA against the float64 tables on the CPU, which tests/unit ties to a loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings import own_kernels
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


BACKEND_KINDS = [(backend, kind) for backend in ("torch", "torchrec") for kind in KINDS]
OWN_KINDS = [("own", kind) for kind in own_kernels.KINDS]


def build(backend: str, kind: str, pooled_dtype: torch.dtype = torch.float32) -> Any:
    config = SparseOptimizerConfig(kind=kind, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3)  # type: ignore[arg-type]
    if backend in ("torchrec", "own"):
        own = backend == "own"
        return TorchRecEmbeddings(TABLES, config, seed=1, device=CUDA, pooled_dtype=pooled_dtype, own_kernels=own)
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


def train(embeddings: Any, batch: SparseBatch, upstream: torch.Tensor) -> torch.Tensor:
    pooled: torch.Tensor = embeddings(batch)
    embeddings.backward_and_update(pooled, upstream, embeddings.order(batch))
    return pooled.detach()


def gradient(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(ROWS, sum(table.dim for table in TABLES), generator=generator)


@pytest.mark.parametrize(("backend", "kind"), [*BACKEND_KINDS, *OWN_KINDS])
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
        embeddings.backward_and_update(pooled, gradient(step).to(CUDA), embeddings.order(batch.to(CUDA)))
        reference.backward_and_update(expected, gradient(step).double(), reference.order(batch))
    for name, weight in embeddings.tables().items():
        torch.testing.assert_close(weight.cpu().double(), reference.tables()[name], rtol=TOLERANCE, atol=TOLERANCE)
    for name, entries in embeddings.optimizer_state().items():
        for key, value in entries.items():
            expected = reference.optimizer_state()[name][key]
            torch.testing.assert_close(value.cpu().to(expected.dtype), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["torch", "own"])
def test_repeats_bitwise(backend: str) -> None:
    """The order of summation is fixed, also on CUDA."""
    first, second = build(backend, "rowwise_adagrad"), build(backend, "rowwise_adagrad")
    for step in range(5):
        for embeddings in (first, second):
            train(embeddings, bags(step).to(CUDA), gradient(step).to(CUDA))
    for name, weight in first.tables().items():
        assert torch.equal(weight, second.tables()[name])


@pytest.mark.parametrize(
    ("backend", "kind", "single_valued"),
    [
        *(("torchrec", kind, True) for kind in KINDS),
        *((*case, single) for case in OWN_KINDS for single in (True, False)),
    ],
)
def test_a_step_never_waits_for_the_device(
    backend: str, kind: str, single_valued: bool, host_never_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    """FBGEMM's way does for bags, whose padding it cuts off."""
    embeddings = build(backend, kind)
    batch, upstream = bags(0, single_valued=single_valued).to(CUDA), gradient(0).to(CUDA)
    train(embeddings, batch, upstream)  # warms up; Adam's first lookup reads its count
    with host_never_waits():
        embeddings.set_lr(0.05)
        train(embeddings, batch, upstream)


@pytest.mark.parametrize("bad", [-1, 30, 31])
def test_torch_names_an_id_outside_its_table(bad: int) -> None:
    batch = bags(0)
    batch.values[int(batch.lengths[: 2 * ROWS].sum())] = bad
    with pytest.raises(IdRangeError, match=f"feature 'plain': id {bad} is outside"):
        build("torch", "sgd")(batch.to(CUDA))


HOT = [
    # A row of the first two tables is named by thousands of ids, over many chunks; the last is mostly named once.
    Table("three", 3, 64, mean=False),
    Table("one", 1, 8, mean=False),
    Table("wide", 300, 256, mean=True),
    Table("long", 200_000, 64, mean=False),
]


def hot_batch(seed: int, rows: int, *, single_valued: bool) -> SparseBatch:
    """Ids of a power law; empty bags, and weighted ones unless single-valued."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(HOT), rows), generator=generator, dtype=torch.int32)
    if single_valued:
        lengths = torch.ones_like(lengths)
    counts = lengths.sum(dim=1).tolist()
    values = [(torch.rand(n, generator=generator) ** 4 * t.rows).long() for n, t in zip(counts, HOT, strict=True)]
    weights = None if single_valued else torch.rand(sum(counts), generator=generator) + 0.5
    return SparseBatch(torch.cat(values), lengths.flatten(), weights, len(HOT), single_valued)


def movement(embeddings: Any, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.double().to(CUDA) - start[name].double() for name, weight in embeddings.tables().items()}


@pytest.mark.parametrize("kind", own_kernels.KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "single_valued"), [(33, True), (4000, True), (5000, True), (3000, False)])
def test_hot_rows_are_updated_once_and_as_exactly_as_by_fbgemm(
    rows: int, single_valued: bool, dtype: torch.dtype, kind: str
) -> None:
    config = SparseOptimizerConfig(kind=kind, lr=0.1, eps=1e-3)  # type: ignore[arg-type]
    own = TorchRecEmbeddings(HOT, config, seed=1, device=CUDA, pooled_dtype=dtype, own_kernels=True)
    fbgemm = TorchRecEmbeddings(HOT, config, seed=1, device=CUDA, pooled_dtype=dtype)
    reference = TorchEmbeddings(HOT, config, seed=1, device=CUDA, dtype=torch.float64)
    start = {name: weight.clone() for name, weight in own.tables().items()}
    width = sum(table.dim for table in HOT)
    generator = torch.Generator().manual_seed(7)
    for step in range(2):
        batch = hot_batch(step, rows, single_valued=single_valued).to(CUDA)
        upstream = torch.randn(rows, width, generator=generator).to(CUDA, dtype)
        train(own, batch, upstream)
        train(fbgemm, batch, upstream)
        train(reference, batch, upstream.double())
    expected = movement(reference, start)
    for name, theirs in movement(fbgemm, start).items():
        scale = expected[name].norm()
        error = (movement(own, start)[name] - expected[name]).norm() / scale
        # Float32 sums of thousands of terms, in any order; weights rounded to float32.
        assert float(error) <= max(1e-5, 1.5 * float((theirs - expected[name]).norm() / scale))


def test_bfloat16_lookups_are_float32_sums_rounded_once() -> None:
    half, full = build("own", "sgd", torch.bfloat16), build("own", "sgd")
    for single_valued in (True, False):
        batch = bags(0, single_valued=single_valued).to(CUDA)
        assert torch.equal(half(batch), full(batch).bfloat16())


@pytest.mark.parametrize("kind", own_kernels.KINDS)
def test_padding_changes_nothing_and_is_not_verified(kind: str) -> None:
    padded, plain = build("own", kind), build("own", kind)
    for step in range(3):
        batch, upstream = bags(step).to(CUDA), gradient(step).to(CUDA)
        assert batch.weights is not None
        longer = replace(
            batch,
            values=torch.cat([batch.values, torch.full((100,), -9, device=CUDA)]),
            weights=torch.cat([batch.weights, torch.full((100,), torch.nan, device=CUDA)]),
        )
        assert torch.equal(train(padded, longer, upstream), train(plain, batch, upstream))
    padded.verify()
    for name, weight in plain.tables().items():
        assert torch.equal(padded.tables()[name], weight)


@pytest.mark.parametrize("single_valued", [True, False])
def test_a_replayed_update_follows_the_learning_rate(single_valued: bool) -> None:
    """The order on a stream of its own, the rate changed between replays of one capture."""
    captured, eager = build("own", "rowwise_adagrad"), build("own", "rowwise_adagrad")
    batch, upstream = bags(0, single_valued=single_valued).to(CUDA), gradient(0).to(CUDA)
    start = {name: weight.clone() for name, weight in captured.tables().items()}
    train(captured, batch, upstream)  # compiles
    for name, weight in captured.tables().items():
        weight.copy_(start[name])
        captured.optimizer_state()[name]["sum"].zero_()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    assert captured.frozen_scalars() == ()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            order = captured.order(batch)
        pooled = captured(batch)
        main.wait_stream(side)
        captured.backward_and_update(pooled, upstream, order)
    for lr in (0.1, 0.02, 0.3):
        captured.set_lr(lr)
        eager.set_lr(lr)
        graph.replay()
        expected = train(eager, batch, upstream)
        assert torch.equal(pooled.detach(), expected)
    for name, weight in eager.tables().items():
        assert torch.equal(captured.tables()[name], weight)


@pytest.mark.parametrize("single_valued", [True, False])
@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_own_kernels_remember_an_id_outside_its_table(bad: int, single_valued: bool) -> None:
    """It reads row 0 and moves nothing; what was refused once is forgotten."""
    embeddings, expected = build("own", "sgd"), build("own", "sgd")
    batch, upstream = bags(0, single_valued=single_valued), gradient(0).to(CUDA)
    position = int(batch.lengths[: 2 * ROWS].sum())
    batch.values[position] = 0
    bag = int((batch.lengths.cumsum(0) <= position).sum())
    upstream[bag % ROWS, 12:20] = 0
    clean = train(expected, batch.to(CUDA), upstream)
    batch.values[position] = bad
    assert torch.equal(train(embeddings, batch.to(CUDA), upstream), clean)
    for name, weight in expected.tables().items():
        torch.testing.assert_close(embeddings.tables()[name], weight, rtol=1e-5, atol=1e-6)
    with pytest.raises(IdRangeError, match=rf"feature 'plain': id {bad} is outside .* expected 0 to 29 \(30 rows\)"):
        embeddings.verify()
    embeddings.verify()
