"""Optimizers of the dense parameters (towers, heads, over-arch) on flat buffers, and their float32 weights.

A block, which is what is clipped and updated together, has one flat buffer of master weights (float32; float64 in
exactness tests), one of the weights that the model computes with, and one a state entry. Where the model computes in
the masters' precision the first two are one. Parameters are views of them from here on: their addresses never change,
so that CUDA graphs can read and write them. On CUDA ``adam`` and ``adamw`` are one kernel launch a block; everything
else is :mod:`erase_rec.dense_arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from erase_rec import dense_arithmetic
from erase_rec.config.schema import DenseOptimizerConfig
from erase_rec.flat_layout import ALIGNMENT, FlatLayout
from erase_rec.kernels import triton_applies

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_'s."""


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
            block: _Block(config, FlatWeights(named, dtype, in_float32), self._lr)
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


@dataclass(frozen=True)
class _Run:
    """Neighbours in a block that have gradients and equal step counts."""

    parameters: slice
    elements: slice
    gradient: Tensor


class _Block:
    """The buffers of a block and its update."""

    def __init__(self, config: DenseOptimizerConfig, weights: FlatWeights, lr: Tensor) -> None:
        self.weights = weights
        self._config = config
        self._lr = lr
        self._names = [*weights.layout.places]
        master = weights.master
        self._state = {entry: torch.zeros_like(master) for entry in dense_arithmetic.state_entries(config)}
        self._steps = torch.zeros(len(self._names), dtype=torch.float32, device=master.device)
        # Numbers of groups of parameters whose step counts are known to be equal without reading the device.
        self._groups = [0] * len(self._names)
        self._gathered: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        self._ticket = torch.zeros((), dtype=torch.int32, device=master.device)
        fused = config.kind in {"adam", "adamw"} and master.dtype == torch.float32 and triton_applies(master)
        self._update: Callable[[_Run, Tensor | None], None] = self._update_fused if fused else self._update_plainly

    def step(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> None:
        """See :meth:`DenseOptimizer.step`."""
        runs = [*self._runs(gradients)]
        factor = None if max_norm is None or not runs else _clip_factor([run.gradient for run in runs], max_norm)
        for run in runs:
            self._update(run, factor)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Views by ``<parameter>/<entry>``."""
        for entry, flat in self._state.items():
            for name, view in self.weights.layout.views(flat).items():
                yield f"{name}/{entry}", view
        if dense_arithmetic.counts_steps(self._config):
            yield from ((f"{name}/step", count) for name, count in zip(self._names, self._steps, strict=True))

    def refresh(self) -> None:
        """Casts the masters and groups the parameters by their step counts."""
        self.weights.refresh()
        self._groups = [int(count) for count in self._steps.tolist()]  # host synchronisation

    def _runs(self, gradients: Sequence[Tensor | None]) -> Iterator[_Run]:
        present = [gradient is not None for gradient in gradients]
        # A group that is updated in part falls apart.
        keys = [*zip(self._groups, present, strict=True)]
        number = {key: position for position, key in enumerate(dict.fromkeys(keys))}
        self._groups = [number[key] for key in keys]
        start = 0
        for stop in range(1, len(keys) + 1):
            if stop < len(keys) and keys[stop] == keys[start]:
                continue
            if present[start]:
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

    def _update_plainly(self, run: _Run, factor: Tensor | None) -> None:
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

    def _update_fused(self, run: _Run, factor: Tensor | None) -> None:
        from erase_rec.kernels.adam_triton import adam_step

        weights = self.weights
        casts = weights.compute is not weights.master
        master = weights.master[run.elements]
        adam_step(
            self._config,
            master=master,
            exp_avg=self._state["exp_avg"][run.elements],
            exp_avg_sq=self._state["exp_avg_sq"][run.elements],
            compute=weights.compute[run.elements] if casts else master,
            gradient=run.gradient,
            lr=self._lr,
            factor=factor,
            steps=self._steps[run.parameters],
            ticket=self._ticket,
        )


def _clip_factor(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """What gradients are multiplied by, at most 1, so that their norm is at most ``max_norm``; float32 at least."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)
