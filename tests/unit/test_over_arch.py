"""The over-arch: what it reads and what reaches its logit."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from erase_rec.config.schema import OverArchConfig
from models.over_arch import OverArch

DIMS = (3, 5)
FORMS = get_args(OverArchConfig.model_fields["logits"].annotation)


def make(**params: object) -> OverArch:
    torch.manual_seed(4)
    return OverArch(OverArchConfig(**{"hidden": (6, 4), **params}), DIMS)


def inputs(batch: int = 4, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(batch)
    outputs = [torch.randn(batch, dim, generator=generator, dtype=dtype) for dim in DIMS]
    return outputs, [torch.randn(batch, generator=generator, dtype=dtype) for _ in DIMS]


@pytest.mark.parametrize("logits", FORMS)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("hidden", [(), (6, 4)])
def test_logit_is_a_vector_of_rows(logits: str, batch: int, hidden: tuple[int, ...]) -> None:
    assert make(logits=logits, hidden=hidden)(*inputs(batch)).shape == (batch,)


def test_without_logits_they_do_not_matter() -> None:
    over_arch, (outputs, logits) = make(), inputs()
    assert torch.equal(over_arch(outputs, logits), over_arch(outputs, [2 * logit for logit in logits]))


def test_logits_as_inputs_follow_the_outputs_and_zeros_align_the_width() -> None:
    over_arch, (outputs, logits) = make(logits="inputs").double(), inputs(dtype=torch.float64)
    x = torch.cat([*outputs, *(logit[:, None] for logit in logits), torch.zeros(4, 6, dtype=torch.float64)], dim=1)
    for index in (0, 2):
        layer = over_arch.mlp.layers[index]
        x = (x @ layer.weight.T + layer.bias).relu()
    expected = (x @ over_arch.head.linear.weight.T + over_arch.head.linear.bias)[:, 0]
    torch.testing.assert_close(over_arch(outputs, logits), expected, rtol=1e-12, atol=1e-12)


def test_additive_logits_are_summed_onto_the_logit() -> None:
    outputs, logits = inputs(dtype=torch.float64)
    plain, additive = make().double(), make(logits="additive").double()
    expected = plain(outputs, logits) + logits[0] + logits[1]
    torch.testing.assert_close(additive(outputs, logits), expected, rtol=1e-12, atol=1e-12)


def test_gates_start_as_additive_and_are_one_factor_a_row_and_tower() -> None:
    outputs, logits = inputs(dtype=torch.float64)
    gated, additive = make(logits="gated").double(), make(logits="additive").double()
    gated.load_state_dict(additive.state_dict(), strict=False)
    torch.testing.assert_close(gated(outputs, logits), additive(outputs, logits), rtol=1e-12, atol=1e-12)
    assert gated.gate is not None
    torch.nn.init.normal_(gated.gate.weight)
    torch.nn.init.normal_(gated.gate.bias)
    hidden = gated.mlp(torch.cat(outputs, dim=1))
    plain = (hidden @ gated.head.linear.weight.T + gated.head.linear.bias)[:, 0]
    gates = 2 / (1 + torch.exp(-(hidden @ gated.gate.weight.T + gated.gate.bias)))
    terms = [gates[:, 0] * logits[0], gates[:, 1] * logits[1]]
    torch.testing.assert_close(gated(outputs, logits), plain + terms[0] + terms[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gated.terms(outputs, logits), torch.stack(terms), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("logits", ["none", "inputs"])
def test_logits_that_are_not_added_are_no_terms(logits: str) -> None:
    assert make(logits=logits).terms(*inputs()) is None


@pytest.mark.parametrize("logits", FORMS)
def test_the_logit_of_a_bf16_over_arch_is_float32(logits: str) -> None:
    over_arch, (outputs, tower_logits) = make(logits=logits), inputs()
    expected = over_arch(outputs, tower_logits)
    found = over_arch.bfloat16()([output.bfloat16() for output in outputs], tower_logits)
    assert found.dtype == torch.float32
    # bf16 keeps 8 bits.
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_dropout_acts_in_training_only() -> None:
    over_arch, batch = make(dropout=0.5, hidden=(64,)), inputs(32)
    torch.manual_seed(1)
    assert not torch.equal(over_arch.train()(*batch), over_arch.eval()(*batch))
    assert torch.equal(over_arch(*batch), over_arch(*batch))
