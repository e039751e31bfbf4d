"""In what precision a model computes: which parameters stay float32, and the cast of a model that is only scored.

Under ``train.precision: bf16`` towers and over-arch hold bf16 parameters and compute in bf16; there is no autocast. The
float32 weights that training updates and checkpoints hold are :class:`erase_rec.dense_optimizer.DenseOptimizer`'s.
Batch norms keep float32 parameters and statistics: a running mean in bf16 would stop moving. Logits and losses are
float32 by the model's own doing.
"""

from __future__ import annotations

import torch
from torch import nn

from erase_rec.protocols import CTRModel


def batch_norm_parameters(model: CTRModel) -> set[nn.Parameter]:
    """Parameters of towers and over-arch that stay float32."""
    return {
        parameter
        for module in dense_modules(model)
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        for parameter in part.parameters(recurse=False)
    }


def cast_parameters(model: CTRModel, dtype: torch.dtype) -> None:
    """Casts the parameters of towers and over-arch in place, but for batch norms; buffers stay as they are.

    For scoring: a model in training is cast by its optimizer, which keeps the float32 weights.
    """
    kept = batch_norm_parameters(model)
    for module in dense_modules(model):
        for parameter in module.parameters():
            if parameter not in kept:
                parameter.data = parameter.data.to(dtype)


def dense_modules(model: CTRModel) -> list[nn.Module]:
    """Towers in order, then the over-arch."""
    modules = [*map(model.tower, model.tower_names()), model.over_arch]
    assert all(isinstance(module, nn.Module) for module in modules)
    return modules  # type: ignore[return-value]
