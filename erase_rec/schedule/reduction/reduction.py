"""The interface of reductions, and the one that reduces nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn

Blocks = Mapping[str, Mapping[str, nn.Parameter]]
"""Trained parameters by block (a tower's name, ``over_arch``) and parameter name."""
Tensors = dict[str, Tensor]
Result = TypeVar("Result")
Differentiate = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor | None]]
"""(loss, inputs) -> the loss's gradient for each input, None where it does not reach; without hooks."""


class Reduction(Protocol):
    """Holds one step's gradients of the dense parameters.

    The program calls ``begin``, then ``forward`` around everything up to the last over-arch, in it ``call`` around each
    block's forward and ``differentiate`` for each backward; ``start`` and ``wait`` where the plan puts them.
    ``differentiate`` may run on a worker, everything else runs on the main thread.
    """

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        ...

    def forward(self, run: Callable[[], Tensors]) -> Tensors:
        """Runs ``run``, which returns the losses of the last micro-batch's aggregate backward; returns them too."""
        ...

    def call(self, block: str, run: Callable[[], Result], *, last: bool) -> Result:
        """Runs a block's forward; ``last``: of the last micro-batch."""
        ...

    def differentiate(
        self, loss: Tensor, leaves: Sequence[Tensor], blocks: Sequence[str], *, grad: Differentiate, last: bool
    ) -> list[Tensor | None]:
        """Adds the gradient of ``loss`` for the parameters of ``blocks``; called on the stream that owns the result.

        Args:
            loss: scalar.
            leaves: further tensors to differentiate for.
            blocks: one or more of the blocks.
            grad: takes gradients, for reductions that need no hooks.
            last: this is the aggregate backward of the last micro-batch, after the forward.

        Returns:
            Gradients of ``leaves``; None for one that ``loss`` does not reach.
        """
        ...

    def start(self, block: str) -> None:
        """Starts the mean of a block's gradients over the ranks; its gradients are ready on the current stream."""
        ...

    def wait(self, block: str) -> None:
        """Lets the current stream (gloo: the host) wait for the mean of a block's gradients."""
        ...

    def gradient(self, block: str, name: str) -> Tensor | None:
        """Gradient of a parameter: the mean over the ranks after ``wait``; None where no loss reaches."""
        ...


class NoReduction:
    """One process: gradients by ``torch.autograd.grad``, without hooks and without accumulators."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._gradients: dict[str, dict[str, Tensor]] = {block: {} for block in blocks}

    def begin(self) -> None:
        """Forgets all."""
        for gradients in self._gradients.values():
            gradients.clear()

    def forward(self, run: Callable[[], Tensors]) -> Tensors:
        """Runs it."""
        return run()

    def call(self, block: str, run: Callable[[], Result], *, last: bool) -> Result:
        """Runs it."""
        return run()

    def differentiate(
        self, loss: Tensor, leaves: Sequence[Tensor], blocks: Sequence[str], *, grad: Differentiate, last: bool
    ) -> list[Tensor | None]:
        """See :class:`Reduction`."""
        parameters = [parameter for block in blocks for parameter in self._blocks[block].values()]
        found = grad(loss, [*leaves, *parameters])
        gradients = iter(found[len(leaves) :])
        for block in blocks:
            self._add(block, {name: next(gradients) for name in self._blocks[block]})
        return list(found[: len(leaves)])

    def _add(self, block: str, found: Mapping[str, Tensor | None]) -> None:
        """Takes over a micro-batch's gradients of a block."""
        held = self._gradients[block]
        for name, gradient in found.items():
            if gradient is not None:
                held[name] = held[name] + gradient if name in held else gradient

    def start(self, block: str) -> None:
        """Nothing to reduce."""

    def wait(self, block: str) -> None:
        """Nothing to wait for."""

    def gradient(self, block: str, name: str) -> Tensor | None:
        """The sum over the micro-batches."""
        return self._gradients[block].get(name)
