"""Builds the arms of ``erase-rec bench`` from engine and content, and runs it batch size by batch size."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data.dataset import Datasets, build_datasets
from erase_rec import environment
from erase_rec.api.assembly import TUNED_BATCHES, Machine, build_parts, join_ranks
from erase_rec.batch import Batch
from erase_rec.bench.arms import PlannedArm
from erase_rec.bench.batches import RandomRows, full, rotated
from erase_rec.bench.floor import COUNTED_ROWS, Ceilings, Counted, NoTables, count, counting_config
from erase_rec.bench.result import Row
from erase_rec.bench.session import BuiltArm, Settings, measure
from erase_rec.bench.torchrec_user import TorchRecTable, build_torchrec_step
from erase_rec.cli.bench import speed_interval
from erase_rec.config.load import find_config
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.prefetch import prefetch
from erase_rec.protocols import Embeddings
from erase_rec.run_folder import RunFolder
from models.ctr_model import build_model

RESIDENT_BATCHES = 8


@dataclass(frozen=True)
class Source:
    """Where batches come from.

    Attributes:
        resident: random rows on the device; else the training loader's.
        zipf: of random ids, see :class:`erase_rec.bench.batches.RandomRows`.
    """

    resident: bool
    zipf: float


@dataclass
class ContentWorkshop:
    """Implements :class:`erase_rec.bench.session.Workshop`.

    Tables are made once for all arms that configure them alike, and kept for all batch sizes: their initial weights
    take the host ten seconds and more, and what a step costs does not depend on what is in them. Everything else
    belongs to one arm.

    Attributes:
        datasets: features and table sizes, and the training loader.
        rows: of the resident batches; every rank's are others.
        machine: where arms compute.
        world: the ranks.
        source: of batches.
    """

    datasets: Datasets
    rows: RandomRows
    machine: Machine
    world: World
    source: Source
    _tables: dict[str, Embeddings] = field(default_factory=dict)
    _counted: dict[str, Counted] = field(default_factory=dict)
    _resident: tuple[int, list[Batch]] = (0, [])

    def build(self, planned: PlannedArm) -> BuiltArm:
        """See :class:`erase_rec.bench.session.Workshop`."""
        config = _config(planned)
        self._refuse(config, planned)
        if planned.arm.step == "torchrec":
            return self._torchrec(config)
        key = _tables_key(config)
        held = self._tables.get(key)
        first = list(itertools.islice(self.batches(planned.batch), TUNED_BATCHES)) if config.schedule.autotune else []
        parts = build_parts(
            config, self.datasets, RunFolder(Path()), self.machine, self.world, embeddings=held, tune_on=first
        )
        tables = self._tables.setdefault(key, parts.model.embeddings)
        spread = self.world.grouped and config.embedding.sharding != "replicated"
        expect = tables.expect if spread else None
        return BuiltArm(parts.step, parts, _table_bytes(tables), tables_shared=held is not None, expect=expect)

    def counted(self, planned: PlannedArm) -> Counted:
        """See :class:`erase_rec.bench.session.Workshop`; does not depend on the batch size."""
        name = planned.arm.name
        if name not in self._counted:
            config = counting_config(_config(planned))
            tables = NoTables(feature_dims(config))
            machine = Machine(torch.device("cpu"), torch.float32)
            parts = build_parts(config, self.datasets, RunFolder(Path()), machine, World(), embeddings=tables)
            (batch,) = self.rows.batches(COUNTED_ROWS, 1, torch.device("cpu"))
            self._counted[name] = count(parts.step, parts.model, tables, batch)
        return self._counted[name]

    def batches(self, size: int) -> Iterator[Batch]:
        """See :class:`erase_rec.bench.session.Workshop`; the loader's batches have its configuration's size."""
        if not self.source.resident:
            return full(prefetch(self.datasets.train.batches(0, endless=True), self.machine.device), size)
        if self._resident[0] != size:
            self._resident = size, self.rows.batches(size, RESIDENT_BATCHES, self.machine.device)
        return rotated(self._resident[1])

    def _refuse(self, config: Config, planned: PlannedArm) -> None:
        if self.machine.device.type != "cuda":
            if config.schedule.cuda_graph != "none":
                raise UserError(f"schedule.cuda_graph: {config.schedule.cuda_graph}: the CPU has no CUDA graphs")
            if config.model.compile:
                raise UserError("model.compile: compiled for CUDA only")
        if planned.arm.step == "torchrec" and self.world.size > 1:
            raise UserError("arm torchrec: its tables are those of one rank; start the benchmark without torchrun")

    def _torchrec(self, config: Config) -> BuiltArm:
        plain = config.model_copy(update={"model": config.model.model_copy(update={"kernels": "plain"})})
        dims = feature_dims(config)
        model = build_model(plain, NoTables(dims), self.machine.device)
        tables = {
            feature.name: TorchRecTable(self.datasets.table_rows[feature.name], dim, feature.pooling)
            for feature, dim in zip(config.features.sparse, dims, strict=True)
        }
        step = build_torchrec_step(config, model, tables, self.machine.device)
        rowwise = config.optimizer.sparse.kind == "rowwise_adagrad"
        num_bytes = sum(4 * table.rows * (table.dim + rowwise) for table in tables.values())
        return BuiltArm(step, model, num_bytes, tables_shared=False)


def run_bench(
    name: str,
    overrides: Sequence[str],
    planned: Sequence[PlannedArm],
    source: Source,
    *,
    repeats: int,
    steps: int,
    warmup: int,
    keep: Callable[[Sequence[Row], Mapping[str, Any]], None],
) -> list[Row]:
    """Runs every planned arm.

    Args:
        name: of the configuration.
        overrides: of it.
        planned: the arms.
        source: of batches.
        repeats: turns of each arm.
        steps: of a turn.
        warmup: steps of each arm before.
        keep: is given the rows so far and what they are results of, after each batch size, on the first rank.

    Returns:
        All rows; none on ranks other than the first.

    Raises:
        UserError: no arm could be planned, or the data are not as they must be.
    """
    first = next((each.config for each in planned if each.config is not None), None)
    if first is None:
        reasons = "; ".join(dict.fromkeys(f"{each.arm.name}: {each.refusal}" for each in planned))
        raise UserError(f"bench: no arm goes with this configuration: {reasons}")
    rows: list[Row] = []
    with join_ranks(first) as (world, machine):
        datasets = _datasets(first, world, machine)
        random = RandomRows.of(first, datasets.table_rows, exponent=source.zipf, seed=first.seed + world.rank)
        workshop = ContentWorkshop(datasets, random, machine, world, source)
        ceilings = Ceilings.measure(machine.device, machine.dtype)
        settings = Settings(
            find_config(name).stem,
            machine.device,
            repeats,
            steps,
            warmup,
            ceilings,
            feature_dims(first),
            speed_interval,
        )
        about = _about(machine) | {
            "config": name,
            "overrides": list(overrides),
            "batches": {"resident": source.resident, "zipf": source.zipf, "count": RESIDENT_BATCHES},
            "repeats": repeats,
            "steps": steps,
            "ceilings": asdict(ceilings),
        }
        for size in dict.fromkeys(each.batch for each in planned):
            here = [each for each in planned if each.batch == size]
            config = next((each.config for each in here if each.config is not None), None)
            if config is not None and not source.resident:
                workshop.datasets = _datasets(config, world, machine)  # a loader has one batch size
            rows += measure(here, workshop, world, settings)
            if world.is_first:
                keep(rows, about)
        return rows if world.is_first else []


def feature_dims(config: Config) -> list[int]:
    """Embedding dimension of each sparse feature."""
    return [feature.embedding_dim or config.embedding.dim for feature in config.features.sparse]


def _datasets(config: Config, world: World, machine: Machine) -> Datasets:
    return build_datasets(config, rank=world.rank, world_size=world.size, pin=machine.pins)


def _config(planned: PlannedArm) -> Config:
    assert planned.config is not None
    return planned.config


def _tables_key(config: Config) -> str:
    """Equal for configurations whose tables are alike."""
    sections = {"features", "embedding", "model", "seed"}
    plain = config.model_dump(mode="json", include=sections)
    return json.dumps([plain, config.optimizer.sparse.model_dump(mode="json"), config.train.precision], sort_keys=True)


def _table_bytes(embeddings: Embeddings) -> int:
    states = [tensor for entries in embeddings.optimizer_state().values() for tensor in entries.values()]
    return sum(tensor.nbytes for tensor in (*embeddings.tables().values(), *states))


def _about(machine: Machine) -> dict[str, Any]:
    described = environment.describe()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": machine.name(),
        "driver": _driver(),
        "commit": described["git_commit"],
        "environment": described,
    }


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Version of NVIDIA's kernel driver; None where there is none."""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text(encoding="utf-8")) if path.is_file() else None
    return None if found is None else found[0]
