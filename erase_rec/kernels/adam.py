"""A block of the dense optimizer that the flat Adam kernel updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.dense_block import Block, clip_factor
from erase_rec.flat_weights import FlatWeights
from erase_rec.kernels.adam_triton import SLOTS, AdamLaunch, corrections


class AdamBlock(Block):
    """``adam`` and ``adamw`` over float32 masters on CUDA; gradients are read where they are."""

    def __init__(self, config: DenseOptimizerConfig, weights: FlatWeights, lr: Tensor) -> None:
        """See :class:`~erase_rec.dense_block.Block`."""
        super().__init__(config, weights, lr)
        self._launches: dict[tuple[int, ...], AdamLaunch] = {}
        self._corrections = torch.zeros(len(self._names), 2, dtype=torch.float64, device=weights.master.device)
        self._renew_corrections()

    def refresh(self) -> None:
        """See :meth:`erase_rec.dense_block.Block.refresh`."""
        super().refresh()
        self._renew_corrections()

    def _renew_corrections(self) -> None:
        following = [corrections(self._config, count + 1) for count in self._steps.tolist()]  # host synchronisation
        self._corrections.copy_(torch.tensor(following, dtype=torch.float64))

    def _update(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        found = {number: gradient.contiguous() for number, gradient in enumerate(gradients) if gradient is not None}
        factor = None
        if max_norm is not None:
            norms = torch._foreach_norm([*found.values()], 2, dtype=torch.float32)
            factor = clip_factor(torch.linalg.vector_norm(torch.stack(norms)), max_norm)
        together: dict[tuple[int, torch.dtype], list[int]] = {}
        for number, gradient in found.items():
            together.setdefault((self._groups[number], gradient.dtype), []).append(number)
        weights = self.weights
        for numbers in together.values():
            for start in range(0, len(numbers), SLOTS):
                chosen = numbers[start : start + SLOTS]
                self._launch(chosen)(
                    [found[number] for number in chosen],
                    master=weights.master,
                    exp_avg=self._state["exp_avg"],
                    exp_avg_sq=self._state["exp_avg_sq"],
                    compute=weights.compute,
                    lr=self._lr,
                    factor=factor,
                    steps=self._steps,
                    corrections=self._corrections,
                )

    def _launch(self, numbers: Sequence[int]) -> AdamLaunch:
        key = tuple(numbers)
        if key not in self._launches:
            assert not torch.cuda.is_current_stream_capturing(), "a first step of these parameters comes uncaptured"
            places = [*self.weights.layout.places.values()]
            self._launches[key] = AdamLaunch(
                self._config, [places[number] for number in numbers], numbers, self.weights.master.device
            )
        return self._launches[key]
