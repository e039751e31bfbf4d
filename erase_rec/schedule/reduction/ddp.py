"""Reduction by DistributedDataParallel: one for the whole model, as in the paper, or one a block.

DDP's reducer is driven by hooks on the gradient accumulators of its parameters, and ignores them until the forward of
its module has returned. What follows from that (each is held by a test against one process with the whole batch):

- *One DDP, FUP=True.* Early backwards run inside its forward, with hooks: they leave ``.grad`` and the mark that the
  parameter was used. When the main backward starts, the reducer sees that the output does not reach the towers, takes
  their ``.grad`` as it is, and reduces it. A gradient without that mark (``torch.autograd.grad``, a replayed capture)
  would never be reduced, without an error. The accumulators are made on the towers' streams: they stay on the stream
  of their making, and on the main stream every early gradient would make main wait for its tower.
- *One DDP, FUP=False.* The reducer waits for a hook of every parameter, in the main backward. So the final loss
  touches every parameter; early gradients are taken without hooks and found in ``.grad``. The reducer holds aliases of
  the early towers' parameters: with the parameters themselves, accumulators on the main stream would make it wait for
  each early backward, and accumulators on the towers' streams would fill one bucket from several streams at once.
- *One DDP a block.* Each early backward drives its own reducer, whose all-reduces start inside the model's forward.

Gradients of micro-batches before the last add up in ``.grad`` without a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from erase_rec.schedule.plan import MAIN, Plan
from erase_rec.schedule.reduction.reduction import Blocks, Differentiate, Result, Tensors
from erase_rec.schedule.streams import Streams, accumulators_elsewhere


class _Hooked(nn.Module):
    """Parameters whose forward is whatever it is given."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class _TouchAll(torch.autograd.Function):
    """The identity on ``loss`` whose graph reaches every given parameter, with no gradient for them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*gradients, *(None,) * ctx.count)


class _InPlace:
    """What both forms share: gradients live in ``.grad``."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def begin(self) -> None:
        """Drops the gradients of the step before."""
        for parameters in self._blocks.values():
            for parameter in parameters.values():
                parameter.grad = None

    def start(self, block: str) -> None:
        """DDP starts reductions by itself."""
        raise AssertionError("a program with DDP has no reductions of its own")

    def wait(self, block: str) -> None:
        """DDP has waited when its backward returned."""

    def gradient(self, block: str, name: str) -> Tensor | None:
        """As DDP left it."""
        return self._blocks[block][name].grad

    def _parameters(self, blocks: Iterable[str]) -> list[nn.Parameter]:
        return [parameter for block in blocks for parameter in self._blocks[block].values()]

    def _without_hooks(
        self, loss: Tensor, leaves: Sequence[Tensor], blocks: Sequence[str], grad: Differentiate
    ) -> list[Tensor | None]:
        parameters = self._parameters(blocks)
        found = grad(loss, [*leaves, *parameters])
        for parameter, gradient in zip(parameters, found[len(leaves) :], strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return list(found[: len(leaves)])

    def _with_hooks(
        self, loss: Tensor, leaves: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss, inputs=[*leaves, *parameters])
        return [leaf.grad for leaf in leaves]


class DdpReduction(_InPlace):
    """One DDP around the forward of all blocks; needs a process group."""

    def __init__(self, blocks: Blocks, plan: Plan, streams: Streams) -> None:
        """Wraps the parameters; broadcasts them from rank 0.

        Args:
            blocks: trained parameters.
            plan: its FUP, and which towers are early and where.
            streams: where early gradients are accumulated.
        """
        super().__init__(blocks)
        self._fup = plan.find_unused_parameters
        early = [tower for tower in plan.towers if tower.early]
        self._aliases: dict[str, list[nn.Parameter]] = {}
        accumulators = []
        if self._fup:
            for tower in early:
                with streams.current(tower.stream):
                    accumulators += [_accumulator(parameter) for parameter in blocks[tower.name].values()]
        else:
            self._aliases = {tower.name: [_alias(value) for value in blocks[tower.name].values()] for tower in early}
        reduced = [self._aliases.get(block, parameters.values()) for block, parameters in blocks.items()]
        self._reduced = [parameter for of_block in reduced for parameter in of_block]
        with streams.current(MAIN):
            self._ddp = DistributedDataParallel(
                _Hooked(self._reduced), find_unused_parameters=self._fup, static_graph=False
            )
        del accumulators  # DDP holds them from here on

    def forward(self, run: Callable[[], Tensors]) -> Tensors:
        """Inside the wrapped forward."""
        losses: Tensors = self._ddp(run)
        return losses

    def call(self, block: str, run: Callable[[], Result], *, last: bool) -> Result:
        """Runs it."""
        return run()

    def differentiate(
        self, loss: Tensor, leaves: Sequence[Tensor], blocks: Sequence[str], *, grad: Differentiate, last: bool
    ) -> list[Tensor | None]:
        """See :class:`~erase_rec.schedule.reduction.reduction.Reduction`."""
        if not last:
            if self._fup:
                return self._with_hooks(loss, leaves, self._parameters(blocks))
            return self._without_hooks(loss, leaves, blocks, grad)
        # One reducer fills its buckets on the main stream, which has to wait for the aggregate backward's streams.
        with accumulators_elsewhere():
            if self._fup:
                return self._with_hooks(loss, leaves, self._parameters(blocks))
            return self._touching_all(loss, leaves)

    def _touching_all(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        self._for_each_alias(lambda alias, parameter: setattr(alias, "grad", parameter.grad))
        found = self._with_hooks(_touch(loss, self._reduced), leaves, self._reduced)
        self._for_each_alias(lambda alias, parameter: setattr(parameter, "grad", alias.grad))
        return found

    def _for_each_alias(self, action: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        for block, aliases in self._aliases.items():
            for alias, parameter in zip(aliases, self._blocks[block].values(), strict=True):
                action(alias, parameter)


class DdpPerTowerReduction(_InPlace):
    """One DDP a block, each driven by that block's backward; needs a process group."""

    def __init__(self, blocks: Blocks, plan: Plan, streams: Streams) -> None:
        """Wraps each block on its stream; broadcasts the parameters from rank 0."""
        super().__init__(blocks)
        stream_of = {tower.name: tower.stream for tower in plan.towers}
        self._ddp: dict[str, DistributedDataParallel] = {}
        for block, parameters in blocks.items():
            with streams.current(stream_of.get(block, MAIN)):
                self._ddp[block] = DistributedDataParallel(_Hooked(parameters.values()), static_graph=False)

    def forward(self, run: Callable[[], Tensors]) -> Tensors:
        """Runs it."""
        return run()

    def call(self, block: str, run: Callable[[], Result], *, last: bool) -> Result:
        """Inside the block's wrapped forward, which arms its reducer, for the last micro-batch."""
        if not last or block not in self._ddp:
            return run()
        result: Result = self._ddp[block](run)
        return result

    def differentiate(
        self, loss: Tensor, leaves: Sequence[Tensor], blocks: Sequence[str], *, grad: Differentiate, last: bool
    ) -> list[Tensor | None]:
        """See :class:`~erase_rec.schedule.reduction.reduction.Reduction`."""
        parameters = self._parameters(blocks)
        return self._with_hooks(_touch(loss, parameters), leaves, parameters)


def _touch(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    touched: Tensor = _TouchAll.apply(loss, *parameters)  # type: ignore[no-untyped-call]
    return touched


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of its own over the same memory."""
    return nn.Parameter(parameter.detach())


def _accumulator(parameter: nn.Parameter) -> object:
    """The node that accumulates into ``parameter.grad``, made on the current stream; lives while something holds it."""
    view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]
