"""Reads what a plan takes into the tensors of a model, whole or spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from erase_rec.checkpoint.reading import read_into
from erase_rec.checkpoint.record import stored_layout, verify
from erase_rec.distributed.shards import Held, Shard, Shards
from erase_rec.distributed.world import World
from erase_rec.warm_start.plan import Taken

ROOM_BYTES = 256 * 2**20
"""Of tables that are read at once to be sorted: an index is read for each such batch."""


@torch.no_grad()
def fill(path: Path, into: Mapping[str, Held], taken: Mapping[str, Taken], world: World) -> None:
    """Reads, in place, what is ``taken`` of the checkpoint at ``path``; all else in ``into`` stays as it is.

    A table whose rows go by key is read as a whole, as far as this rank holds its columns: that takes host memory for
    the largest of them, or for some small ones.

    Args:
        path: a checkpoint.
        into: tensors of the model, or a rank's parts of them, by name.
        taken: of which of them, see :func:`erase_rec.warm_start.plan.warm_plan`.
        world: ranks that fill together; collective.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    verify(path, world)
    shapes = {name: shape for name, (shape, _) in stored_layout(path).items()}
    direct: dict[str, Held] = {}
    by_key: list[_ByKey] = []
    for name, entry in taken.items():
        held, shape = into[name], shapes[entry.stored]
        if entry.rows is None or entry.rows.source is None:
            direct[entry.stored] = _common(_parts(held), shape, held.dtype)
        else:
            by_key.append(_ByKey(entry.stored, _parts(held), entry.rows.source, shape))
    read_into(path, direct)
    for batch in _batches(by_key):
        wholes = {table.stored: table.room() for table in batch}
        read_into(path, wholes)
        for table in batch:
            table.scatter(wholes[table.stored])


def _parts(held: Held) -> tuple[Shard, ...]:
    return held.parts if isinstance(held, Shards) else (Shard((0,) * held.dim(), held.detach()),)


def _common(parts: tuple[Shard, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Shards:
    """The rows of ``parts`` that a tensor of ``shape`` has, too."""
    cut = [
        Shard(part.offsets, part.tensor[: max(shape[0] - part.offsets[0], 0)] if shape else part.tensor)
        for part in parts
    ]
    return Shards(shape, dtype, cut)


@dataclass(frozen=True)
class _ByKey:
    """A table, or a state of its rows, whose rows go by key.

    Attributes:
        stored: its name in the checkpoint.
        parts: what this rank holds of it.
        source: the row there of each row of the whole, -1: none.
        shape: of the one there.
    """

    stored: str
    parts: tuple[Shard, ...]
    source: Tensor
    shape: tuple[int, ...]

    def room(self) -> Shards:
        """Memory for all rows that are there, of the columns that this rank holds."""
        found: dict[tuple[int, ...], Shard] = {}
        for part in self.parts:
            columns = part.offsets[1:]
            rows = torch.empty((self.shape[0], *part.tensor.shape[1:]), dtype=part.tensor.dtype)
            found.setdefault(columns, Shard((0, *columns), rows))
        dtype = self.parts[0].tensor.dtype if self.parts else torch.float32
        return Shards(self.shape, dtype, list(found.values()))

    def nbytes(self) -> int:
        """Of :meth:`room`, at most."""
        return sum(self.shape[0] * part.tensor[:1].nbytes for part in self.parts)

    def scatter(self, room: Shards) -> None:
        """Gives each row its own."""
        rows = {part.offsets[1:]: part.tensor for part in room.parts}
        for part in self.parts:
            source = self.source[part.offsets[0] : part.offsets[0] + part.tensor.shape[0]]
            here = torch.nonzero(source >= 0).flatten()
            device = part.tensor.device
            part.tensor.index_copy_(0, here.to(device), rows[part.offsets[1:]][source[here]].to(device))


def _batches(tables: Iterable[_ByKey]) -> Iterator[list[_ByKey]]:
    """Tables that are read together: at most :data:`ROOM_BYTES`, or one."""
    batch: list[_ByKey] = []
    for table in tables:
        if batch and sum(other.nbytes() for other in batch) + table.nbytes() > ROOM_BYTES:
            yield batch
            batch = []
        batch.append(table)
    if batch:
        yield batch
