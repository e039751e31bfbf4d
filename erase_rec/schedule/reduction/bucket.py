"""Ordered flat buckets: one gradient buffer a block, averaged by the main thread at fixed points of the program."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from erase_rec.distributed.world import Pending, World
from erase_rec.schedule.plan import OVER_ARCH
from erase_rec.schedule.reduction.reduction import Blocks, NoReduction

MIB = 1024**2


class BucketReduction(NoReduction):
    """Gradients by ``torch.autograd.grad``, copied into flat buffers that are reduced as a whole.

    A tower has one buffer. The over-arch's is cut into chunks of whole parameters, so that its reduction is under way
    while the next chunk is copied. The buffers live as long as the reduction; ``gradient`` returns views of them, valid
    until the next step.
    """

    def __init__(self, blocks: Blocks, world: World, *, chunk_mib: float) -> None:
        """Makes the buffers, on the parameters' device.

        Args:
            blocks: trained parameters.
            world: the ranks.
            chunk_mib: size at which the over-arch's gradients are cut.
        """
        super().__init__(blocks)
        self._world = world
        self._chunks = {
            block: _chunks(parameters, chunk_mib * MIB if block == OVER_ARCH else float("inf"))
            for block, parameters in blocks.items()
        }
        self._views = {
            block: {name: view for _, views in chunks for name, view in views.items()}
            for block, chunks in self._chunks.items()
        }
        self._pending: dict[str, list[Pending]] = {}

    def start(self, block: str) -> None:
        """Copies the gradients into the buffers and starts their means; logged as ``block.chunk``."""
        held = self._gradients[block]
        pending = []
        for number, (flat, views) in enumerate(self._chunks[block]):
            if len(held) < len(self._views[block]):
                flat.zero_()  # parameters that no loss reaches
            present = [name for name in views if name in held]
            torch._foreach_copy_([views[name] for name in present], [held[name] for name in present])
            pending.append(self._world.mean(f"{block}.{number}", flat))
        self._pending[block] = pending

    def wait(self, block: str) -> None:
        """See :class:`~erase_rec.schedule.reduction.reduction.Reduction`."""
        for pending in self._pending.pop(block, []):
            pending.wait()

    def gradient(self, block: str, name: str) -> Tensor | None:
        """A view of the buffer."""
        return self._views[block][name] if name in self._gradients[block] else None


def _chunks(parameters: Mapping[str, Tensor], limit_bytes: float) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Flat buffers with the views of the parameters that they hold, in order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, parameter in parameters.items():
        if groups[-1] and filled + parameter.nbytes > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += parameter.nbytes
    return [_flat({name: parameters[name] for name in group}) for group in groups if group]


def _flat(parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    first = next(iter(parameters.values()))
    flat = torch.zeros(
        sum(parameter.numel() for parameter in parameters.values()), dtype=first.dtype, device=first.device
    )
    views: dict[str, Tensor] = {}
    start = 0
    for name, parameter in parameters.items():
        views[name] = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat, views
