"""Replicas must be equal bit for bit: compares the ranks' parameters, and what they asked of the process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from erase_rec.distributed.collective_log import first_difference
from erase_rec.distributed.shards import Shards
from erase_rec.distributed.world import World
from erase_rec.protocols import CTRModel, OverArch, TowerBlock

CHUNK = 2**20
"""Elements hashed at a time; bounds the temporaries to 16 MiB."""

_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15, odd, as a signed number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DivergenceError(RuntimeError):
    """Ranks that should be equal are not."""


class ReplicaGuard:
    """Compares the replicas of a model at the start, every ``check_every`` steps and at the end."""

    def __init__(
        self, world: World, model: CTRModel, check_every: int, masters: Mapping[str, Tensor] | None = None
    ) -> None:
        """Compares nothing yet.

        Args:
            world: the ranks.
            model: this rank's replica.
            check_every: steps between two comparisons.
            masters: weights in full precision by the names of ``model.dense_state()``, compared in place of those.
        """
        self._world = world
        self._model = model
        self._check_every = check_every
        self._masters = masters or {}

    def is_due(self, step: int) -> bool:
        """Whether several replicas are to be compared after ``step`` steps."""
        return self._world.size > 1 and step % self._check_every == 0

    def check(self, step: int) -> None:
        """Compares the ranks after ``step`` steps. Synchronises the host and runs collectives.

        Raises:
            DivergenceError: names the blocks (a tower, the over-arch, a table) and which ranks agree, or the first
                collective that the ranks asked for differently.
        """
        tail, digest = self._world.collectives.tail(), self._world.collectives.digest()
        if len(set(self._world.gather_objects("replicas.log", digest))) > 1:
            tails = dict(enumerate(self._world.gather_objects("replicas.tail", tail)))
            counts = ", ".join(f"rank {rank} for {tail.count}" for rank, tail in tails.items())
            where = first_difference(tails) or f"the ranks asked for different collectives: {counts} in all"
            raise DivergenceError(f"step {step}: {where}")
        blocks = blocks_of(self._model, self._masters)
        own = torch.stack([bit_hash(tensors) for tensors in blocks.values()])
        hashes_RB = torch.stack(self._world.gather("replicas.hash", own)).tolist()
        problems = [
            f"{block} ({_parted(hashes_R)})"
            for block, hashes_R in zip(blocks, zip(*hashes_RB, strict=True), strict=True)
            if len(set(hashes_R)) > 1
        ]
        if problems:
            raise DivergenceError(
                f"step {step}: the ranks' parameters differ: {', '.join(problems)}; their gradients were not averaged "
                "over the ranks, or the ranks started from different parameters"
            )


class RunningStatistics:
    """Running statistics (batch norm): each rank sees rows of its own, and all keep the mean over the ranks.

    Averaged after every step, so that they depend neither on when replicas are compared, evaluated and saved, nor on
    where a run was resumed. Those of a frozen tower stay as they are.
    """

    def __init__(self, world: World, model: CTRModel) -> None:
        """Finds them in ``model``, which is in training mode."""
        self._world = world
        blocks: list[TowerBlock | OverArch] = [*map(model.tower, model.tower_names()), model.over_arch]
        trained = [module for block in blocks for module in _modules(block) if module.training]
        self._held = [
            value for module in trained for value in module.buffers(recurse=False) if value.is_floating_point()
        ]

    def average(self) -> None:
        """Collective where the model has such statistics, and nothing otherwise."""
        if not self._held or self._world.size == 1:
            return
        flat = torch.cat([value.flatten() for value in self._held])
        self._world.mean("statistics", flat).wait()
        means = torch.split(flat, [value.numel() for value in self._held])
        torch._foreach_copy_(self._held, [mean.view_as(value) for mean, value in zip(means, self._held, strict=True)])


def _modules(block: TowerBlock | OverArch) -> list[nn.Module]:
    assert isinstance(block, nn.Module)
    return list(block.modules())


def blocks_of(model: CTRModel, masters: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Tensors of each tower, of the over-arch and of each whole table, by the name that messages use."""
    state = model.dense_state() | dict(masters)
    blocks = {
        f"tower {name}": [value for key, value in state.items() if key.startswith(f"towers.{name}.")]
        for name in model.tower_names()
    }
    blocks["over-arch"] = [value for key, value in state.items() if key.startswith("over_arch.")]
    # Of a table that is spread over the ranks there is one copy.
    whole = {name: weight for name, weight in model.embeddings.tables().items() if not isinstance(weight, Shards)}
    return blocks | {f"table {name}": [weight] for name, weight in whole.items()}


def bit_hash(tensors: Sequence[Tensor]) -> Tensor:
    """Hash of the bits of ``tensors`` and their order, int64 scalar on their device; sums wrap.

    An element is weighted by an odd number that its position gives: one changed element always changes the hash.
    """
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    weights = (torch.arange(CHUNK, device=device) * _MULTIPLIER) | 1
    for tensor in tensors:
        bits = tensor.detach().contiguous().flatten()
        for chunk in torch.split(bits.view(_INTEGERS[tensor.element_size()]), CHUNK):
            total = total * _MULTIPLIER + (chunk * weights[: chunk.numel()]).sum()
    return total


def _parted(hashes: Sequence[int]) -> str:
    """Which ranks agree: ``ranks 0, 2 | rank 1``."""
    ranks: dict[int, list[str]] = {}
    for rank, value in enumerate(hashes):
        ranks.setdefault(value, []).append(str(rank))
    return " | ".join(f"rank{'s' if len(equal) > 1 else ''} {', '.join(equal)}" for equal in ranks.values())
