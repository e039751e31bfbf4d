"""Exactness of every schedule, in float64 on the CPU, with the real towers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import DenseOptimizerConfig, OverArchConfig, SparseOptimizerConfig
from erase_rec.dense_optimizer import DenseOptimizer
from erase_rec.finite import FiniteGuard
from erase_rec.protocols import LocalLoss
from erase_rec.schedule.gradients import GradientProgram, Gradients
from erase_rec.schedule.plan import EmbeddingGradient, LossPlan, Plan, TowerPlan
from erase_rec.schedule.program import program
from erase_rec.schedule.step import DENSE_BLOCK, ScheduledStep
from erase_rec.schedule.streams import NullStreams, RecordingStreams
from models.ctr_model import ColumnSelection, CTRModel, TowerBlock
from models.embeddings.layout import Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.local_losses import BCELoss
from models.over_arch import OverArch
from models.registry import component

CPU = torch.device("cpu")
TABLES = [Table(name, rows, 4, mean=False) for name, rows in (("a", 11), ("b", 7), ("c", 5))]
DENSE = 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deep": ("mlp", {"hidden": (8,), "out_dim": 6}),
    "dot": ("dot_interaction", {"bottom_hidden": (8,), "hidden": (8,), "out_dim": 6}),
    "cross": ("dcn_v2", {"num_layers": 2, "rank": 3, "out_dim": 6}),
    "mask": ("masknet", {"mask_hidden": 8, "hidden": (8,), "out_dim": 6}),
    "attention": ("autoint", {"num_layers": 1, "num_heads": 2, "head_dim": 3, "out_dim": 6}),
    "pairs": ("fm", {"out_dim": 6}),
}
MODES: tuple[EmbeddingGradient, ...] = ("main", "local", "both", "none")


def make_model(logits: str = "additive") -> CTRModel:
    torch.manual_seed(0)
    embeddings = TorchEmbeddings(
        TABLES, SparseOptimizerConfig(kind="sgd", lr=0.1), seed=1, device=CPU, dtype=torch.float64
    )
    towers = {}
    for name, (kind, params) in KINDS.items():
        cls = component("tower", kind)
        tower = cls(cls.Config(**params), DENSE, [4, 4, 4])
        towers[name] = TowerBlock(tower, ColumnSelection(range(DENSE), DENSE), ColumnSelection(range(12), 12))
    over_arch = OverArch(OverArchConfig(hidden=(8,), logits=logits), [6] * len(KINDS))  # type: ignore[arg-type]
    return CTRModel(embeddings, towers, over_arch).double()


def make_batch(seed: int = 0, size: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    values = torch.cat([torch.randint(0, table.rows, (size,), generator=generator) for table in TABLES])
    return Batch(
        torch.randn(size, DENSE, generator=generator, dtype=torch.float64),
        SparseBatch(values, torch.ones(3 * size, dtype=torch.int32), None, 3, single_valued=True),
        torch.randint(0, 2, (size,), generator=generator).double(),
        torch.arange(size),
    )


def make_plan(
    detach: str, targets: str, mode: EmbeddingGradient, *, early: bool, losses: bool = True, own_streams: bool = True
) -> Plan:
    """``detach``: all, some or none of the towers; ``targets``: own, joint or both kinds mixed."""
    towers = []
    for index, name in enumerate(KINDS):
        cut = detach == "all" or (detach == "some" and index % 2 == 0)
        target = ("own", "joint")[index % 2] if targets == "mixed" else targets
        loss = LossPlan(0.5 + 0.25 * index, target) if losses or cut else None  # type: ignore[arg-type]
        stream = f"tower:{name}" if own_streams else "main"
        towers.append(TowerPlan(name, stream, cut, early and cut, loss))
    return Plan(tuple(towers), mode)


def local_losses(plan: Plan) -> dict[str, LocalLoss]:
    return {tower.name: BCELoss(BCELoss.Config()) for tower in plan.towers if tower.loss}


def run(model: CTRModel, plan: Plan, batch: Batch) -> Gradients:
    return GradientProgram(model, plan, local_losses(plan), NullStreams(), device=CPU).gradients(batch)


def reference(model: CTRModel, plan: Plan, batch: Batch) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Plain autograd of the same objective: one leaf per loss path, one backward, no schedule code."""
    pooled = model.embeddings(batch.sparse).detach()
    main_leaf = pooled.clone().requires_grad_()
    local_leaf = pooled.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    from_main = {tower.name: model.tower(tower.name)(batch.dense, main_leaf) for tower in plan.towers}
    from_local = {tower.name: model.tower(tower.name)(batch.dense, local_leaf) for tower in plan.towers}
    for tower in plan.towers:
        if tower.loss is None:
            continue
        logit = from_local[tower.name][1]
        if tower.loss.target == "joint":
            logit = logit + sum(other[1].detach() for name, other in from_local.items() if name != tower.name)
        total = total + tower.loss.weight * binary_cross_entropy_with_logits(logit, batch.label)
    outputs = [from_main[t.name][0].detach() if t.detach else from_main[t.name][0] for t in plan.towers]
    logits = [from_main[t.name][1].detach() if t.detach else from_main[t.name][1] for t in plan.towers]
    total = total + binary_cross_entropy_with_logits(model.over_arch(outputs, logits), batch.label)
    named = {f"over_arch.{name}": parameter for name, parameter in model.over_arch.named_parameters()}
    for tower in plan.towers:
        block = model.tower(tower.name)
        named |= {f"towers.{tower.name}.{name}": parameter for name, parameter in block.named_parameters()}
    assert len(named) == len(list(model.parameters()))
    *gradients, main, local = torch.autograd.grad(total, [*named.values(), main_leaf, local_leaf], allow_unused=True)
    chosen = [
        gradient
        for gradient, modes in ((main, {"main", "both"}), (local, {"local", "both"}))
        if gradient is not None and plan.embedding_gradient in modes
    ]
    return dict(zip(named, gradients, strict=True)), sum(chosen[1:], chosen[0]) if chosen else None


@pytest.mark.parametrize(
    ("detach", "targets", "mode", "early"),
    list(itertools.product(["all", "some", "none"], ["own", "joint", "mixed"], MODES, [True, False])),
)
def test_gradients_equal_plain_autograd(detach: str, targets: str, mode: EmbeddingGradient, early: bool) -> None:
    """Every parameter and the pooled embeddings, every embedding_gradient mode, early or aggregate."""
    model, batch = make_model(), make_batch()
    plan = make_plan(detach, targets, mode, early=early)
    found, (expected, expected_pooled) = run(model, plan, batch), reference(model, plan, batch)
    assert found.parameters.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found.parameters[name], gradient, rtol=1e-8, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert (found.pooled is None) == (expected_pooled is None)
    if expected_pooled is not None:
        torch.testing.assert_close(found.pooled, expected_pooled, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("targets", ["own", "joint", "mixed"])
@pytest.mark.parametrize("logits", ["none", "inputs", "additive"])
def test_early_equals_aggregate_bitwise(targets: str, logits: str) -> None:
    """Launching a backward earlier changes no bit: each leaf's gradient is taken alone, summed in tower order."""
    model, batch = make_model(logits), make_batch()
    early = run(model, make_plan("all", targets, "both", early=True), batch)
    late = run(model, make_plan("all", targets, "both", early=False), batch)
    assert early.pooled is not None
    assert late.pooled is not None
    assert torch.equal(early.pooled, late.pooled)
    for name, gradient in early.parameters.items():
        other = late.parameters[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), name


def test_detaching_changes_the_gradients() -> None:
    """Negative control: the comparisons above can fail."""
    model, batch = make_model(), make_batch()
    cut = run(model, make_plan("all", "own", "both", early=True), batch)
    whole = run(model, make_plan("none", "own", "both", early=False), batch)
    assert cut.pooled is not None
    assert whole.pooled is not None
    assert not torch.allclose(cut.pooled, whole.pooled)


@pytest.mark.parametrize("early", [True, False])
def test_each_table_is_updated_once_with_the_summed_gradient(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_model(), make_batch()
    plan = make_plan("all", "own", "both", early=early)
    ops = program(plan)
    gradients = GradientProgram(model, plan, local_losses(plan), RecordingStreams(ops), device=CPU)
    expected_pooled = gradients.gradients(batch).pooled
    assert expected_pooled is not None
    expected = {name: weight.clone() for name, weight in model.embeddings.tables().items()}
    for position, table in enumerate(TABLES):
        ids = batch.sparse.values.reshape(3, -1)[position]
        gradient = expected_pooled[:, 4 * position : 4 * position + 4]
        expected[table.name].index_add_(0, ids, gradient, alpha=-0.1)
    calls = []
    update = model.embeddings.backward_and_update
    monkeypatch.setattr(
        model.embeddings, "backward_and_update", lambda pooled, gradient: (calls.append(1), update(pooled, gradient))
    )
    optimizer = DenseOptimizer(DenseOptimizerConfig(), {DENSE_BLOCK: gradients.dense_parameters()})
    ScheduledStep(gradients, optimizer, FiniteGuard(lambda ids: []))(batch)
    assert len(calls) == 1
    for name, weight in model.embeddings.tables().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-14)
