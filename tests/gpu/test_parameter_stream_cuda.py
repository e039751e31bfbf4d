"""Gradients of parameters on a stream beside the backward: the same bits as within it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from erase_rec.parameter_stream import CudaParameterStream, beside
from models.heads import LogitHead
from models.towers.masknet import MaskNetTower

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("rows", [7, 1024])
def test_a_towers_gradients_are_the_same_bits(rows: int) -> None:
    torch.manual_seed(rows)
    config = MaskNetTower.Config(mask_hidden=64, hidden=(64, 32), out_dim=32)
    tower = MaskNetTower(config, dense_dim=8, embedding_dims=(16,) * 6).to(DEVICE, torch.bfloat16)
    head = LogitHead(32).to(DEVICE, torch.bfloat16)
    tower.own_kernels = tower.mlp.own_kernels = head.own_kernels = True
    dense = torch.randn(rows, 8, device=DEVICE, dtype=torch.bfloat16)
    pooled = torch.randn(rows, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    leaves = [pooled, *tower.parameters(), *head.parameters()]

    def gradients(stream: CudaParameterStream | None) -> list[Tensor]:
        with beside(stream):
            loss = head(tower(dense, pooled)).square().sum()
        found = torch.autograd.grad(loss, leaves)
        if stream is not None:
            stream.join()
        return [gradient.clone() for gradient in found]

    expected, stream = gradients(None), CudaParameterStream(DEVICE)
    for _ in range(20):
        for one, other in zip(gradients(stream), expected, strict=True):
            assert torch.equal(one, other)
