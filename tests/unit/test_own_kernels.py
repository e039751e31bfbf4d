"""When towers call the project's own kernels, and with what; the kernels themselves need a GPU (tests/gpu)."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels import own_kernel_applies
from models.towers import autoint, dot_interaction
from models.towers.autoint import AutoIntTower
from models.towers.dot_interaction import DotInteractionTower
from models.towers.tower import Tower

FIELDS, DIM, DENSE = 4, 16, 8


class Recorder:
    """In the place of a kernel: keeps its arguments and answers with ones of the right shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Tensor:
        self.calls.append(args)
        return torch.ones(3, *self.shape)


def make_autoint() -> Tower:
    return AutoIntTower(AutoIntTower.Config(num_heads=2, head_dim=16, out_dim=5), DENSE, (DIM,) * FIELDS)


def make_interaction(dense_dim: int = DENSE) -> Tower:
    return DotInteractionTower(DotInteractionTower.Config(out_dim=5), dense_dim, (DIM,) * FIELDS)


def inputs(dense_dim: int = DENSE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, dense_dim, generator=generator), torch.randn(3, FIELDS * DIM, generator=generator)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, suits: bool) -> tuple[Recorder, Recorder]:
    """Kernels that apply to every tensor, and to these shapes if ``suits``."""
    attention, interaction = Recorder(FIELDS, 32), Recorder(32)
    modules = {
        "attention": SimpleNamespace(attention_applies=lambda *_: suits, field_attention=attention),
        "interaction": SimpleNamespace(interaction_applies=lambda *_: suits, dot_interaction=interaction),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"models.kernels.{name}", module)
    for tower_module in (autoint, dot_interaction):
        monkeypatch.setattr(tower_module, "own_kernel_applies", lambda _: True)
    return attention, interaction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_kernel_applies_on_the_cpu(dtype: torch.dtype) -> None:
    assert not own_kernel_applies(torch.ones(2, 2, dtype=dtype))


@pytest.mark.parametrize("make", [make_autoint, make_interaction])
def test_where_no_kernel_applies_the_plain_form_answers(make: Any) -> None:
    tower = make()
    assert not tower.own_kernels
    plain = tower(*inputs())
    tower.own_kernels = True
    assert torch.equal(tower(*inputs()), plain)


def test_autoint_gives_its_kernel_the_fields_and_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, _ = stand_in(monkeypatch, suits=True)
    tower = make_autoint()
    tower.own_kernels = True
    dense, emb = inputs()
    output = tower(dense, emb)
    ((field, weight, heads),) = attention.calls
    assert torch.equal(field, emb.reshape(3, FIELDS, DIM))
    assert weight is tower.get_parameter("layers.0.query_key_value_residual.weight")
    assert heads == 2
    projection = tower.get_submodule("projection")
    assert torch.equal(output, projection(torch.cat((torch.ones(3, FIELDS * 32), dense), dim=1)))


@pytest.mark.parametrize("dense_dim", [0, DENSE])
def test_interaction_gives_its_kernel_bottom_fields_and_the_width_of_top(
    monkeypatch: pytest.MonkeyPatch, dense_dim: int
) -> None:
    _, interaction = stand_in(monkeypatch, suits=True)
    tower = make_interaction(dense_dim)
    tower.own_kernels = True
    width = 32 if dense_dim else 8
    assert tower.get_parameter("top.layers.0.weight").shape[1] == width
    interaction.shape = (width,)
    dense, emb = inputs(dense_dim)
    output = tower(dense, emb)
    ((bottom, field, asked),) = interaction.calls
    if dense_dim:
        assert torch.equal(bottom, tower.get_submodule("bottom")(dense))
    else:
        assert bottom is None
    assert torch.equal(field, emb.reshape(3, FIELDS, DIM))
    assert asked == width
    assert torch.equal(output, tower.get_submodule("top")(torch.ones(3, width)))


@pytest.mark.parametrize("make", [make_autoint, make_interaction])
@pytest.mark.parametrize(("own_kernels", "suits"), [(False, True), (True, False)])
def test_plain_kernels_or_shapes_that_do_not_suit_take_the_plain_form(
    monkeypatch: pytest.MonkeyPatch, make: Any, own_kernels: bool, suits: bool
) -> None:
    expected = make_and_run(make)
    attention, interaction = stand_in(monkeypatch, suits=suits)
    assert torch.equal(make_and_run(make, own_kernels=own_kernels), expected)
    assert attention.calls == interaction.calls == []


def make_and_run(make: Any, *, own_kernels: bool = False) -> Tensor:
    torch.manual_seed(3)
    tower = make()
    tower.own_kernels = own_kernels
    result: Tensor = tower(*inputs())
    return result
