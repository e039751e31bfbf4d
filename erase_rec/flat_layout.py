"""Where named tensors lie in one flat buffer: what optimizers update and reductions average as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 8
"""Elements: every tensor starts at a multiple, which is 16 bytes in bf16, as vector loads and matrix products want."""


@dataclass(frozen=True)
class Place:
    """A tensor's place: elements ``start`` up to ``end``, then ``gap`` up to the next tensor."""

    shape: torch.Size
    start: int
    end: int
    gap: int


class FlatLayout:
    """Tensors in a given order with gaps for alignment between them; what is in the gaps is kept at zero.

    Layouts of consecutive parts are the parts of the layout of the whole.

    Attributes:
        places: by name, in order.
        size: elements of the buffer.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        """Lays out tensors of ``shapes``."""
        self.places: dict[str, Place] = {}
        start = 0
        for name, shape in shapes.items():
            end = start + prod(shape)
            self.places[name] = place = Place(shape, start, end, -end % ALIGNMENT)
            start = end + place.gap
        self.size = start

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FlatLayout:
        """The layout of ``tensors``."""
        return cls({name: tensor.shape for name, tensor in tensors.items()})

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor as a view of ``flat`` [size]."""
        return {name: flat[place.start : place.end].view(place.shape) for name, place in self.places.items()}

    def span(self, names: Sequence[str]) -> slice:
        """The elements of neighbours, from the first's start to the last's end."""
        return slice(self.places[names[0]].start, self.places[names[-1]].end)

    def lies_flat(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether ``tensors``, neighbours by name, lie in one buffer as this layout says; reads addresses only."""
        name, first = next(iter(tensors.items()))
        base = first.storage_offset() - self.places[name].start
        return all(
            tensor.dtype == first.dtype
            and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.storage_offset() == base + self.places[name].start
            and tensor.is_contiguous()
            for name, tensor in tensors.items()
        )
