"""Adam for layers beside another optimizer for tables, for peers that take one optimizer of PyTorch."""

from __future__ import annotations

import torch
from rows import Setting
from torch import nn

KINDS = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}


class Both:
    """Two optimizers that step together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts

    def zero_grad(self) -> None:
        """Of all parameters."""
        for part in self._parts:
            part.zero_grad()

    def step(self) -> None:
        """Of all parameters."""
        for part in self._parts:
            part.step()


def optimizer_of(model: nn.Module, setting: Setting) -> Both:
    """For every parameter of ``model``; its tables are its ``nn.Embedding``."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    layers = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    kind = KINDS[setting.table_optimizer]
    return Both(torch.optim.Adam(layers, lr=setting.dense_lr), kind(tables, lr=setting.table_lr))
