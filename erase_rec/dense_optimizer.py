"""Optimizers of the dense parameters (towers, heads, over-arch) on flat buffers, and their float32 weights.

A block, which is what is clipped and updated together, has one flat buffer of master weights (float32; float64 in
exactness tests), one of the weights that the model computes with, and one a state entry. Where the model computes in
the masters' precision the first two are one. Parameters are views of them from here on: their addresses never change,
so that CUDA graphs can read and write them. On CUDA ``adam`` and ``adamw`` are one kernel launch a block
(:mod:`erase_rec.kernels.adam`); everything else is :mod:`erase_rec.dense_arithmetic`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_block import Block, PlainBlock
from erase_rec.flat_weights import FlatWeights
from erase_rec.kernels import triton_applies


class DenseOptimizer:
    """Updates blocks of named parameters.

    The state is complete from the start, so that a checkpoint can be loaded in place into a new optimizer. It goes by
    parameter, so checkpoints do not depend on the blocks.

    Attributes:
        blocks: parameters by name, by block.
    """

    def __init__(
        self,
        config: DenseOptimizerConfig,
        blocks: Mapping[str, Mapping[str, nn.Parameter]],
        *,
        dtype: torch.dtype | None = None,
        untrained: Mapping[str, nn.Parameter] | None = None,
        in_float32: Collection[nn.Parameter] = (),
    ) -> None:
        """Takes the parameters' values over as masters and makes the parameters views of its buffers.

        To be done before anything else keeps the parameters' memory or asks for their dtype, such as a reduction.

        Args:
            config: kind and hyperparameters.
            blocks: each of at least one parameter, each parameter in one block, all on one device.
            dtype: what the parameters become; None: they keep their own.
            untrained: parameters in no block, which are cast too and keep masters for checkpoints.
            in_float32: parameters that are not cast.
        """
        self.blocks = {block: dict(parameters) for block, parameters in blocks.items()}
        parameters = [parameter for named in self.blocks.values() for parameter in named.values()]
        assert len(parameters) == len(set(parameters)), "a parameter is in two blocks"
        self._lr_value = config.lr
        self._lr = torch.full((), config.lr, dtype=torch.float64, device=parameters[0].device)
        self._updates = {
            block: _make_block(config, FlatWeights(named, dtype, in_float32), self._lr)
            for block, named in self.blocks.items()
        }
        self._untrained = FlatWeights(untrained, dtype, in_float32) if untrained else None

    def set_lr(self, lr: float) -> None:
        """Learning rate of the steps that run after this on the current stream, of every block.

        Written to the device where it changed; the host is not synchronised.
        """
        if lr != self._lr_value:
            self._lr_value = lr
            self._lr.fill_(lr)

    @torch.no_grad()
    def step(self, block: str, gradients: Mapping[str, Tensor | None], max_norm: float | None = None) -> None:
        """Updates ``block`` on the current stream. Can be captured; the host is not synchronised.

        Gradients that lie in one buffer as the block's parameters do (a reduction's) are read there; others are
        gathered first. They are not changed.

        Args:
            block: name.
            gradients: of every parameter of the block, by name; a parameter without one is left alone with its state.
            max_norm: the gradients are scaled so that their L2 norm over the block is at most this.
        """
        self._updates[block].step([gradients[name] for name in self.blocks[block]], max_norm)

    def masters(self) -> dict[str, Tensor]:
        """The weights by parameter name, untrained ones too, in full precision; share storage with the optimizer.

        Whoever writes them calls :meth:`refresh`.
        """
        every = [update.weights for update in self._updates.values()] + ([self._untrained] if self._untrained else [])
        return {name: value for weights in every for name, value in weights.masters.items()}

    def state(self) -> dict[str, Tensor]:
        """State by ``<parameter>/<entry>``, ``step`` among them; shares storage with the optimizer.

        Whoever writes it calls :meth:`refresh`.
        """
        return {key: value for update in self._updates.values() for key, value in update.state()}

    def refresh(self) -> None:
        """Takes over what was written into :meth:`masters` and :meth:`state`. Synchronises the host."""
        for update in self._updates.values():
            update.refresh()
        if self._untrained is not None:
            self._untrained.refresh()


def _make_block(config: DenseOptimizerConfig, weights: FlatWeights, lr: Tensor) -> Block:
    master = weights.master
    if config.kind in {"adam", "adamw"} and master.dtype == torch.float32 and triton_applies(master):
        from erase_rec.kernels.adam import AdamBlock

        return AdamBlock(config, weights, lr)
    return PlainBlock(config, weights, lr)
