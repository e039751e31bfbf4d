"""What a run says before its first step."""

from __future__ import annotations

from data.dataset import Datasets
from erase_rec.api.assembly import Machine
from erase_rec.api.base_rate import base_rate_said
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from models.embeddings.build import choose_backend


def introduction(config: Config, datasets: Datasets, folder: RunFolder, machine: Machine, world: World) -> list[str]:
    """What is about to run, a line each."""
    backend, reason = choose_backend(config, machine.device)
    held_out = 0 if datasets.eval is None else datasets.eval.num_rows
    detached = [tower.name for tower in config.towers if tower.detach]
    auxiliary = [tower.name for tower in config.towers if tower.loss and tower.loss.weight > 0 and not tower.detach]
    lines = [
        f"run folder {folder.path}",
        f"{datasets.train.num_rows:,} training rows (base rate {datasets.train.base_rate:.4f}), {held_out:,} held out; "
        f"data fingerprint {datasets.fingerprint[:12]}",
        f"rows are {datasets.origin}",
        f"{len(config.towers)} towers, {len(detached)} detached; preset {config.schedule.preset}; {machine.name()}; "
        f"embeddings by {backend} ({reason})",
    ]
    if datasets.eval is not None:
        lines.append(base_rate_said(config))
    if world.size > 1:
        lines.append(
            f"{world.size} ranks; a step is {datasets.train.global_batch_size:,} rows, "
            f"{config.train.local_batch_size:,} a rank"
        )
    elif config.embedding.sharding != "replicated":
        lines.append(f"embedding.sharding: {config.embedding.sharding}: one rank holds whole tables")
    if config.schedule.cuda_graph != "none" and machine.device.type != "cuda":
        lines.append("schedule.cuda_graph: the CPU has no CUDA graphs; every operation is launched by itself")
    if auxiliary:
        lines.append(f"local losses of towers that are not detached act as auxiliary losses: {', '.join(auxiliary)}")
    lines += datasets.remarks()
    return lines
