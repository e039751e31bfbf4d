"""Parameters as views of flat buffers: the weights that are updated, and those that the model computes with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from erase_rec.flat_layout import FlatLayout


class FlatWeights:
    """Parameters as views of flat buffers.

    Attributes:
        layout: where each parameter lies.
        master: [size], the weights that are updated and saved.
        compute: [size], the weights that the model computes with; ``master`` itself where the dtype is the same.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype | None,
        in_master_dtype: Collection[nn.Parameter],
    ) -> None:
        """Takes the values of ``parameters`` over and makes them views.

        Args:
            parameters: one or more, of one dtype, on one device.
            dtype: of computation; None: the parameters' own.
            in_master_dtype: parameters that the model reads in the master's precision all the same.
        """
        first = next(iter(parameters.values()))
        assert all((each.dtype, each.device) == (first.dtype, first.device) for each in parameters.values())
        self.layout = FlatLayout.of(parameters)
        self.master = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        self.compute = self.master if dtype in {None, first.dtype} else torch.zeros_like(self.master, dtype=dtype)
        self.masters = self.layout.views(self.master)
        computed = self.layout.views(self.compute)
        for name, parameter in parameters.items():
            self.masters[name].copy_(parameter.detach())
            parameter.data = self.masters[name] if parameter in in_master_dtype else computed[name]
        self.refresh()

    def refresh(self, span: slice = slice(None)) -> None:
        """Casts the masters of ``span`` to what the model computes with."""
        if self.compute is not self.master:
            self.compute[span].copy_(self.master[span])
