"""The model: input selection, seeding, state, and the registry behind it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import Config
from erase_rec.errors import ConfigError, UserError
from erase_rec.precision import cast_parameters
from models.ctr_model import ColumnSelection, CTRModel, build_local_losses, build_model
from models.kernels import own_kernel_applies
from models.local_losses import FocalLoss
from models.registry import LOCAL_LOSSES, TOWERS, ModelCatalog

CPU = torch.device("cpu")
DENSE = ("n0", "n1", "n2")
SPARSE = ("a", "b", "c")
TOWER_LIST: list[dict[str, Any]] = [
    {"name": "deep", "kind": "mlp", "params": {"hidden": [8], "out_dim": 4}},
    {"name": "cross", "kind": "dcn_v2", "params": {"num_layers": 1, "out_dim": 5}},
    {"name": "dots", "kind": "dot_interaction", "params": {"bottom_hidden": [4], "hidden": [4], "out_dim": 3}},
]


class OneHotEmbeddings(nn.Module):
    """One table a feature, read by single-valued bags: enough of the protocol for a forward pass."""

    def __init__(self, feature_dims: Sequence[int]) -> None:
        super().__init__()
        self.feature_dims = list(feature_dims)
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(10, dim, generator=generator) for dim in feature_dims)

    def forward(self, sparse: SparseBatch) -> Tensor:
        ids = sparse.values.reshape(sparse.num_features, -1)
        return torch.cat([weight[row] for weight, row in zip(self.weights, ids, strict=True)], dim=1)

    def order(self, sparse: SparseBatch) -> None:
        return None

    def backward_and_update(self, pooled: Tensor, gradient: Tensor, order: None) -> None:
        pooled.backward(gradient)

    def set_lr(self, lr: float) -> None:
        raise AssertionError

    def frozen_scalars(self) -> tuple[float, ...]:
        raise AssertionError

    def verify(self) -> None:
        raise AssertionError

    def tables(self) -> Mapping[str, Tensor]:
        return dict(zip(SPARSE, self.weights, strict=True))

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        raise AssertionError


def make_config(towers: list[dict[str, Any]], seed: int = 1, **over_arch: Any) -> Config:
    return Config.model_validate(
        {
            "seed": seed,
            "data": {"kind": "synthetic"},
            "features": {
                "dense": [{"name": name} for name in DENSE],
                "sparse": [{"name": name, "num_embeddings": 8} for name in SPARSE],
            },
            "towers": towers,
            "over_arch": {"hidden": [6], **over_arch},
            "train": {"steps": 1},
        }
    )


def make_model(towers: list[dict[str, Any]], dims: Sequence[int] = (4, 4, 4), **config: Any) -> CTRModel:
    return build_model(make_config(towers, **config), OneHotEmbeddings(dims), CPU)


def make_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, 10, (len(SPARSE) * size,), generator=generator)
    sparse = SparseBatch(ids, torch.ones_like(ids, dtype=torch.int32), None, len(SPARSE), single_valued=True)
    label = (torch.rand(size, generator=generator) < 0.5).float()
    return Batch(torch.randn(size, len(DENSE), generator=generator), sparse, label, torch.arange(size))


def widened(x: Tensor, columns: int) -> Tensor:
    """``x`` with zero columns after its own."""
    return nn.functional.pad(x, (0, columns - x.shape[1]))


def test_selecting_everything_is_the_tensor_itself() -> None:
    x = torch.randn(2, 6)
    assert ColumnSelection(range(6), 6)(x) is x


def test_selecting_a_contiguous_range_is_a_view() -> None:
    x = torch.randn(2, 6)
    chosen = ColumnSelection((2, 3, 4), 6)(x)
    assert torch.equal(chosen, x[:, 2:5])
    assert chosen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_selecting_scattered_columns_keeps_their_order() -> None:
    x = torch.randn(2, 6)
    assert torch.equal(ColumnSelection((0, 3, 5), 6)(x), x[:, [0, 3, 5]])


def test_selecting_nothing_lets_no_gradient_through() -> None:
    chosen = ColumnSelection((), 6)(torch.randn(2, 6, requires_grad=True))
    assert chosen.shape == (2, 0)
    assert not chosen.requires_grad


def test_sampled_negatives_shift_the_logits_that_are_predictions() -> None:
    """A tower under the joint target gives a term of a sum: it is no prediction, and stays."""
    losses = [{"kind": "bce"}, {"kind": "bce", "target": "joint"}, None]
    towers = [tower | {"loss": loss, "detach": True} for tower, loss in zip(TOWER_LIST, losses, strict=True)]
    plain = make_config(towers)
    sampled = plain.model_copy(update={"data": plain.data.model_copy(update={"negative_sampling_rate": 0.1})})
    before, after = (
        build_model(config, OneHotEmbeddings((4, 4, 4)), CPU).score(make_batch(5)) for config in (plain, sampled)
    )
    odds = after.logit.exp() / before.logit.exp()
    assert odds.tolist() == pytest.approx([0.1] * 5, rel=1e-5)
    shifts = {
        name: (after.tower_logits[name] - before.tower_logits[name]).mean().item() for name in before.tower_logits
    }
    assert shifts == pytest.approx({"deep": math.log(0.1), "cross": 0.0, "dots": math.log(0.1)}, abs=1e-5)


def test_towers_read_the_named_features_in_feature_order() -> None:
    inputs = {"dense": ["n2", "n0"], "sparse": ["c", "a"]}
    tower = {"name": "some", "kind": "mlp", "inputs": inputs, "params": {"hidden": [8], "out_dim": 4}}
    block = make_model([tower], dims=(2, 3, 5)).tower("some")
    dense, pooled = torch.randn(3, 3), torch.randn(3, 10)
    chosen_pooled = torch.cat((pooled[:, 0:2], pooled[:, 5:10]), dim=1)
    output, logit = block(dense, pooled)
    assert torch.equal(output, block.tower(widened(dense[:, [0, 2]], 9), chosen_pooled))
    torch.testing.assert_close(logit, (output @ block.head.linear.weight[0]) + block.head.linear.bias)


@pytest.mark.parametrize("kind", sorted(TOWERS))
@pytest.mark.parametrize("inputs", [{}, {"dense": False}, {"sparse": ["a", "b"], "towers": ["a"]}])
def test_the_width_that_a_tower_reads_is_a_multiple_of_8_unless_it_reads_no_dense_column(
    kind: str, inputs: dict[str, Any]
) -> None:
    params = {"dim": 1, "heads": 1} if kind == "transformer" else {}
    model = make_model([CHAIN[0], {"name": "t", "kind": kind, "inputs": inputs, "params": params}])
    read: list[tuple[int, int]] = []
    block = model.tower("t")
    block.tower.register_forward_pre_hook(lambda _, args: read.append((args[0].shape[1], args[1].shape[1])))
    model.score(make_batch(3))
    dense_dim = {0: 3, 1: 0, 2: 7}[len(inputs)]
    emb_dim = 8 if "sparse" in inputs else 12
    if dense_dim and kind != "transformer":
        assert read == [(dense_dim + (-dense_dim - emb_dim) % 8, emb_dim)]
    else:
        assert read == [(dense_dim, emb_dim)]


def test_the_widths_of_matrix_products_are_multiples_of_8() -> None:
    model = make_model(TOWER_LIST, logits="inputs")
    widths = {
        name: value.shape[1]
        for name, value in model.dense_state().items()
        if name.endswith(("mlp.layers.0.weight", "bottom.layers.0.weight", "top.layers.0.weight", "projection.weight"))
    }
    assert widths == {
        "towers.deep.tower.mlp.layers.0.weight": 16,
        "towers.cross.tower.projection.weight": 16,
        "towers.dots.tower.bottom.layers.0.weight": 4,
        "towers.dots.tower.top.layers.0.weight": 16,
        "over_arch.mlp.layers.0.weight": 16,
    }


@pytest.mark.parametrize(("kernels", "own"), [("auto", True), ("plain", False)])
def test_towers_are_told_whether_to_use_own_kernels(kernels: str, own: bool) -> None:
    config = make_config(TOWER_LIST)
    config = config.model_copy(update={"model": config.model.model_copy(update={"kernels": kernels})})
    model = build_model(config, OneHotEmbeddings((4, 4, 4)), CPU)
    assert [model.tower(name).tower.own_kernels for name in model.tower_names()] == [own] * 3
    assert not own_kernel_applies(torch.ones(2, dtype=torch.bfloat16)), "a tensor on the CPU"


@pytest.mark.parametrize(
    ("inputs", "reads_dense", "reads_sparse"),
    [({"sparse": False}, True, False), ({"dense": False}, False, True), ({}, True, True)],
)
def test_only_what_a_tower_reads_gets_a_gradient(
    inputs: dict[str, bool], reads_dense: bool, reads_sparse: bool
) -> None:
    block = make_model([{"name": "t", "kind": "mlp", "inputs": inputs, "params": {"out_dim": 4}}]).tower("t")
    leaves = torch.randn(3, 3, requires_grad=True), torch.randn(3, 12, requires_grad=True)
    _, logit = block(*leaves)
    gradients = torch.autograd.grad(logit.sum(), leaves, allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [reads_dense, reads_sparse]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("logits", ["none", "inputs", "additive"])
def test_score_joins_all_towers(size: int, logits: str) -> None:
    model, batch = make_model(TOWER_LIST, logits=logits), make_batch(size)
    scores = model.score(batch)
    pooled = model.embeddings(batch.sparse)
    parts = [model.tower(name)(batch.dense, pooled) for name in ("deep", "cross", "dots")]
    assert list(scores.tower_logits) == list(model.tower_names()) == ["deep", "cross", "dots"]
    for name, (_, logit) in zip(scores.tower_logits, parts, strict=True):
        assert torch.equal(scores.tower_logits[name], logit)
        assert logit.shape == (size,)
    joined = model.over_arch([output for output, _ in parts], [logit for _, logit in parts])
    assert torch.equal(scores.logit, joined)
    assert scores.logit.shape == (size,)


CHAIN: list[dict[str, Any]] = [
    {"name": "a", "kind": "mlp", "params": {"hidden": [], "out_dim": 4}},
    {"name": "b", "kind": "dcn_v2", "inputs": {"dense": ["n1"], "towers": ["a"]}, "params": {"out_dim": 5}},
    {
        "name": "c",
        "kind": "mlp",
        "inputs": {"dense": False, "sparse": False, "towers": ["b", "a"]},
        "params": {"hidden": [], "out_dim": 3},
    },
]


def test_a_chained_tower_reads_outputs_beside_its_dense_features_in_the_order_named() -> None:
    model, batch = make_model(CHAIN), make_batch(5)
    pooled = model.embeddings(batch.sparse)
    a, b, c = (model.tower(name) for name in ("a", "b", "c"))
    assert (a.inputs, b.inputs, c.inputs) == ((), ("a",), ("b", "a"))
    out_a, logit_a = a(batch.dense, pooled)
    out_b, logit_b = b(batch.dense, pooled, [out_a])
    out_c, logit_c = c(batch.dense, pooled, [out_b, out_a])
    assert torch.equal(out_b, b.tower(widened(torch.cat((batch.dense[:, 1:2], out_a), dim=1), 12), pooled))
    assert torch.equal(out_c, c.tower(widened(torch.cat((out_b, out_a), dim=1), 16), pooled[:, :0]))
    scores = model.score(batch)
    expected = {"a": logit_a, "b": logit_b, "c": logit_c}
    assert all(torch.equal(scores.tower_logits[name], logit) for name, logit in expected.items())
    assert torch.equal(scores.logit, model.over_arch([out_a, out_b, out_c], list(expected.values())))


@pytest.mark.parametrize("kind", sorted(TOWERS))
def test_every_kind_reads_another_tower_s_output(kind: str) -> None:
    params = {"dim": 4} if kind == "transformer" else {}
    inputs = {"dense": False, "towers": ["a"]}
    model, batch = (
        make_model([CHAIN[0], {"name": "t", "kind": kind, "inputs": inputs, "params": params}]),
        make_batch(5),
    )
    pooled = model.embeddings(batch.sparse)
    output_a = torch.randn(5, 4, requires_grad=True)
    _, logit = model.tower("t")(batch.dense, pooled, [output_a])
    (gradient,) = torch.autograd.grad(logit.sum(), output_a)
    assert gradient.abs().sum() > 0


def test_a_chained_tower_without_its_inputs_is_refused() -> None:
    model, batch = make_model(CHAIN), make_batch(2)
    with pytest.raises(AssertionError):
        model.tower("b")(batch.dense, model.embeddings(batch.sparse))


def test_a_frozen_tower_keeps_parameters_and_running_statistics_and_stays_in_the_state() -> None:
    params = {"hidden": [4], "out_dim": 4, "batch_norm": True, "dropout": 0.5}
    towers = [{"name": "t", "kind": "mlp", "frozen": True, "params": params}, CHAIN[0]]
    model, batch = make_model(towers), make_batch(8)
    block = model.tower("t")
    assert not any(parameter.requires_grad for parameter in block.parameters())
    assert all(parameter.requires_grad for parameter in model.over_arch.parameters())
    assert any(parameter.requires_grad for parameter in model.tower("a").parameters())
    before = {name: value.clone() for name, value in model.dense_state().items()}
    model.train()
    assert not block.training
    assert model.tower("a").training
    first, second = (block(batch.dense, model.embeddings(batch.sparse))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert {"towers.t.tower.mlp.layers.0.weight", "towers.t.head.linear.weight"} <= before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.dense_state().items())


def test_gradients_pass_through_a_frozen_tower() -> None:
    model, batch = make_model([{**CHAIN[0], "frozen": True}]), make_batch(3)
    pooled = model.embeddings(batch.sparse).detach().requires_grad_()
    output, _ = model.tower("a")(batch.dense, pooled)
    (gradient,) = torch.autograd.grad(output.sum(), pooled)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("loss", "logits", "trained"),
    [
        (None, "none", False),
        ({"weight": 0}, "none", False),
        ({}, "none", True),
        (None, "inputs", True),
        (None, "additive", True),
    ],
)
def test_a_head_whose_logit_no_loss_sees_is_not_trained(
    loss: dict[str, Any] | None, logits: str, trained: bool
) -> None:
    block = make_model([{**CHAIN[0], "loss": loss}], logits=logits).tower("a")
    assert {parameter.requires_grad for parameter in block.head.parameters()} == {trained}
    assert all(parameter.requires_grad for parameter in block.tower.parameters())


@pytest.mark.parametrize("logits", ["none", "inputs", "additive"])
def test_exactly_what_the_main_loss_reaches_is_trainable(logits: str) -> None:
    """An exact model without local losses, as one DistributedDataParallel with FUP=False needs it."""
    model = make_model([*CHAIN, {**TOWER_LIST[0], "frozen": True}], logits=logits)
    model.score(make_batch(16)).logit.square().sum().backward()
    for block in (model.tower("a"), model.tower("b"), model.tower("c"), model.tower("deep"), model.over_arch):
        for parameter in block.parameters():
            assert parameter.requires_grad == (parameter.grad is not None)


def test_logits_of_a_bf16_model_are_float32_and_outputs_are_not() -> None:
    model, batch = make_model(TOWER_LIST), make_batch(5)
    cast_parameters(model, torch.bfloat16)
    model.embeddings.to(torch.bfloat16)  # type: ignore[attr-defined]
    output, logit = model.tower("deep")(batch.dense, model.embeddings(batch.sparse))
    scores = model.score(batch)
    assert (output.dtype, logit.dtype, scores.logit.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_float64_model_takes_the_loaders_float32_batch() -> None:
    embeddings = OneHotEmbeddings((4, 4, 4)).double()
    model = build_model(make_config(TOWER_LIST), embeddings, CPU, dtype=torch.float64)
    scores = model.score(make_batch(4))
    assert scores.logit.dtype == torch.float64
    reference = make_model(TOWER_LIST).score(make_batch(4))
    torch.testing.assert_close(scores.logit.float(), reference.logit, rtol=1e-4, atol=1e-5)


def test_adding_a_tower_leaves_the_others_weights_as_they_were() -> None:
    few, many = make_model(TOWER_LIST[:1]).dense_state(), make_model(TOWER_LIST[::-1]).dense_state()
    shared = [name for name in few if name.startswith("towers.")]
    assert shared
    assert all(torch.equal(few[name], many[name]) for name in shared)


def test_weights_depend_on_seed_and_name_and_not_on_the_global_generator() -> None:
    weight = "towers.deep.head.linear.weight"
    torch.manual_seed(1)
    first = make_model(TOWER_LIST).dense_state()[weight]
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = make_model(TOWER_LIST).dense_state()[weight]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, make_model(TOWER_LIST, seed=2).dense_state()[weight])
    renamed = make_model([{**TOWER_LIST[0], "name": "other"}]).dense_state()
    assert not torch.equal(first, renamed["towers.other.head.linear.weight"])


def test_dense_state_moves_a_model_to_the_same_scores_and_holds_no_table() -> None:
    source, target = make_model(TOWER_LIST, seed=1), make_model(TOWER_LIST, seed=2)
    state = {name: value.clone() for name, value in source.dense_state().items()}
    assert {name.split(".")[0] for name in state} == {"towers", "over_arch"}
    assert {name.split(".")[1] for name in state if name.startswith("towers.")} == {"deep", "cross", "dots"}
    batch = make_batch(6)
    assert not torch.equal(source.score(batch).logit, target.score(batch).logit)
    target.load_dense_state(state)
    assert torch.equal(source.score(batch).logit, target.score(batch).logit)


def test_dense_state_covers_every_parameter_and_running_statistic() -> None:
    tower = {"name": "t", "kind": "mlp", "params": {"hidden": [4], "out_dim": 4, "batch_norm": True}}
    model = make_model([tower])
    shared = {value.data_ptr() for value in model.dense_state().values()}
    for block in (model.tower("t"), model.over_arch):
        assert {value.data_ptr() for value in block.parameters()} <= shared
    assert "towers.t.tower.mlp.layers.1.running_mean" in model.dense_state()


def test_a_state_of_another_model_is_refused_whole_and_by_name() -> None:
    model = make_model(TOWER_LIST)
    before = {name: value.clone() for name, value in model.dense_state().items()}
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    del state["towers.deep.head.linear.bias"]
    state["towers.lost.head.linear.bias"] = torch.zeros(1)
    state["towers.cross.head.linear.weight"] = torch.zeros(1, 1)
    with pytest.raises(UserError) as error:
        model.load_dense_state(state)
    message = str(error.value)
    assert "towers.deep.head.linear.bias is missing" in message
    assert "towers.lost.head.linear.bias is not part" in message
    assert "towers.cross.head.linear.weight has shape (1, 1), expected (1, 5)" in message
    assert all(torch.equal(value, before[name]) for name, value in model.dense_state().items())


@pytest.mark.parametrize("name", ["keys", "type", "forward", "training", "name", "pop", "tower"])
def test_a_tower_may_have_the_name_of_a_module_attribute(name: str) -> None:
    model = make_model([{**TOWER_LIST[0], "name": name}])
    assert list(model.score(make_batch(2)).tower_logits) == [name]
    assert f"towers.{name}.head.linear.weight" in model.dense_state()


def test_a_tower_that_does_not_fit_its_inputs_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"towers\.dots: dot_interaction needs one embedding_dim"):
        make_model(TOWER_LIST, dims=(4, 8, 4))


def test_a_chained_tower_that_does_not_fit_what_it_reads_is_refused_by_name() -> None:
    tower = {"name": "t", "kind": "transformer", "inputs": {"dense": False, "towers": ["a"]}, "params": {"dim": 4}}
    with pytest.raises(ConfigError, match=r"towers\.t: transformer needs .* found 5 columns"):
        make_model([{**CHAIN[0], "params": {"out_dim": 5}}, tower])


def test_local_losses_are_those_declared_with_a_weight() -> None:
    losses: list[dict[str, Any] | None] = [{"kind": "focal", "params": {"gamma": 1}}, {"weight": 0}, None]
    towers = [{**tower, "loss": loss} for tower, loss in zip(TOWER_LIST, losses, strict=True)]
    built = build_local_losses(make_config(towers))
    assert list(built) == ["deep"]
    assert isinstance(built["deep"], FocalLoss)


@pytest.mark.parametrize(
    ("group", "kind"), [*(("tower", kind) for kind in TOWERS), *(("local_loss", kind) for kind in LOCAL_LOSSES)]
)
def test_the_catalog_finds_each_kinds_parameters(group: Any, kind: str) -> None:
    catalog = ModelCatalog()
    assert kind in catalog.kinds(group)
    assert list(catalog.kinds(group)) == sorted(catalog.kinds(group))
    assert catalog.params_model(group, kind)().model_dump() is not None


def test_listing_kinds_imports_no_torch(checkout: Path) -> None:
    code = (
        "import sys; from models.registry import ModelCatalog; "
        "assert 'mlp' in ModelCatalog().kinds('tower'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, timeout=60)
