"""Both embedding backends against a loop over bags and rows, and the promises of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from erase_rec.batch import SparseBatch
from erase_rec.config.schema import SparseOptimizerConfig
from models.embeddings.layout import IdRangeError, Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.embeddings.torchrec_backend import TorchRecEmbeddings

CPU = torch.device("cpu")
# Dimensions and poolings alternate, so that a mix-up of order shows; few rows, so that bags repeat ids.
TABLES = [
    Table("weighted", 5, 8, mean=False),
    Table("average", 7, 4, mean=True),
    Table("plain", 3, 8, mean=False),
    Table("tags", 6, 4, mean=True),
]
ROWS = 9
KINDS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
# FBGEMM has no Adam on the CPU: tests/gpu compares that one.
BACKEND_KINDS = [
    (backend, kind) for backend in ("torch", "torchrec") for kind in KINDS if (backend, kind) != ("torchrec", "adam")
]


def build(
    backend: str,
    kind: str = "rowwise_adagrad",
    *,
    tables: list[Table] = TABLES,
    lr: float = 0.3,
    seed: int = 1,
    pooled_dtype: torch.dtype | None = None,
) -> Any:
    config = SparseOptimizerConfig(kind=kind, lr=lr, beta1=0.8, beta2=0.95, eps=1e-3)  # type: ignore[arg-type]
    if backend == "torchrec":
        return TorchRecEmbeddings(tables, config, seed=seed, device=CPU, pooled_dtype=pooled_dtype or torch.float32)
    dtype = torch.float64 if backend == "torch64" else torch.float32
    return TorchEmbeddings(tables, config, seed=seed, device=CPU, dtype=dtype, pooled_dtype=pooled_dtype)


def bags(seed: int, *, tables: list[Table] = TABLES, weighted: bool = True) -> SparseBatch:
    """Bags of 0 to 4 ids, the first row's empty; weights other than 1 in the first feature."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(tables), ROWS), generator=generator, dtype=torch.int32)
    lengths[:, 0] = 0
    values, weights = [], []
    for index, table in enumerate(tables):
        count = int(lengths[index].sum())
        values.append(torch.randint(0, table.rows, (count,), generator=generator))
        weights.append(torch.rand(count, generator=generator) + 0.5 if index == 0 else torch.ones(count))
    return SparseBatch(
        torch.cat(values), lengths.flatten(), torch.cat(weights) if weighted else None, num_features=len(tables)
    )


def singles(seed: int, *, tables: list[Table] = TABLES) -> SparseBatch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat([torch.randint(0, table.rows, (ROWS,), generator=generator) for table in tables])
    return SparseBatch(values, torch.ones(values.numel(), dtype=torch.int32), None, len(tables), single_valued=True)


BATCHES: dict[str, Callable[[int], SparseBatch]] = {
    "bags": bags,
    "unweighted bags": lambda seed: bags(seed, weighted=False),
    "single ids": singles,
}


def upstream(seed: int, embeddings: Any, *, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(rows, sum(embeddings.feature_dims), generator=generator)


def train(embeddings: Any, seed: int, batch: SparseBatch, *, rows: int = ROWS) -> Tensor:
    pooled: Tensor = embeddings(batch)
    gradient = upstream(seed, embeddings, rows=rows).to(pooled.dtype)
    embeddings.backward_and_update(pooled, gradient, embeddings.order(batch))
    return pooled.detach()


class LoopReference:
    """The definitions, one bag and one row at a time, in float64."""

    def __init__(self, tables: list[Table], kind: str, weights: list[Tensor]) -> None:
        self.tables, self.kind = tables, kind
        self.weights = [weight.double().clone() for weight in weights]
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]
        self.sums = [torch.zeros_like(weight) for weight in self.weights]
        self.row_sums = [torch.zeros(len(weight), dtype=torch.float64) for weight in self.weights]
        self.updates = 0

    def bags(self, batch: SparseBatch) -> list[list[list[tuple[int, float]]]]:
        """(id, weight) by feature, row and position, the mean's share in the weight."""
        position, result = 0, []
        for table, lengths in zip(self.tables, batch.lengths.reshape(len(self.tables), -1).tolist(), strict=True):
            feature = []
            for length in lengths:
                span = range(position, position + length)
                share = 1 / length if table.mean and length else 1.0
                given = [1.0 if batch.weights is None else float(batch.weights[i]) for i in span]
                feature.append([(int(batch.values[i]), share * w) for i, w in zip(span, given, strict=True)])
                position += length
            result.append(feature)
        return result

    def pooled(self, batch: SparseBatch) -> Tensor:
        columns = []
        for weight, feature in zip(self.weights, self.bags(batch), strict=True):
            zero = torch.zeros(weight.shape[1], dtype=torch.float64)
            columns.append(torch.stack([sum((w * weight[i] for i, w in bag), zero) for bag in feature]))
        return torch.cat(columns, dim=1)

    def update(self, batch: SparseBatch, gradient: Tensor, lr: float) -> None:
        self.updates += 1
        parts = gradient.double().split([table.dim for table in self.tables], dim=1)
        for table, (feature, part) in enumerate(zip(self.bags(batch), parts, strict=True)):
            row_gradients: dict[int, Tensor] = {}
            for bag, bag_gradient in zip(feature, part, strict=True):
                for row, w in bag:
                    row_gradients[row] = row_gradients.get(row, torch.zeros_like(bag_gradient)) + w * bag_gradient
            for row, g in row_gradients.items():
                self.weights[table][row] -= lr * self.direction(table, row, g)

    def direction(self, table: int, row: int, g: Tensor) -> Tensor:
        beta1, beta2, eps = 0.8, 0.95, 1e-3
        if self.kind == "rowwise_adagrad":
            self.row_sums[table][row] += (g * g).sum() / len(g)
            return g / (self.row_sums[table][row].sqrt() + eps)
        if self.kind == "adagrad":
            self.sums[table][row] += g * g
            return g / (self.sums[table][row].sqrt() + eps)
        if self.kind == "adam":
            self.first[table][row] = beta1 * self.first[table][row] + (1 - beta1) * g
            self.second[table][row] = beta2 * self.second[table][row] + (1 - beta2) * g * g
            first = self.first[table][row] / (1 - beta1**self.updates)
            second = self.second[table][row] / (1 - beta2**self.updates)
            return first / (second.sqrt() + eps)
        return g


@pytest.mark.parametrize(("backend", "kind"), [*BACKEND_KINDS, *(("torch64", kind) for kind in KINDS)])
@pytest.mark.parametrize("batches", BATCHES)
def test_five_steps_equal_the_loop(backend: str, batches: str, kind: str) -> None:
    embeddings = build(backend, kind)
    reference = LoopReference(TABLES, kind, list(embeddings.tables().values()))
    # Float32 rounding over five steps, with values of the order of 1.
    tolerance = 1e-12 if backend == "torch64" else 2e-5
    for step in range(5):
        batch = BATCHES[batches](step)
        expected = reference.pooled(batch)
        pooled = train(embeddings, step, batch)
        torch.testing.assert_close(pooled.double(), expected, rtol=tolerance, atol=tolerance)
        reference.update(batch, upstream(step, embeddings), lr=0.3)
    for weight, expected in zip(embeddings.tables().values(), reference.weights, strict=True):
        torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_one_dimension_and_one_pooling_take_the_same_way(backend: str) -> None:
    """All tables of one dimension: the joined lookup without a selection."""
    tables = [Table(f"t{i}", 4 + i, 8, mean=False) for i in range(3)]
    embeddings = build(backend, tables=tables)
    reference = LoopReference(tables, "rowwise_adagrad", list(embeddings.tables().values()))
    for step, batch in enumerate((bags(0, tables=tables), singles(1, tables=tables))):
        expected = reference.pooled(batch)
        torch.testing.assert_close(train(embeddings, step, batch).double(), expected, rtol=2e-5, atol=2e-5)
        reference.update(batch, upstream(step, embeddings), lr=0.3)


def test_bags_of_one_equal_the_single_valued_way_bitwise() -> None:
    one = singles(0)
    general = SparseBatch(one.values, one.lengths, None, one.num_features)
    embeddings, other = build("torch"), build("torch")
    assert torch.equal(train(embeddings, 0, one), train(other, 0, general))
    for name, weight in embeddings.tables().items():
        assert torch.equal(weight, other.tables()[name])


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_empty_bags_are_zero_and_move_nothing(backend: str) -> None:
    embeddings = build(backend)
    before = {name: weight.clone() for name, weight in embeddings.tables().items()}
    empty = SparseBatch(
        torch.empty(0, dtype=torch.int64), torch.zeros(len(TABLES) * ROWS, dtype=torch.int32), None, len(TABLES)
    )
    assert torch.equal(train(embeddings, 0, empty), torch.zeros(ROWS, 24))
    for name, weight in embeddings.tables().items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize(("backend", "kind"), BACKEND_KINDS)
def test_rows_that_a_batch_does_not_touch_stay_as_they_are(backend: str, kind: str) -> None:
    """Momentum must not move them either: every row is touched first, then row 1 of each table alone."""
    tables = [Table("a", 6, 4, mean=False), Table("b", 6, 4, mean=False)]
    embeddings = build(backend, kind, tables=tables)
    ones = torch.ones(2 * 6, dtype=torch.int32)
    train_rows = SparseBatch(torch.arange(6).repeat(2), ones, None, 2, single_valued=True)
    train(embeddings, 0, train_rows, rows=6)
    before = {name: weight.clone() for name, weight in embeddings.tables().items()}
    only_one = SparseBatch(torch.ones(12, dtype=torch.int64), ones, None, 2, single_valued=True)
    train(embeddings, 1, only_one, rows=6)
    for name, weight in embeddings.tables().items():
        moved = (weight != before[name]).any(dim=1)
        assert moved.tolist() == [False, True, False, False, False, False]


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    expected = build("torch").tables()
    for backend in ("torch64", "torchrec"):
        for name, weight in build(backend).tables().items():
            assert torch.equal(weight.float(), expected[name])
    fewer = build("torch", tables=TABLES[2:]).tables()
    assert torch.equal(fewer["tags"], expected["tags"])
    assert not torch.equal(build("torch", seed=2).tables()["tags"], expected["tags"])
    assert not torch.equal(build("torch", tables=[Table("other", 6, 4, mean=True)]).tables()["other"], expected["tags"])


def test_initial_weights_are_uniform_within_one_over_the_root_of_rows() -> None:
    weight = build("torch", tables=[Table("a", 400, 64, mean=False)]).tables()["a"]
    assert float(weight.abs().max()) <= 0.05
    assert float(weight.abs().max()) > 0.0499
    # Standard error of the standard deviation of 25,600 uniform values: 0.3 %.
    assert float(weight.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_any_text_is_a_feature_name(backend: str) -> None:
    """Names that a module dictionary refuses, or takes for its own."""
    names = ["type", "name", "keys", "forward", "a.b", "user-item_affinity_0", "101", "性别", "a b", "weight", "f1"]
    tables = [Table(name, 3 + index, 4, mean=False) for index, name in enumerate(names)]
    embeddings = build(backend, tables=tables)
    assert list(embeddings.tables()) == names
    assert list(embeddings.optimizer_state()) == names
    before = {name: weight.clone() for name, weight in embeddings.tables().items()}
    train(embeddings, 0, singles(0, tables=tables))
    for table in tables:
        assert embeddings.tables()[table.name].shape == (table.rows, 4)
        assert embeddings.optimizer_state()[table.name]["sum"].shape == (table.rows,)
        assert not torch.equal(embeddings.tables()[table.name], before[table.name])


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_learning_rate_is_that_of_the_next_update(backend: str) -> None:
    """Plain SGD: a step is proportional to the rate, also to a rate set between two steps."""
    moves = []
    embeddings = build(backend, "sgd", lr=0.1)
    for lr in (None, 0.2, 0.05):
        if lr is not None:
            embeddings.set_lr(lr)
        before = embeddings.tables()["plain"].clone()
        train(embeddings, 0, singles(0))
        moves.append(embeddings.tables()["plain"] - before)
    # Differences of float32 weights of the order of 1.
    torch.testing.assert_close(moves[1], 2 * moves[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moves[2], 0.5 * moves[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("backend", "kind"), BACKEND_KINDS)
def test_resume_is_bitwise_and_evaluation_changes_nothing(backend: str, kind: str) -> None:
    straight, first = build(backend, kind), build(backend, kind)
    for step in range(6):
        train(straight, step, bags(step))
    for step in range(3):
        train(first, step, bags(step))
        with torch.no_grad():
            first(bags(50 + step))
    weights = {name: weight.clone() for name, weight in first.tables().items()}
    state = {
        name: {key: value.clone() for key, value in entries.items()}
        for name, entries in first.optimizer_state().items()
    }
    resumed = build(backend, kind, seed=2)
    train(resumed, 9, bags(9))  # a module that was used before takes the state over all the same
    for name, weight in resumed.tables().items():
        weight.copy_(weights[name])
    resumed.load_optimizer_state(state)
    for step in range(3, 6):
        with torch.no_grad():
            resumed(bags(60 + step))
        train(resumed, step, bags(step))
    for name, weight in resumed.tables().items():
        assert torch.equal(weight, straight.tables()[name])
    for name, entries in resumed.optimizer_state().items():
        for key, value in entries.items():
            assert torch.equal(value, straight.optimizer_state()[name][key])


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad", "sgd"])
def test_a_checkpoint_of_one_backend_continues_in_the_other(kind: str) -> None:
    ours, theirs = build("torch", kind), build("torchrec", kind, seed=2)
    train(ours, 0, bags(0))
    for name, weight in theirs.tables().items():
        weight.copy_(ours.tables()[name])
    theirs.load_optimizer_state(ours.optimizer_state())
    train(ours, 1, bags(1))
    train(theirs, 1, bags(1))
    for name, weight in theirs.tables().items():
        torch.testing.assert_close(weight, ours.tables()[name], rtol=2e-5, atol=2e-5)


def test_adam_counts_updates_not_lookups() -> None:
    """Lookups whose gradient goes nowhere (``embedding_gradient: none``) are no updates."""
    embeddings = build("torch", "adam")
    embeddings(bags(0))
    train(embeddings, 1, bags(1))
    assert int(embeddings.optimizer_state()["tags"]["iteration"]) == 1


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_only_a_training_forward_takes_gradients(backend: str) -> None:
    embeddings = build(backend)
    with torch.no_grad():
        evaluated = embeddings(bags(0))
    pooled = embeddings(bags(0))
    assert (pooled.requires_grad, evaluated.requires_grad) == (True, False)
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled.detach(), evaluated)


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_evaluation_between_forward_and_update_is_harmless(backend: str) -> None:
    disturbed, straight = build(backend), build(backend)
    pooled = disturbed(bags(0))
    with torch.no_grad():
        disturbed(singles(1))
    disturbed.backward_and_update(pooled, upstream(0, disturbed), disturbed.order(bags(0)))
    train(straight, 0, bags(0))
    for name, weight in disturbed.tables().items():
        assert torch.equal(weight, straight.tables()[name])


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
@pytest.mark.parametrize("bad", [-1, 3, 4, 2**40])
@pytest.mark.parametrize("batch", [singles(0), bags(3)], ids=["single ids", "bags"])
def test_an_id_outside_its_table_is_named(backend: str, bad: int, batch: SparseBatch) -> None:
    """Ids 3 and 4 would be rows of the next table in a joined one."""
    embeddings = build(backend)
    start = int(batch.lengths.reshape(len(TABLES), -1)[:2].sum())
    values = batch.values.clone()
    values[start + 1] = bad
    spoiled = SparseBatch(values, batch.lengths, batch.weights, batch.num_features, batch.single_valued)
    with pytest.raises(IdRangeError, match=rf"feature 'plain': id {bad} is outside .* expected 0 to 2 \(3 rows\)"):
        embeddings(spoiled)


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_tables_share_storage_with_what_is_looked_up(backend: str) -> None:
    embeddings = build(backend)
    for weight in embeddings.tables().values():
        weight.fill_(2.0)
    with torch.no_grad():
        assert torch.equal(embeddings(singles(0)), torch.full((ROWS, 24), 2.0))


def padded(batch: SparseBatch, *, ids: Tensor) -> SparseBatch:
    """The same bags with ``ids`` after the last one, weighted where the bags are."""
    weights = None if batch.weights is None else torch.cat([batch.weights, torch.full(ids.shape, torch.nan)])
    return replace(batch, values=torch.cat([batch.values, ids]), weights=weights)


@pytest.mark.parametrize(("backend", "kind"), BACKEND_KINDS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ids", [[0] * 5, [-1, 2**40, 2]], ids=["row 0", "no rows"])
def test_padding_changes_nothing(backend: str, kind: str, weighted: bool, ids: list[int]) -> None:
    """Neither by being looked up in the last bag nor by touching a row, whatever it holds."""
    embeddings, expected = build(backend, kind), build(backend, kind)
    for step in range(3):
        batch = bags(step, weighted=weighted)
        pooled = train(embeddings, step, padded(batch, ids=torch.tensor(ids)))
        assert torch.equal(pooled, train(expected, step, batch))
    for name, weight in embeddings.tables().items():
        assert torch.equal(weight, expected.tables()[name])
    for name, entries in embeddings.optimizer_state().items():
        for key, value in entries.items():
            assert torch.equal(value, expected.optimizer_state()[name][key])


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_ids_before_padding_are_still_checked(backend: str) -> None:
    batch = padded(bags(3), ids=torch.zeros(4, dtype=torch.int64))
    batch.values[int(batch.lengths.sum()) - 1] = 6
    with pytest.raises(IdRangeError, match="feature 'tags': id 6 is outside"):
        build(backend)(batch)


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
@pytest.mark.parametrize("batches", BATCHES)
def test_bfloat16_comes_out_of_float32_tables(backend: str, batches: str) -> None:
    """Sums are float32 and rounded once; an update takes a float32 gradient as it is."""
    half, full = build(backend, pooled_dtype=torch.bfloat16), build(backend)
    batch = BATCHES[batches](0)
    pooled, expected = half(batch), full(batch)
    assert torch.equal(pooled, expected.bfloat16())
    half.backward_and_update(pooled, upstream(0, half), half.order(batch))
    full.backward_and_update(expected, upstream(0, full), full.order(batch))
    for name, weight in half.tables().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, full.tables()[name])


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_a_bfloat16_gradient_updates_float32_tables(backend: str) -> None:
    half, full = build(backend, pooled_dtype=torch.bfloat16), build(backend)
    pooled, expected = half(bags(0)), full(bags(0))
    rounded = upstream(0, half).bfloat16()
    half.backward_and_update(pooled, rounded, half.order(bags(0)))
    full.backward_and_update(expected, rounded.float(), full.order(bags(0)))
    for name, weight in half.tables().items():
        assert torch.equal(weight, full.tables()[name])


@pytest.mark.parametrize(("backend", "kind"), BACKEND_KINDS)
def test_frozen_scalars_are_what_an_update_reads_of_the_host(backend: str, kind: str) -> None:
    embeddings = build(backend, kind)
    train(embeddings, 0, bags(0))
    embeddings.set_lr(0.25)
    assert embeddings.frozen_scalars() == ((0.25, 1.0) if kind == "adam" else (0.25,))


@pytest.mark.parametrize("backend", ["torch", "torchrec"])
def test_lookups_on_the_cpu_leave_nothing_to_verify(backend: str) -> None:
    embeddings = build(backend)
    spoiled = singles(0)
    spoiled.values[0] = 99
    with pytest.raises(IdRangeError):
        embeddings(spoiled)
    embeddings.verify()
