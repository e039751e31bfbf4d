"""Ordered flat buckets: one gradient buffer a block, averaged by the main thread at fixed points of the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from erase_rec.distributed.world import Pending, World
from erase_rec.flat_layout import FlatLayout
from erase_rec.schedule.plan import OVER_ARCH
from erase_rec.schedule.reduction.reduction import Blocks, NoReduction

MIB = 1024**2


class BucketReduction(NoReduction):
    """Gradients by ``torch.autograd.grad``, copied into flat buffers that are reduced as a whole.

    They are parts of one buffer in the order of the blocks, float32 at least, laid out as
    :class:`erase_rec.dense_optimizer.DenseOptimizer` lays its weights out, which reads it as it is. A tower has one
    part. The over-arch's is cut into chunks of whole parameters, so that its reduction is under way while the next
    chunk is copied. The buffer lives as long as the reduction; ``gradient`` returns views of it, valid until the next
    step.
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
        parameters = {name: value for named in blocks.values() for name, value in named.items()}
        layout = FlatLayout.of(parameters)
        self._flat = _zeros(layout, parameters.values())
        self._views = layout.views(self._flat)
        self._chunks = {
            block: [
                (self._flat[layout.span(names)], names)
                for names in _chunks(
                    named, chunk_mib * MIB if block == OVER_ARCH else float("inf"), self._flat.itemsize
                )
            ]
            for block, named in blocks.items()
        }
        self._pending: dict[str, list[Pending]] = {}

    def sizes_bytes(self) -> dict[str, tuple[int, ...]]:
        """Of each block's parts, which are averaged one by one."""
        return {block: tuple(flat.nbytes for flat, _ in chunks) for block, chunks in self._chunks.items()}

    def start(self, block: str) -> None:
        """Copies the gradients into the buffers and starts their means; logged as ``block.chunk``."""
        held = self._gradients[block]
        pending = []
        for number, (flat, names) in enumerate(self._chunks[block]):
            present = [name for name in names if name in held]
            if len(present) < len(names):
                flat.zero_()  # parameters that no loss reaches
            if present:
                torch._foreach_copy_([self._views[name] for name in present], [held[name] for name in present])
            pending.append(self._world.mean(f"{block}.{number}", flat))
        self._pending[block] = pending

    def wait(self, block: str) -> None:
        """See :class:`~erase_rec.schedule.reduction.reduction.Reduction`."""
        for pending in self._pending.pop(block, []):
            pending.wait()

    def gradient(self, block: str, name: str) -> Tensor | None:
        """A view of the buffer."""
        return self._views[name] if name in self._gradients[block] else None


def _zeros(layout: FlatLayout, parameters: Iterable[Tensor]) -> Tensor:
    """A buffer on the parameters' device, float32 at least: sums over ranks are not rounded to bf16."""
    values = [*parameters]
    dtype = reduce(torch.promote_types, (value.dtype for value in values), torch.float32)
    return torch.zeros(layout.size, dtype=dtype, device=values[0].device)


def _chunks(parameters: Mapping[str, Tensor], limit_bytes: float, itemsize: int) -> list[list[str]]:
    """The parameters' names, cut where a chunk would pass the limit."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, parameter in parameters.items():
        nbytes = parameter.numel() * itemsize
        if groups[-1] and filled + nbytes > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    return [group for group in groups if group]
