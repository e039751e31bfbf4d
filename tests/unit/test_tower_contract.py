"""What every registered tower promises, whatever its equation."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.registry import TOWERS, component
from models.towers.tower import Tower

DENSE_DIM = 4
DIMS = (4,) * 5
SMALL: dict[str, dict[str, object]] = {
    "mlp": {"hidden": (8,), "out_dim": 6},
    "dot_interaction": {"bottom_hidden": (8,), "hidden": (8,), "out_dim": 6},
    "dcn_v2": {"num_layers": 2, "rank": 3, "out_dim": 6},
    "masknet": {"mask_hidden": 8, "hidden": (16, 12), "out_dim": 6},
    "autoint": {"num_layers": 2, "num_heads": 2, "head_dim": 3, "out_dim": 6},
    "fm": {"out_dim": 6},
    "deepfm": {"hidden": (8,), "out_dim": 6},
    "cin": {"layer_sizes": (4, 3), "out_dim": 6},
    "bilinear": {"hidden1": (8, 4), "hidden2": (8, 6), "num_heads": 2, "out_dim": 6},
    "transformer": {"dim": 4, "heads": 2, "feed_forward": 2},
}
NEEDS_ONE_DIM = sorted(set(TOWERS) - {"mlp", "dcn_v2", "bilinear", "transformer"})


def make(kind: str, dense_dim: int = DENSE_DIM, **params: object) -> Tower:
    torch.manual_seed(7)
    cls = component("tower", kind)
    config = cls.Config(**{**SMALL[kind], **params})
    assert config.problems(dense_dim, DIMS) == []
    tower = cls(config, dense_dim, DIMS)
    assert isinstance(tower, Tower)
    return tower


def inputs(batch: int, dense_dim: int = DENSE_DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    dense = torch.randn(batch, dense_dim, generator=generator, dtype=dtype)
    return dense, torch.randn(batch, sum(DIMS), generator=generator, dtype=dtype)


def test_every_registered_tower_is_tested() -> None:
    assert set(SMALL) == set(TOWERS)


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("dense_dim", [0, DENSE_DIM])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_output_has_out_dim_columns(kind: str, dense_dim: int, batch: int) -> None:
    tower = make(kind, dense_dim)
    expected = dense_dim + sum(DIMS) if kind == "transformer" else 6
    assert tower(*inputs(batch, dense_dim)).shape == (batch, expected)
    assert tower.out_dim == expected
    assert tower.Config(**SMALL[kind]).output_dim(dense_dim, DIMS) == expected


@pytest.mark.parametrize("kind", TOWERS)
def test_default_parameters_fit_ordinary_inputs(kind: str) -> None:
    cls = component("tower", kind)
    config = cls.Config()
    assert config.problems(16, (16,) * 26) == []
    tower = cls(config, 16, (16,) * 26)
    assert tower(torch.randn(2, 16), torch.randn(2, 26 * 16)).shape == (2, config.output_dim(16, (16,) * 26))


@pytest.mark.parametrize("kind", TOWERS)
def test_a_row_does_not_depend_on_the_other_rows(kind: str) -> None:
    tower = make(kind).double()
    dense, emb = inputs(5, dtype=torch.float64)
    together = tower(dense, emb)
    for row in range(5):
        alone = tower(dense[row : row + 1], emb[row : row + 1])
        # float64: only the order of a matrix product's sums differs.
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TOWERS)
def test_every_parameter_and_every_input_gets_a_finite_nonzero_gradient(kind: str) -> None:
    tower = make(kind)
    dense, emb = (x.requires_grad_() for x in inputs(64))
    tower(dense, emb).square().sum().backward()
    for name, value in {**dict(tower.named_parameters()), "dense": dense, "emb": emb}.items():
        assert value.grad is not None, name
        assert torch.isfinite(value.grad).all(), name
        assert value.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", TOWERS)
def test_gradients_equal_finite_differences(kind: str) -> None:
    tower = make(kind).double()
    dense, emb = (x.requires_grad_() for x in inputs(2, dtype=torch.float64))
    assert torch.autograd.gradcheck(tower, (dense, emb), fast_mode=True)


@pytest.mark.parametrize("kind", TOWERS)
def test_reads_a_view_of_wider_embeddings(kind: str) -> None:
    tower = make(kind)
    dense, emb = inputs(4)
    wide = torch.cat((torch.ones(4, 3), emb, torch.ones(4, 2)), dim=1)
    torch.testing.assert_close(tower(dense, wide[:, 3:-2]), tower(dense, emb))


@pytest.mark.parametrize("kind", TOWERS)
def test_bf16_stays_near_float32(kind: str) -> None:
    tower = make(kind)
    dense, emb = inputs(64)
    expected = tower(dense, emb)
    found = tower.bfloat16()(dense.bfloat16(), emb.bfloat16())
    assert found.dtype == torch.bfloat16
    # bf16 keeps 8 bits: a few roundings in a row leave some percent of the output's size.
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("kind", NEEDS_ONE_DIM)
def test_fields_of_different_dims_are_refused_with_the_dims(kind: str) -> None:
    problems = component("tower", kind).Config().problems(2, (4, 8, 4))
    assert len(problems) == 1
    assert kind in problems[0]
    assert "[4, 8]" in problems[0]


@pytest.mark.parametrize("kind", NEEDS_ONE_DIM)
def test_a_tower_on_fields_is_refused_without_any(kind: str) -> None:
    problems = component("tower", kind).Config().problems(2, ())
    assert len(problems) == 1
    assert kind in problems[0]
    assert "found 0" in problems[0]


@pytest.mark.parametrize("kind", ["mlp", "dcn_v2", "bilinear"])
def test_towers_on_the_flat_input_take_any_dims_or_dense_features_alone(kind: str) -> None:
    cls = component("tower", kind)
    for dims in ((4, 8, 2), ()):
        config = cls.Config(**SMALL[kind])
        assert config.problems(3, dims) == []
        assert cls(config, 3, dims)(torch.randn(2, 3), torch.randn(2, sum(dims))).shape == (2, 6)


@pytest.mark.parametrize(("dense_dim", "dims", "fits"), [(0, (4,), False), (2, (4,), True), (0, (4, 4), True)])
def test_dot_interaction_needs_two_vectors(dense_dim: int, dims: tuple[int, ...], fits: bool) -> None:
    assert (component("tower", "dot_interaction").Config().problems(dense_dim, dims) == []) == fits


def test_bilinear_heads_must_divide_both_streams() -> None:
    config = component("tower", "bilinear").Config(hidden1=(9,), hidden2=(8, 6), num_heads=2)
    problems = config.problems(3, DIMS)
    assert len(problems) == 1
    assert "hidden1" in problems[0]
    assert "num_heads=2" in problems[0]


@pytest.mark.parametrize(
    ("params", "dense_dim", "dims", "words"),
    [
        ({"dim": 6, "heads": 4}, 0, (6,), "multiple of heads, found 6 and 4"),
        ({"dim": 4}, 13, (4,), "whole tokens of dim 4, found 13 columns"),
        ({"dim": 4}, 8, (4, 6, 8), r"found [6]"),
    ],
)
def test_transformer_needs_whole_tokens_and_heads(
    params: dict[str, object], dense_dim: int, dims: tuple[int, ...], words: str
) -> None:
    (problem,) = component("tower", "transformer").Config(**params).problems(dense_dim, dims)
    assert words in problem


def test_a_causal_transformer_s_token_depends_on_no_later_one() -> None:
    tower = make("transformer", causal=True)
    dense, emb = (x.requires_grad_() for x in inputs(3))
    tokens = tower(dense, emb).unflatten(1, (-1, 4))
    by_dense, by_emb = torch.autograd.grad(tokens[:, 2].square().sum(), (dense, emb))
    assert by_dense.abs().sum() > 0
    assert by_emb[:, 4:8].abs().sum() > 0
    assert not by_emb[:, 8:].any()


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("mlp", {"out_dim": 0}),
        ("transformer", {"out_dim": 4}),
        ("mlp", {"dropout": 1}),
        ("mlp", {"width": 3}),
        ("dcn_v2", {"rank": 0}),
        ("masknet", {"hidden": ()}),
        ("autoint", {"num_heads": -1}),
        ("cin", {"layer_sizes": ()}),
    ],
)
def test_senseless_parameters_are_refused(kind: str, params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        component("tower", kind).Config(**params)


def test_batch_norm_trains_on_a_batch_of_one_row_by_its_running_statistics() -> None:
    tower = make("mlp", batch_norm=True).double()
    for _ in range(3):
        tower.train()(*inputs(16, dtype=torch.float64))
    before = {name: value.clone() for name, value in tower.named_buffers()}
    row = inputs(1, dtype=torch.float64)
    in_training = tower.train()(*row)
    assert all(torch.equal(value, before[name]) for name, value in tower.named_buffers())
    torch.testing.assert_close(in_training, tower.eval()(*row))
    in_training.sum().backward()
    assert all(parameter.grad is not None for parameter in tower.parameters())


def test_batch_norm_normalises_larger_batches_by_their_own_statistics() -> None:
    tower = make("mlp", batch_norm=True, hidden=(), out_dim=6).double()
    dense, emb = inputs(64, dtype=torch.float64)
    found = tower(dense, emb)
    linear = tower.get_submodule("mlp.layers.0")(torch.cat((dense, emb), dim=1))
    standard = (linear - linear.mean(dim=0)) / (linear.var(dim=0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found, standard.relu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_dropout_acts_in_training_only(kind: str) -> None:
    tower = make(kind, dropout=0.5)
    batch = inputs(32)
    torch.manual_seed(1)
    assert not torch.equal(tower.train()(*batch), tower.eval()(*batch))
    assert torch.equal(tower(*batch), tower(*batch))
