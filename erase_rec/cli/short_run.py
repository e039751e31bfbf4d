"""A few training steps of a configuration, without a run folder: what the commands that look into a step share.

Both work under torchrun as well: ``torchrun --nproc-per-node 2 -m erase_rec audit --config ...``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts, join_ranks
from erase_rec.batch import Batch
from erase_rec.config.load import LoadedConfig, load_config
from erase_rec.distributed.world import World
from erase_rec.protocols import LocalLoss
from erase_rec.run_folder import RunFolder
from erase_rec.training_loop import Parts
from models.ctr_model import build_local_losses


@dataclass(frozen=True)
class ShortRun:
    """A model with initial weights and its training batches; nothing is written.

    Attributes:
        loaded: the configuration.
        world: the ranks; one process without torchrun.
        machine: where this rank computes.
        losses: the local losses.
        parts: model and step, among others.
    """

    loaded: LoadedConfig
    world: World
    machine: Machine
    losses: Mapping[str, LocalLoss]
    parts: Parts

    @classmethod
    @contextmanager
    def open(cls, name: str, overrides: Sequence[str]) -> Iterator[Self]:
        """Loads the configuration of that name and its data, and builds the model.

        Raises:
            UserError: the configuration or its data are not as they must be.
        """
        loaded = load_config(name, list(overrides), catalog=ContentCatalog())
        config = loaded.config
        with join_ranks(config) as (world, machine):
            datasets = build_datasets(config, rank=world.rank, world_size=world.size)
            parts = build_parts(config, datasets, RunFolder(Path()), machine, world)
            yield cls(loaded, world, machine, build_local_losses(config), parts)

    def batches(self, count: int) -> Iterator[Batch]:
        """The first ``count`` batches of training on the model's device, from further epochs where one is short."""
        every = self.parts.train_loader.batches(0, endless=True)
        try:
            for batch in itertools.islice(every, count):
                yield batch.to(self.machine.device)
        finally:
            every.close()  # type: ignore[attr-defined]  # stops the loader's threads

    def about(self) -> dict[str, str]:
        """What a result is a result of."""
        about = {
            "config": self.loaded.name,
            "preset": self.loaded.config.schedule.preset,
            "device": self.machine.name(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        return about | ({"ranks": f"{self.world.size} ranks"} if self.world.size > 1 else {})
