"""Which run a job goes on with whose ranks torchrun has started again."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path

from data.dataset import Datasets
from erase_rec.api.assembly import ContentCatalog
from erase_rec.config import schema
from erase_rec.config.load import dump_config, load_config
from erase_rec.distributed.launch import Job
from erase_rec.distributed.world import World
from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder

JOB = "job"
"""Entry of ``environment.json``: what torchrun calls the job that made the run."""


def begun_run(config: schema.Config, world: World) -> Path | None:
    """The folder that an earlier start of this job made for its run, on the first rank; None elsewhere; collective.

    torchrun starts ranks again after a failure, and counts that; or because their number has changed, and does not.
    The job is known by its ``--rdzv-id``, also where the launcher itself is started again; without one, that torchrun
    counts a restart has to do.

    Raises:
        UserError: a restart could not find its run, or the one of this name has another configuration.
    """
    job = Job.read()
    restarts = world.gather_objects("restarts", job.restarts)
    if not world.is_first:
        return None
    if config.run.name is None:
        if job.may_restart:
            raise UserError(
                "run.name: ranks that torchrun --max-restarts starts again find their run by its name: set "
                "run.name=NAME, or leave --max-restarts out"
            )
        return None
    folder = RunFolder(Path(config.run.dir).expanduser() / config.run.name)
    if not isfile(folder.config):
        return None
    # A job that found the name taken is restarted, too: it must not go on with what another one has made.
    if not (any(restarts) if job.id is None else job.id == folder.read_environment().get(JOB)):
        return None
    there = load_config(folder.config, (), catalog=ContentCatalog()).config
    if dump_config(there) != dump_config(config):
        raise UserError(
            f"run.name: {folder.path} was made by this job with another configuration: go on with it by "
            f"--resume {folder.path}, choose another run.name or remove it"
        )
    return folder.path


def job_entry() -> dict[str, str]:
    """What ``environment.json`` says of the job."""
    name = Job.read().id
    return {} if name is None else {JOB: name}


def same_data(datasets: Datasets, world: World) -> None:
    """Collective.

    Raises:
        UserError: a rank reads other rows than the first.
    """
    found = world.gather_objects("data_fingerprint", datasets.fingerprint)
    others = [str(rank) for rank, fingerprint in enumerate(found) if fingerprint != found[0]]
    if others:
        raise UserError(
            f"data.train, data.eval: rank {', '.join(others)} reads other rows than rank 0 (fingerprint "
            f"{found[int(others[0])][:12]}, rank 0 has {found[0][:12]}): give every rank the same files"
        )
