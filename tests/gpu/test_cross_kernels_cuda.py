"""Kernels of the cross network and of MaskNet on CUDA: against float64, repeated, compiled, in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from models.towers.dcn_v2 import DCNv2Tower
from models.towers.masknet import MaskNetTower
from models.towers.tower import Tower

pytestmark = [
    pytest.mark.gpu,
    # The products of the plain form may vary between streams: of no interest here, where that mode only fills tensors.
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning"),
]
DEVICE = "cuda"
# What bf16 allows: a rounding is 4e-3, and sums over a thousand terms average it out.
LARGEST_ERROR = 1e-2
# Beside the plain form, which rounds more often, but for a single row; below the floor both are exact enough.
WORSE_THAN_PLAIN, ERROR_FLOOR = 1.5, 1e-3


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """New tensors are filled with NaN: what a kernel leaves unwritten is seen; weights do not depend on other tests."""
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(DEVICE, torch.bfloat16)


def cross_tower(dense_dim: int, emb_dim: int, rank: int, out_dim: int, layers: int) -> Tower:
    config = DCNv2Tower.Config(num_layers=layers, rank=rank, out_dim=out_dim)
    return prepared(DCNv2Tower(config, dense_dim, [emb_dim]))


def mask_tower(dense_dim: int, fields: int, dim: int, block_dim: int) -> Tower:
    config = MaskNetTower.Config(mask_hidden=32, hidden=(block_dim,), out_dim=24)
    return prepared(MaskNetTower(config, dense_dim, [dim] * fields))


def prepared(tower: Tower) -> Tower:
    """On the device, in bf16, with own kernels, and no parameter at a value that hides a mistake."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in tower.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.2)
    tower = tower.to(DEVICE, torch.bfloat16)
    for module in tower.modules():
        if hasattr(module, "own_kernels"):
            module.own_kernels = True
    return tower


def plain(tower: Tower, dtype: torch.dtype) -> Tower:
    other = deepcopy(tower).to(dtype)
    for module in other.modules():
        if hasattr(module, "own_kernels"):
            module.own_kernels = False
    return other


def results(tower: Tower, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The output, then the gradients of the inputs and of the parameters."""
    dtype = next(tower.parameters()).dtype
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = tower(*leaves)
    wanted = [*(x for x in leaves if x.numel()), *tower.parameters()]
    return [out.detach(), *torch.autograd.grad(out, wanted, draw(seed, *out.shape).to(dtype))]


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm().clamp_min(1e-30))


def assert_as_exact_as_plain(tower: Tower, inputs: Sequence[Tensor]) -> None:
    right = results(plain(tower, torch.float64), inputs, 9)
    in_bf16 = results(plain(tower, torch.bfloat16), inputs, 9)
    for own, rounded, exact in zip(results(tower, inputs, 9), in_bf16, right, strict=True):
        bound = max(WORSE_THAN_PLAIN * error(rounded, exact), ERROR_FLOOR)
        assert error(own, exact) <= bound
        assert error(own, exact) <= LARGEST_ERROR or error(rounded, exact) > LARGEST_ERROR


CROSS_SHAPES = [
    # rows, dense, embeddings, rank, outputs, layers
    (1, 0, 128, 128, 128, 1),
    (7, 16, 1664, 128, 128, 3),
    (1000, 5, 300, 16, 40, 4),
    (1000, 13, 203, 24, 7, 2),
    (4096, 16, 1664, 128, 128, 3),
    (9000, 8, 96, 16, 16, 2),
]


@pytest.mark.parametrize(("rows", "dense", "emb", "rank", "outputs", "layers"), CROSS_SHAPES)
def test_cross_against_float64(rows: int, dense: int, emb: int, rank: int, outputs: int, layers: int) -> None:
    tower = cross_tower(dense, emb, rank, outputs, layers)
    assert_as_exact_as_plain(tower, (draw(1, rows, dense), draw(2, rows, emb)))


@pytest.mark.parametrize(("rows", "fields", "dim", "block_dim"), [(1, 3, 10, 30), (7, 1, 64, 256), (4096, 26, 64, 256)])
def test_masknet_against_float64(rows: int, fields: int, dim: int, block_dim: int) -> None:
    # Masked products through a layer norm: bf16 itself is some percent off, so the plain form is the measure.
    tower = mask_tower(4, fields, dim, block_dim)
    assert_as_exact_as_plain(tower, (draw(1, rows, 4), draw(2, rows, fields * dim)))


def test_wider_than_the_kernels_is_the_plain_form() -> None:
    tower = cross_tower(4, 60, 130, 16, 2)
    inputs = (draw(1, 50, 4), draw(2, 50, 60))
    for own, rounded in zip(results(tower, inputs, 9), results(plain(tower, torch.bfloat16), inputs, 9), strict=True):
        assert torch.equal(own, rounded)


TOWERS: list[tuple[Callable[[], Tower], int]] = [
    (lambda: cross_tower(16, 640, 128, 64, 3), 640),
    (lambda: mask_tower(16, 10, 64, 256), 640),
]


@pytest.mark.parametrize(("build", "emb_dim"), TOWERS)
def test_embeddings_that_are_columns_of_a_wider_tensor(build: Callable[[], Tower], emb_dim: int) -> None:
    tower = build()
    dense, wide = draw(1, 300, 20), draw(2, 300, emb_dim + 128)
    views = (dense[:, 4:], wide[:, 64 : 64 + emb_dim])
    copies = tuple(x.contiguous() for x in views)
    with torch.no_grad():
        assert torch.equal(tower(*views), tower(*copies))


@pytest.mark.parametrize(("build", "emb_dim"), TOWERS)
def test_repeated_runs_are_bitwise_equal(build: Callable[[], Tower], emb_dim: int) -> None:
    tower, inputs = build(), (draw(1, 2500, 16), draw(2, 2500, emb_dim))
    first = results(tower, inputs, 9)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(results(tower, inputs, 9), first, strict=True))


@pytest.mark.filterwarnings("ignore")  # Inductor warns of many things that are not ours
def test_the_operations_are_registered_as_pytorch_asks() -> None:
    from models.kernels.cross import cross
    from models.kernels.masked_norm import masked_norm, norm_relu

    def leaf(*shape: int) -> Tensor:
        return draw(len(shape), *shape).requires_grad_()

    weights = [leaf(16, 40)], [leaf(40, 16)], [leaf(40)], leaf(24, 40), leaf(24)
    torch.library.opcheck(cross, (leaf(30, 8), leaf(30, 32), *weights))
    torch.library.opcheck(masked_norm, (leaf(30, 32), leaf(32), leaf(30, 32), leaf(4, 8), leaf(4, 8)))
    torch.library.opcheck(norm_relu, (leaf(30, 32), leaf(32), leaf(32), leaf(32)))


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize(("build", "emb_dim"), TOWERS)
def test_compiled(build: Callable[[], Tower], emb_dim: int) -> None:
    tower, inputs = build(), (draw(1, 1000, 16), draw(2, 1000, emb_dim))
    exact = results(plain(tower, torch.float64), inputs, 9)
    in_bf16 = results(plain(tower, torch.bfloat16), inputs, 9)
    tower.compile()
    for found, rounded, right in zip(results(tower, inputs, 9), in_bf16, exact, strict=True):
        assert error(found, right) <= max(WORSE_THAN_PLAIN * error(rounded, right), ERROR_FLOOR)


@pytest.mark.parametrize(("build", "emb_dim"), TOWERS)
def test_in_a_graph(build: Callable[[], Tower], emb_dim: int) -> None:
    """A replay on new inputs equals the eager run on them bit for bit."""
    tower = build()
    static = (draw(1, 1000, 16), draw(2, 1000, emb_dim))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    leaves = [x.requires_grad_() for x in static]
    out_grad = draw(9, 1000, tower.out_dim)

    def step() -> list[Tensor]:
        out = tower(*leaves)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *tower.parameters()], out_grad)]

    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        fresh = (draw(seed, 1000, 16), draw(seed + 10, 1000, emb_dim))
        with torch.no_grad():
            for x, new in zip(static, fresh, strict=True):
                x.copy_(new)
        graph.replay()
        expected = results(tower, fresh, 9)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
