"""Local heads against their equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.heads import GOODNESS_EPS, GoodnessHead
from models.registry import HEADS, component

OUT = 5


def make(kind: str, **params: Any) -> Any:
    torch.manual_seed(5)
    cls = component("head", kind)
    return cls(cls.Config(**params), OUT).double()


def outputs(rows: int = 6) -> Tensor:
    return torch.randn(rows, OUT, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_a_head_gives_a_logit_a_row(kind: str, rows: int) -> None:
    assert make(kind)(outputs(rows)).shape == (rows,)


@pytest.mark.parametrize("kind", HEADS)
def test_the_logit_of_a_bf16_head_is_float32(kind: str) -> None:
    head, output = make(kind), outputs()
    expected = head(output)
    found = head.bfloat16()(output.bfloat16())
    assert found.dtype == torch.float32
    assert head.passed_on(output.bfloat16()).dtype == torch.bfloat16
    # bf16 keeps 8 bits.
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


def test_goodness_is_the_mean_square_over_the_threshold_and_is_not_passed_on() -> None:
    head, output = make("goodness", threshold=0.5), outputs()
    for row, logit, passed in zip(output.tolist(), head(output), head.passed_on(output), strict=True):
        goodness = sum(value**2 for value in row) / OUT
        assert logit.item() == pytest.approx(goodness - 0.5, rel=1e-12)
        assert passed.square().mean().item() == pytest.approx(goodness / (goodness + GOODNESS_EPS), rel=1e-12)
        torch.testing.assert_close(passed / passed.norm(), torch.tensor(row).double() / torch.tensor(row).norm())
    assert list(head.parameters()) == []
    assert torch.isfinite(head.passed_on(torch.zeros(2, OUT))).all()


def test_other_heads_pass_the_output_on() -> None:
    output = outputs()
    assert all(make(kind).passed_on(output) is output for kind in HEADS if kind != "goodness")


def test_numbers_outside_their_range_are_refused() -> None:
    for params in ({"threshold": "high"}, {"width": 3}):
        with pytest.raises(ValidationError):
            GoodnessHead.Config(**params)
