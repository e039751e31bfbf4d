"""Local heads against their equations, and what they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from schedule_cases import DENSE, make_batch, make_config, make_model, tower
from torch import Tensor

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.load import load_config
from erase_rec.errors import ConfigError
from models.heads import GOODNESS_EPS, GoodnessHead, MLPHead
from models.registry import HEADS, component

OUT, CONTEXT = 5, 7
EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""float64: only the order of a matrix product's sums differs."""


def make(kind: str, **params: Any) -> Any:
    torch.manual_seed(5)
    cls = component("head", kind)
    return cls(cls.Config(**params), OUT, CONTEXT).double()


def inputs(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, OUT, generator=generator, dtype=torch.float64),
        torch.randn(rows, CONTEXT, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_a_head_gives_a_logit_a_row(kind: str, rows: int) -> None:
    assert make(kind)(*inputs(rows)).shape == (rows,)


@pytest.mark.parametrize("kind", HEADS)
def test_the_logit_of_a_bf16_head_is_float32(kind: str) -> None:
    head, (output, context) = make(kind), inputs()
    expected = head(output, context)
    found = head.bfloat16()(output.bfloat16(), context.bfloat16())
    assert found.dtype == torch.float32
    assert head.passed_on(output.bfloat16()).dtype == torch.bfloat16
    # bf16 keeps 8 bits.
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("context", [False, True])
def test_the_mlp_head_equals_its_equation(context: bool) -> None:
    head = make("mlp", hidden=(4, 3), context=context)
    output, shared = inputs()
    for row in range(6):
        x = torch.cat((output[row], shared[row])) if context else output[row]
        for at in (0, 2):
            layer = head.mlp.layers[at]
            x = (layer.weight @ x + layer.bias).clamp(min=0)
        expected = (head.last.linear.weight @ x + head.last.linear.bias)[0]
        torch.testing.assert_close(head(output, shared)[row], expected, **EXACT)


def test_goodness_is_the_mean_square_over_the_threshold_and_is_not_passed_on() -> None:
    head, (output, _) = make("goodness", threshold=0.5), inputs()
    for row, logit, passed in zip(output.tolist(), head(output), head.passed_on(output), strict=True):
        goodness = sum(value**2 for value in row) / OUT
        assert logit.item() == pytest.approx(goodness - 0.5, rel=1e-12)
        assert passed.square().mean().item() == pytest.approx(goodness / (goodness + GOODNESS_EPS), rel=1e-12)
        torch.testing.assert_close(passed / passed.norm(), torch.tensor(row).double() / torch.tensor(row).norm())
    assert list(head.parameters()) == []
    assert torch.isfinite(head.passed_on(torch.zeros(2, OUT))).all()


def test_other_heads_pass_the_output_on() -> None:
    output, _ = inputs()
    assert all(make(kind).passed_on(output) is output for kind in HEADS if kind != "goodness")


def test_the_context_is_the_fields_mean_and_the_dense_features_and_gets_no_gradient() -> None:
    """Whatever the tower itself reads; its own inputs still get theirs."""
    section = tower("deep", head={"kind": "mlp", "params": {"hidden": (4,), "context": True}})
    section["inputs"] = {"dense": ["x"], "sparse": ["b"]}
    model, batch = make_model(make_config([section])), make_batch()
    block = model.tower("deep")
    pooled = model.embeddings(batch.sparse).detach().requires_grad_()
    output, logit = block(batch.dense, pooled)
    mean = (pooled[:, :4] + pooled[:, 4:8] + pooled[:, 8:]) / 3
    torch.testing.assert_close(logit, block.head(output, torch.cat((mean, batch.dense), dim=1)), **EXACT)
    assert block.head.context_dim == 4 + len(DENSE)
    (gradient,) = torch.autograd.grad(logit.sum(), pooled)
    assert gradient[:, 4:8].abs().sum() > 0
    assert gradient[:, :4].abs().sum() == gradient[:, 8:].abs().sum() == 0


@pytest.mark.parametrize("dense", [(), ("x",)])
def test_a_context_without_tables_or_without_dense_features(dense: tuple[str, ...]) -> None:
    section = tower("cross", head={"kind": "mlp", "params": {"context": True}})
    config = make_config([section], features={"dense": dense})
    model, batch = make_model(config), make_batch()
    _, logit = model.tower("cross")(batch.dense[:, : len(dense)], model.embeddings(batch.sparse))
    assert logit.shape == (batch.size,)
    assert model.tower("cross").head.context_dim == 4 + len(dense)


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog())
    return str(error.value).splitlines()


def test_a_context_of_fields_of_several_dims_is_refused_with_the_way_out() -> None:
    change = ["towers.cross.head={kind: mlp, params: {context: true}}", "features.sparse.C3.embedding_dim=8"]
    change += [f"towers.{name}.inputs.sparse=[C1]" for name in ("interaction", "mask", "attention")]
    (message,) = [line for line in refused(*change) if "context" in line]
    assert "towers.cross.head.params.context: the context is a mean" in message
    assert "[8, 16]; give all features one embedding_dim, or use context: false" in message
    load_config("ctr_erase.yaml", [change[0].replace("true", "false"), *change[1:]], catalog=ContentCatalog())


def test_numbers_outside_their_range_are_refused() -> None:
    for params in ({"hidden": ()}, {"hidden": (0,)}, {"width": 3}):
        with pytest.raises(ValidationError):
            MLPHead.Config(**params)
    with pytest.raises(ValidationError):
        GoodnessHead.Config(**{"threshold": "high"})
