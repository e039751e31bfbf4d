"""The attention and interaction kernels against the plain forms of their towers in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from models.towers.autoint import AttentionLayer, AutoIntTower
from models.towers.dot_interaction import DotInteractionTower
from models.towers.tower import Tower

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# bf16 keeps 8 bits: a relative error of some 2e-3 a rounding, of which a result has a few.
TOLERANCE = 1e-2
Form = Callable[..., Tensor]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def gradients(form: Form, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = form(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def random(generator_seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(generator_seed)
    return (scale * torch.randn(*shape, generator=generator, device=CUDA)).bfloat16()


def fill_free_memory_with_nan() -> None:
    """What the allocator gives out next holds NaN: an element that nobody writes shows itself."""
    sizes = [2**power for power in range(9, 27)]
    blocks = [torch.full((size // 4,), float("nan"), device=CUDA) for size in sizes for _ in range(3)]
    del blocks


def plain_attention(num_heads: int, kept: Tensor) -> Form:
    """The plain layer in which the ReLU lets through what ``kept`` says.

    At a sum near zero rounding decides what the ReLU lets through, and one such element weighs more than all rounding.
    """

    def form(field_BFD: Tensor, weight_XD: Tensor) -> Tensor:
        query, key, value, residual = (field_BFD @ weight_XD.T).chunk(4, dim=2)
        split = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        query_BHFK, key_BHFK, value_BHFK = split
        weight_BHFF = torch.softmax(query_BHFK @ key_BHFK.transpose(2, 3), dim=3)
        return ((weight_BHFF @ value_BHFK).transpose(1, 2).flatten(2) + residual) * kept

    return form


@pytest.mark.parametrize("batch", [1, 7, 1024])
@pytest.mark.parametrize(
    ("fields", "dim", "heads", "head_dim"), [(26, 64, 2, 32), (3, 16, 1, 16), (31, 48, 2, 16), (16, 32, 4, 16)]
)
def test_attention_equals_the_plain_form(batch: int, fields: int, dim: int, heads: int, head_dim: int) -> None:
    from models.kernels.attention import attention_applies, field_attention

    # A view of wider rows, as a tower gets that reads some features only.
    field = random(1, batch, fields * dim + 16)[:, 16:].unflatten(1, (fields, dim))
    # Scores of some size and no more: a score's rounding error is what its exponential is wrong by.
    weight = random(2, 4 * heads * head_dim, dim, scale=0.5 * dim**-0.5)
    grad = random(3, batch, fields, heads * head_dim)
    assert attention_applies(field, weight, heads)
    fill_free_memory_with_nan()
    found = gradients(lambda *x: field_attention(*x, heads), (field, weight), grad)
    form = plain_attention(heads, (found[0] > 0).double())
    expected = gradients(form, (field.double(), weight.double()), grad)
    layer = AttentionLayer(dim, heads, head_dim).to(CUDA).double()
    with torch.no_grad():
        layer.query_key_value_residual.weight.copy_(weight)
        assert relative(found[0], layer(field.double())) < TOLERANCE
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < TOLERANCE


def test_attention_is_stable_where_scores_are_large() -> None:
    from models.kernels.attention import field_attention

    out = field_attention(random(1, 9, 26, 64, scale=30), random(2, 256, 64), 2)
    assert torch.isfinite(out).all()


def plain_interaction(*vectors: Tensor) -> Tensor:
    stacked = torch.cat([x if x.dim() == 3 else x.unsqueeze(1) for x in vectors], dim=1)
    dots = stacked @ stacked.transpose(1, 2)
    pairs = [dots[:, i, j] for i in range(stacked.shape[1]) for j in range(i)]
    parts = [*(x for x in vectors if x.dim() == 2), torch.stack(pairs, dim=1)]
    joined = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(joined, (0, -joined.shape[1] % 8))


@pytest.mark.parametrize("batch", [1, 7, 1024])
@pytest.mark.parametrize(("fields", "dim"), [(26, 64), (3, 16), (31, 48)])
@pytest.mark.parametrize("with_bottom", [True, False])
def test_interaction_equals_the_plain_form(batch: int, fields: int, dim: int, with_bottom: bool) -> None:
    from models.kernels.interaction import dot_interaction, interaction_applies

    field = random(1, batch, fields * dim + 16)[:, 16:].unflatten(1, (fields, dim))
    inputs = (random(2, batch, dim), field) if with_bottom else (field,)
    expected_out = plain_interaction(*(x.double() for x in inputs))
    width = expected_out.shape[1]
    grad = random(3, batch, width)
    assert interaction_applies(inputs[0] if with_bottom else None, field)
    fill_free_memory_with_nan()
    own = (lambda b, f: dot_interaction(b, f, width)) if with_bottom else (lambda f: dot_interaction(None, f, width))
    found = gradients(own, inputs, grad)
    expected = gradients(plain_interaction, [x.double() for x in inputs], grad)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < TOLERANCE


def autoint() -> Tower:
    config = AutoIntTower.Config(num_layers=2, num_heads=2, head_dim=32, out_dim=24)
    return AutoIntTower(config, 16, (64,) * 26)


def interaction() -> Tower:
    config = DotInteractionTower.Config(bottom_hidden=(32,), hidden=(64,), out_dim=24)
    return DotInteractionTower(config, 16, (64,) * 26)


def built(make: Callable[[], Tower], *, own_kernels: bool) -> Tower:
    torch.manual_seed(1)
    tower = make().to(CUDA, torch.bfloat16)
    tower.own_kernels = own_kernels
    return tower


def step(tower: Callable[..., Tensor], parameters: Sequence[Tensor], dense: Tensor, emb: Tensor) -> list[Tensor]:
    out = tower(dense, emb)
    grad = torch.linspace(-1, 1, out.numel(), device=CUDA).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [emb, *parameters], grad)]


def case(make: Callable[[], Tower], batch: int = 515) -> tuple[Tower, list[Tensor], Tensor, Tensor]:
    tower = built(make, own_kernels=True)
    return tower, list(tower.parameters()), random(1, batch, 16), random(2, batch, 26 * 64).requires_grad_()


@pytest.mark.parametrize("make", [autoint, interaction])
def test_a_tower_with_its_kernels_is_as_near_to_float64_as_its_plain_form(make: Callable[[], Tower]) -> None:
    tower, parameters, dense, emb = case(make)
    found = step(tower, parameters, dense, emb)
    plain = built(make, own_kernels=False)
    by_plain = step(plain, list(plain.parameters()), dense, emb)
    exact = built(make, own_kernels=False).double()
    expected = step(exact, list(exact.parameters()), dense.double(), emb.detach().double().requires_grad_())
    for own, other, truth in zip(found, by_plain, expected, strict=True):
        assert relative(own, truth) < max(TOLERANCE, 1.5 * relative(other, truth))


@pytest.mark.parametrize("make", [autoint, interaction])
def test_repeated_runs_give_the_same_bits(make: Callable[[], Tower]) -> None:
    tower, parameters, dense, emb = case(make)
    first = step(tower, parameters, dense, emb)
    for _ in range(20):
        fill_free_memory_with_nan()
        again = step(tower, parameters, dense, emb)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.filterwarnings("ignore")  # Inductor warns of many things that are not ours
@pytest.mark.parametrize(
    ("make", "operation"), [(autoint, "erase_rec.field_attention"), (interaction, "erase_rec.dot_interaction")]
)
def test_a_compiled_tower_keeps_its_kernels_as_operations(make: Callable[[], Tower], operation: str) -> None:
    from torch._dynamo.backends.registry import lookup_backend

    tower, parameters, dense, emb = case(make)
    expected = step(tower, parameters, dense, emb)
    called: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.extend(str(node.target) for node in module.graph.nodes)
        return lookup_backend("inductor")(module, inputs)

    found = step(torch.compile(tower, fullgraph=True, backend=backend), parameters, dense, emb)
    assert any(operation in target for target in called)
    for one, other in zip(found, expected, strict=True):
        # Inductor rounds less between the operations around the kernels: a ReLU near zero may decide otherwise.
        assert relative(one, other.double()) < 0.1


@pytest.mark.parametrize("make", [autoint, interaction])
def test_a_captured_tower_replays_on_new_inputs(make: Callable[[], Tower]) -> None:
    tower, parameters, dense, emb = case(make)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(tower, parameters, dense, emb)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tower, parameters, dense, emb)
    for seed in range(3, 6):
        with torch.no_grad():
            emb.copy_(random(seed, *emb.shape))
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        expected = step(tower, parameters, dense, emb)
        assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


@pytest.mark.parametrize(("fields", "dim"), [(33, 64), (26, 24)])
@pytest.mark.parametrize("kind", [AutoIntTower, DotInteractionTower])
def test_other_shapes_take_the_plain_form(kind: type[Tower], fields: int, dim: int) -> None:
    tower = kind(kind.Config(), 0, (dim,) * fields).to(CUDA, torch.bfloat16)
    inputs = random(1, 5, 0), random(2, 5, fields * dim)
    plain = tower(*inputs)
    tower.own_kernels = True
    assert torch.equal(tower(*inputs), plain)
