"""Local losses against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from erase_rec.config.schema import LossConfig
from models.local_losses import BCELoss, FocalLoss, build_local_loss
from models.registry import LOCAL_LOSSES


@pytest.fixture
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logit = 3 * torch.randn(50, generator=generator, dtype=torch.float64)
    return logit, (torch.rand(50, generator=generator) < 0.3).double()


def probability_of_label(logit: float, label: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return p if label == 1 else 1 - p


def test_bce_is_the_mean_negative_log_likelihood(rows: tuple[Tensor, Tensor]) -> None:
    pairs = zip(*(x.tolist() for x in rows), strict=True)
    expected = sum(-math.log(probability_of_label(*pair)) for pair in pairs) / 50
    assert build_local_loss(LossConfig(kind="bce"))(*rows).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("gamma", "alpha"), [(0.0, None), (0.5, None), (2.0, None), (2.0, 0.25)])
def test_focal_is_the_weighted_mean_of_equation_5(
    rows: tuple[Tensor, Tensor], gamma: float, alpha: float | None
) -> None:
    total = 0.0
    for logit, label in zip(*(x.tolist() for x in rows), strict=True):
        p_t = probability_of_label(logit, label)
        alpha_t = 1.0 if alpha is None else (alpha if label == 1 else 1 - alpha)
        total += -alpha_t * (1 - p_t) ** gamma * math.log(p_t)
    params = {"gamma": gamma} if alpha is None else {"gamma": gamma, "alpha": alpha}
    loss = build_local_loss(LossConfig(kind="focal", params=params))
    assert loss(*rows).item() == pytest.approx(total / 50, rel=1e-12)


def test_focal_gradient_equals_finite_differences(rows: tuple[Tensor, Tensor]) -> None:
    loss = build_local_loss(LossConfig(kind="focal", params={"gamma": 1.5, "alpha": 0.25}))
    logit, label = rows
    assert torch.autograd.gradcheck(lambda x: loss(x, label), (logit.requires_grad_(),))


@pytest.mark.parametrize("shifts", [1, 3, 60])
def test_pairwise_adds_the_mean_over_pairs_of_different_labels(rows: tuple[Tensor, Tensor], shifts: int) -> None:
    """Also with more shifts than rows, which come round to the same pairs again."""
    logit, label = rows
    terms = []
    for shift in range(1, shifts + 1):
        for row in range(50):
            difference = logit[row].item() - logit[(row - shift) % 50].item()
            order = label[row].item() - label[(row - shift) % 50].item()
            terms += [math.log1p(math.exp(-order * difference))] if order else []
    loss = build_local_loss(LossConfig(kind="bce_pairwise", params={"weight": 0.25, "shifts": shifts}))
    expected = build_local_loss(LossConfig())(logit, label).item() + 0.25 * sum(terms) / len(terms)
    assert loss(logit, label).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: loss(x, label), (logit.clone().requires_grad_(),))


def test_without_a_pair_pairwise_is_the_cross_entropy(rows: tuple[Tensor, Tensor]) -> None:
    loss, plain = (build_local_loss(LossConfig(kind=kind)) for kind in ("bce_pairwise", "bce"))
    assert torch.equal(loss(rows[0], torch.ones(50)), plain(rows[0], torch.ones(50)))
    assert torch.equal(loss(rows[0][:1], torch.ones(1)), plain(rows[0][:1], torch.ones(1)))


@pytest.mark.parametrize("kind", LOCAL_LOSSES)
@pytest.mark.parametrize("params", [{}, {"gamma": 0.1}, {"gamma": 0}])
def test_saturated_logits_give_finite_losses_and_gradients(kind: str, params: dict[str, float]) -> None:
    loss = build_local_loss(LossConfig(kind=kind, params=params if kind == "focal" else {}))
    logit = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], requires_grad=True)
    for label in (torch.zeros(5), torch.ones(5)):
        value = loss(logit, label)
        (gradient,) = torch.autograd.grad(value, logit)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", LOCAL_LOSSES)
def test_half_precision_logits_are_computed_in_float32(kind: str, rows: tuple[Tensor, Tensor]) -> None:
    loss = build_local_loss(LossConfig(kind=kind))
    logit, label = rows[0].bfloat16(), rows[1].float()
    value = loss(logit, label)
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert torch.equal(value, loss(logit.float(), label))


@pytest.mark.parametrize("kind", LOCAL_LOSSES)
def test_float64_logits_take_float32_labels(kind: str, rows: tuple[Tensor, Tensor]) -> None:
    loss = build_local_loss(LossConfig(kind=kind))
    assert loss(rows[0], rows[1].float()).dtype == torch.float64
    assert torch.equal(loss(rows[0], rows[1].float()), loss(*rows))


def test_numbers_outside_their_range_are_refused() -> None:
    for params in ({"gamma": -1}, {"alpha": 1}, {"alpha": 0}, {"beta": 1}):
        with pytest.raises(ValidationError):
            FocalLoss.Config(**params)
    with pytest.raises(ValidationError):
        BCELoss.Config(**{"gamma": 2})
