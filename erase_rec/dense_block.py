"""A block of the dense optimizer: flat weights and state, and their update in PyTorch's operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from erase_rec import dense_arithmetic
from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.flat_layout import ALIGNMENT
from erase_rec.flat_weights import FlatWeights

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_'s."""


class Block(ABC):
    """The buffers of a block.

    Attributes:
        weights: its parameters.
    """

    def __init__(self, config: DenseOptimizerConfig, weights: FlatWeights, lr: Tensor) -> None:
        """Starts with zero state.

        Args:
            config: of the optimizer.
            weights: what is updated.
            lr: float64 scalar on the device, read at each step.
        """
        self.weights = weights
        self._config = config
        self._lr = lr
        self._names = [*weights.layout.places]
        master = weights.master
        self._state = {entry: torch.zeros_like(master) for entry in dense_arithmetic.state_entries(config)}
        self._steps = torch.zeros(len(self._names), dtype=torch.float32, device=master.device)
        # Numbers of groups of parameters whose step counts are known to be equal without reading the device.
        self._groups = [0] * len(self._names)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        """Updates the parameters that have a gradient; see :meth:`erase_rec.dense_optimizer.DenseOptimizer.step`."""
        # A group that is updated in part falls apart.
        keys = [(group, gradient is not None) for group, gradient in zip(self._groups, gradients, strict=True)]
        number = {key: position for position, key in enumerate(dict.fromkeys(keys))}
        self._groups = [number[key] for key in keys]
        if any(gradient is not None for gradient in gradients):
            self._update(gradients, max_norm)

    @abstractmethod
    def _update(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        """Clips and updates; parameters with a gradient and of one group have equal step counts."""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Views by ``<parameter>/<entry>``."""
        for entry, flat in self._state.items():
            for name, view in self.weights.layout.views(flat).items():
                yield f"{name}/{entry}", view
        if dense_arithmetic.counts_steps(self._config):
            yield from ((f"{name}/step", count) for name, count in zip(self._names, self._steps, strict=True))

    def refresh(self) -> None:
        """Takes over what was written into masters and state. Synchronises the host."""
        self.weights.refresh()
        self._groups = [int(count) for count in self._steps.tolist()]  # host synchronisation


@dataclass(frozen=True)
class _Run:
    """Neighbours in a block that have gradients and equal step counts."""

    parameters: slice
    elements: slice
    gradient: Tensor


class PlainBlock(Block):
    """Updates runs of neighbours as slices of the flat buffers."""

    def __init__(self, config: DenseOptimizerConfig, weights: FlatWeights, lr: Tensor) -> None:
        """See :class:`Block`."""
        super().__init__(config, weights, lr)
        self._gathered: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def _update(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        runs = [*self._runs(gradients)]
        factor = None if max_norm is None else clip_factor(_norm([run.gradient for run in runs]), max_norm)
        for run in runs:
            self._update_run(run, factor)

    def _runs(self, gradients: Sequence[Tensor | None]) -> Iterator[_Run]:
        keys = [(group, gradient is not None) for group, gradient in zip(self._groups, gradients, strict=True)]
        start = 0
        for stop in range(1, len(keys) + 1):
            if stop < len(keys) and keys[stop] == keys[start]:
                continue
            if keys[start][1]:
                found = {self._names[at]: value for at in range(start, stop) if (value := gradients[at]) is not None}
                elements = self.weights.layout.span([*found])
                yield _Run(slice(start, stop), elements, self._flat_gradient(found, elements))
            start = stop

    def _flat_gradient(self, gradients: Mapping[str, Tensor], elements: slice) -> Tensor:
        """The gradients of neighbours as one tensor in the layout, zero in its gaps."""
        layout, values = self.weights.layout, [*gradients.values()]
        if layout.lies_flat(gradients):
            return values[0].as_strided((elements.stop - elements.start,), (1,))
        dtypes = {value.dtype for value in values}
        dtype = values[0].dtype if len(dtypes) == 1 else self.weights.master.dtype
        if dtype not in self._gathered:
            flat = torch.zeros_like(self.weights.master, dtype=dtype)
            self._gathered[dtype] = flat, flat.new_zeros(ALIGNMENT)
        flat, zeros = self._gathered[dtype]
        if len(dtypes) > 1:
            views = layout.views(flat)
            torch._foreach_copy_([views[name] for name in gradients], values)
            return flat[elements]
        parts: list[Tensor] = []
        gap = 0
        for name, value in gradients.items():
            parts += [zeros[:gap], value.reshape(-1)] if gap else [value.reshape(-1)]
            gap = layout.places[name].gap
        return torch.cat(parts, out=flat[elements])

    def _update_run(self, run: _Run, factor: Tensor | None) -> None:
        step = None
        if dense_arithmetic.counts_steps(self._config):
            step = self._steps[run.parameters].add_(1)[0].double()
        gradient = run.gradient.to(self.weights.master.dtype)
        state = {entry: flat[run.elements] for entry, flat in self._state.items()}
        dense_arithmetic.update(
            self._config,
            self.weights.master[run.elements],
            state,
            gradient if factor is None else gradient * factor,
            lr=self._lr,
            step=step,
        )
        self.weights.refresh(run.elements)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of that norm are multiplied by, at most 1, so that it is at most ``max_norm``; on the device."""
    return (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Over all, in float32 at least."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm
