"""The ranks' random generators as tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from erase_rec.distributed.world import World

PREFIX = "rng/"


class RandomState:
    """State of the generators that training draws from: ``rng/cpu``, and ``rng/cuda`` on CUDA.

    One rank's is a vector of bytes; with several, whose draws differ, there is a row a rank.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        """For training on ``device`` over the ranks of ``world``."""
        self._world = world
        self._device = device

    def tensors(self) -> dict[str, Tensor]:
        """The present state of all ranks. Collective."""
        own = rng_state(self._device)
        if self._world.size == 1:
            return {f"{PREFIX}{name}": state for name, state in own.items()}
        return {f"{PREFIX}{name}": torch.stack(self._world.gather("rng", state)) for name, state in own.items()}

    def empty(self, ranks: int) -> dict[str, Tensor]:
        """Room for the state of a checkpoint of ``ranks`` ranks."""
        return {
            f"{PREFIX}{name}": torch.empty_like(state) if ranks == 1 else state.new_empty((ranks, *state.shape))
            for name, state in rng_state(self._device).items()
        }

    def restore(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        """Takes over a checkpoint's state; one of another number of ranks fits none, and leaves the generators."""
        if ranks != self._world.size:
            return
        own = {name: tensors[f"{PREFIX}{name}"] for name in rng_state(self._device)}
        if ranks > 1:
            own = {name: state[self._world.rank].clone() for name, state in own.items()}
        restore_rng(own, self._device)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's generators that training on ``device`` draws from: ``cpu``, and ``cuda`` there; uint8 each."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Takes over what :func:`rng_state` gave for ``device``."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
