"""Each tower against its paper's equation, written as loops over rows, fields and pairs in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.layers import MLP
from models.towers.autoint import AutoIntTower
from models.towers.bilinear import BilinearTower
from models.towers.cin import CINTower
from models.towers.dcn_v2 import DCNv2Tower
from models.towers.deepfm import DeepFMTower
from models.towers.dot_interaction import DotInteractionTower
from models.towers.fm import FMTower
from models.towers.masknet import MaskNetTower
from models.towers.mlp import MLPTower
from models.towers.tower import Tower
from models.towers.transformer import TransformerTower

B, N, F, D = 3, 2, 4, 3


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randn(B, N, generator=generator, dtype=torch.float64)
    return dense, torch.randn(B, F * D, generator=generator, dtype=torch.float64)


def randomised(tower: Tower) -> Tower:
    """In float64, with every parameter random: a zero or a one in the initialisation would hide a mistake."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in tower.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return tower


def affine(linear: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(linear, nn.Linear)
    result = linear.weight @ x
    return result if linear.bias is None else result + linear.bias


def relu_layers(mlp: MLP, x: Tensor) -> Tensor:
    for layer in mlp.layers:
        if isinstance(layer, nn.Linear):
            x = affine(layer, x).clamp_min(0)
    return x


def normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    variance = ((x - x.mean()) ** 2).mean()
    return (x - x.mean()) / (variance + 1e-5).sqrt() * scale + shift


def fields_of(emb: Tensor) -> list[Tensor]:
    return list(emb.split(D))


def check(tower: Tower, rows: tuple[Tensor, Tensor], expected: list[Tensor]) -> None:
    # float64: products are summed in another order, nothing else differs.
    torch.testing.assert_close(tower(*rows), torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_mlp(rows: tuple[Tensor, Tensor]) -> None:
    tower = randomised(MLPTower(MLPTower.Config(hidden=(5, 4), out_dim=3), N, (D,) * F))
    assert isinstance(tower, MLPTower)
    check(tower, rows, [relu_layers(tower.mlp, torch.cat(row)) for row in zip(*rows, strict=True)])


@pytest.mark.parametrize("with_dense", [True, False])
def test_dot_interaction(rows: tuple[Tensor, Tensor], with_dense: bool) -> None:
    dense, emb = rows if with_dense else (rows[0][:, :0], rows[1])
    config = DotInteractionTower.Config(bottom_hidden=(5,), hidden=(4,), out_dim=3)
    tower = randomised(DotInteractionTower(config, dense.shape[1], (D,) * F))
    assert isinstance(tower, DotInteractionTower)
    expected = []
    for dense_N, emb_E in zip(dense, emb, strict=True):
        vectors, parts = fields_of(emb_E), []
        if tower.bottom is not None:
            bottom = relu_layers(tower.bottom, dense_N)
            vectors, parts = [bottom, *vectors], [bottom]
        pairs = [vectors[i].dot(vectors[j]) for i in range(len(vectors)) for j in range(i)]
        vector = torch.cat([*parts, torch.stack(pairs)])
        zeros = torch.zeros(-len(vector) % 8, dtype=torch.float64)
        expected.append(relu_layers(tower.top, torch.cat([vector, zeros])))
    check(tower, (dense, emb), expected)


def test_gradient_of_dot_products_is_that_of_autograd() -> None:
    tower = DotInteractionTower(DotInteractionTower.Config(hidden=(5,), out_dim=3), 0, [4] * 6).double()
    emb = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, again = emb.clone().requires_grad_(), emb.clone().requires_grad_()
    tower(torch.empty(7, 0, dtype=torch.float64), first).square().sum().backward()
    fields = again.view(7, 6, 4)
    dots = torch.einsum("bid,bjd->bij", fields, fields)[:, *torch.tril_indices(6, 6, -1)]
    zeros = dots.new_zeros(7, tower.zero_columns)
    tower.top(torch.cat((dots, zeros), dim=1)).square().sum().backward()
    torch.testing.assert_close(first.grad, again.grad, rtol=1e-12, atol=1e-12)  # rounding of sums in another order


@pytest.mark.parametrize("rank", [None, 2])
def test_dcn_v2(rows: tuple[Tensor, Tensor], rank: int | None) -> None:
    config = DCNv2Tower.Config(num_layers=3, rank=rank, out_dim=3)
    tower = randomised(DCNv2Tower(config, N, (D,) * F))
    assert isinstance(tower, DCNv2Tower)
    expected = []
    for row in zip(*rows, strict=True):
        x0 = x = torch.cat(row)
        for cross in tower.crosses:
            if rank is None:
                product = affine(cross, x)
            else:
                v, u = cross.get_submodule("0"), cross.get_submodule("1")
                assert isinstance(v, nn.Linear)
                assert isinstance(u, nn.Linear)
                product = (u.weight @ v.weight) @ x + u.bias
            x = x0 * product + x
        expected.append(affine(tower.projection, x))
    check(tower, rows, expected)


def test_masknet(rows: tuple[Tensor, Tensor]) -> None:
    config = MaskNetTower.Config(mask_hidden=5, hidden=(6, 4), out_dim=3)
    tower = randomised(MaskNetTower(config, N, (D,) * F))
    assert isinstance(tower, MaskNetTower)
    hidden_linear, hidden_norm, _ = tower.block
    assert isinstance(hidden_norm, nn.LayerNorm)
    expected = []
    for dense_N, emb_E in zip(*rows, strict=True):
        aggregated = affine(tower.mask[0], torch.cat((dense_N, emb_E))).clamp_min(0)
        mask = affine(tower.mask[2], aggregated)
        normed_fields = [
            normed(field, tower.norm_scale[f], tower.norm_shift[f]) for f, field in enumerate(fields_of(emb_E))
        ]
        hidden = affine(hidden_linear, mask * torch.cat(normed_fields))
        block = normed(hidden, hidden_norm.weight, hidden_norm.bias).clamp_min(0)
        expected.append(relu_layers(tower.mlp, block))
    check(tower, rows, expected)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_autoint(rows: tuple[Tensor, Tensor], num_layers: int) -> None:
    heads, head_dim = 2, 3
    config = AutoIntTower.Config(num_layers=num_layers, num_heads=heads, head_dim=head_dim, out_dim=3)
    tower = randomised(AutoIntTower(config, N, (D,) * F))
    assert isinstance(tower, AutoIntTower)
    expected = []
    for dense_N, emb_E in zip(*rows, strict=True):
        fields = fields_of(emb_E)
        for layer in tower.layers:
            merged = layer.get_submodule("query_key_value_residual")
            assert isinstance(merged, nn.Linear)
            query, key, value, residual = merged.weight.chunk(4)
            fields = [
                (interacted(fields, m, query, key, value, heads) + residual @ fields[m]).clamp_min(0)
                for m in range(len(fields))
            ]
        expected.append(affine(tower.projection, torch.cat([*fields, dense_N])))
    check(tower, rows, expected)


def interacted(fields: list[Tensor], m: int, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """AutoInt, equations 5 to 7: field m after one layer, all heads side by side."""
    results = []
    for query_h, key_h, value_h in zip(query.chunk(heads), key.chunk(heads), value.chunk(heads), strict=True):
        scores = torch.stack([(query_h @ fields[m]).dot(key_h @ other) for other in fields])
        alpha = scores.exp() / scores.exp().sum()
        terms = [alpha[k] * (value_h @ other) for k, other in enumerate(fields)]
        results.append(torch.stack(terms).sum(dim=0))
    return torch.cat(results)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_transformer(rows: tuple[Tensor, Tensor], heads: int, causal: bool, fused: bool) -> None:
    config = TransformerTower.Config(dim=N, heads=heads, feed_forward=3, causal=causal, fused=fused)
    tower = randomised(TransformerTower(config, N, (N,) * 6))
    assert isinstance(tower, TransformerTower)
    tokens = [list(torch.cat(row).split(N)) for row in zip(*rows, strict=True)]
    check(tower, rows, [torch.cat(transformed(tower, row, heads, causal=causal)) for row in tokens])


def transformed(tower: TransformerTower, tokens: list[Tensor], heads: int, *, causal: bool) -> list[Tensor]:
    """Xiong et al., figure 1(b); scaled dot-product attention of Vaswani et al., equation 1."""
    norm, second_norm = tower.attention_norm, tower.feed_forward_norm
    first, _, second = tower.feed_forward
    merged = [affine(tower.query_key_value, normed(x, norm.weight, norm.bias)).chunk(3) for x in tokens]
    results = []
    for at, x in enumerate(tokens):
        seen = merged[: at + 1] if causal else merged
        attended = []
        for h in range(heads):
            query = merged[at][0].chunk(heads)[h]
            keys, values = ([token[part].chunk(heads)[h] for token in seen] for part in (1, 2))
            scores = torch.stack([query.dot(key) / len(query) ** 0.5 for key in keys])
            alpha = scores.exp() / scores.exp().sum()
            attended.append(torch.stack([a * value for a, value in zip(alpha, values, strict=True)]).sum(dim=0))
        hidden = x + affine(tower.attention_output, torch.cat(attended))
        inner = affine(first, normed(hidden, second_norm.weight, second_norm.bias))
        results.append(hidden + affine(second, 0.5 * inner * (1 + torch.erf(inner / 2**0.5))))
    return results


def pairwise_products(emb: Tensor) -> Tensor:
    fields = fields_of(emb)
    products = [fields[i] * fields[j] for i in range(F) for j in range(i)]
    return torch.stack(products).sum(dim=0)


def test_fm(rows: tuple[Tensor, Tensor]) -> None:
    tower = randomised(FMTower(FMTower.Config(out_dim=3), N, (D,) * F))
    assert isinstance(tower, FMTower)
    check(
        tower,
        rows,
        [
            affine(tower.projection, torch.cat((pairwise_products(emb_E), emb_E, dense_N)))
            for dense_N, emb_E in zip(*rows, strict=True)
        ],
    )


def test_deepfm(rows: tuple[Tensor, Tensor]) -> None:
    tower = randomised(DeepFMTower(DeepFMTower.Config(hidden=(5, 4), out_dim=3), N, (D,) * F))
    assert isinstance(tower, DeepFMTower)
    expected = []
    for dense_N, emb_E in zip(*rows, strict=True):
        first_order = torch.cat((dense_N, emb_E))
        deep = relu_layers(tower.deep, first_order)
        expected.append(affine(tower.projection, torch.cat((pairwise_products(emb_E), first_order, deep))))
    check(tower, rows, expected)


def test_cin(rows: tuple[Tensor, Tensor]) -> None:
    tower = randomised(CINTower(CINTower.Config(layer_sizes=(3, 2), out_dim=3), N, (D,) * F))
    assert isinstance(tower, CINTower)
    expected = []
    for dense_N, emb_E in zip(*rows, strict=True):
        x0 = x = fields_of(emb_E)
        pooled = []
        for compress in tower.compress:
            assert isinstance(compress, nn.Linear)
            weight = compress.weight.reshape(compress.out_features, len(x), F)
            x = [
                torch.stack([weight_h[i, j] * x[i] * x0[j] for i in range(len(x)) for j in range(F)]).sum(dim=0)
                for weight_h in weight
            ]
            pooled += [feature_map.sum() for feature_map in x]
        expected.append(affine(tower.projection, torch.cat((torch.stack(pooled), dense_N))))
    check(tower, rows, expected)


def test_bilinear(rows: tuple[Tensor, Tensor]) -> None:
    heads = 2
    config = BilinearTower.Config(hidden1=(5, 4), hidden2=(5, 6), num_heads=heads, out_dim=3)
    tower = randomised(BilinearTower(config, N, (D,) * F))
    assert isinstance(tower, BilinearTower)
    expected = []
    for row in zip(*rows, strict=True):
        x = torch.cat(row)
        first = relu_layers(tower.stream1, x * 2 / (1 + torch.exp(-tower.gate1)))
        second = relu_layers(tower.stream2, x * 2 / (1 + torch.exp(-tower.gate2)))
        fused = affine(tower.linear1, first) + affine(tower.linear2, second)
        products = [
            sum(first.chunk(heads)[k] @ tower.fusion[k, :, output, :] @ second.chunk(heads)[k] for k in range(heads))
            for output in range(3)
        ]
        expected.append(fused + torch.stack([torch.as_tensor(product) for product in products]))
    check(tower, rows, expected)
