"""Arms of a benchmark: named ways to train one model, read from YAML (configs/bench/arms.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from erase_rec.config.catalog import Catalog
from erase_rec.config.document import read_document
from erase_rec.config.load import load_config
from erase_rec.config.merge import SHIPPED
from erase_rec.config.schema import Config
from erase_rec.config.types import Model, Params, Text, Texts
from erase_rec.config.validate import validate_params
from erase_rec.errors import ConfigError, UserError, nearest

SHIPPED_ARMS = SHIPPED / "bench" / "arms.yaml"

Family = Literal["exact", "detached", "early"]
"""``exact``: every gradient is kept; ``detached``: outputs are cut, one backward; ``early``: early backward."""


class Arm(Model):
    """One way to train the model of a configuration."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
    about: Text
    """One sentence on what it stands for."""
    step: Literal["erase_rec", "torchrec"] = "erase_rec"
    """``torchrec``: the same towers and over-arch in a program as a TorchRec user writes it."""
    losses: Literal["none", "own", "joint"] | None = None
    """Local losses of all towers: removed, or with this target; ``None``: as the configuration has them."""
    overrides: Texts = ()
    """``key=value`` as on the command line."""


class ArmFile(Params):
    """A file of arms."""

    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]


def read_arms(path: Path = SHIPPED_ARMS) -> tuple[Arm, ...]:
    """All arms of a file, in its order.

    Raises:
        UserError: there is no such file.
        ConfigError: all that is wrong with it.
    """
    if not path.is_file():
        raise UserError(f"file of arms {str(path)!r} not found; the shipped one is {SHIPPED_ARMS}")
    document, problems = read_document(path)
    file, found = validate_params(ArmFile, document.plain(), ())
    problems += [f"{document.place_of(each.path)}: {document.shown(each.path)}: {each.message}" for each in found]
    if problems:
        raise ConfigError(problems)
    assert isinstance(file, ArmFile)
    arms = file.arms
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError([f"{path}: two arms are named {name!r}" for name in twice])
    return arms


def choose_arms(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """The arms of these names, in the order of ``names``; all of them where there are no names.

    Raises:
        ConfigError: names that no arm has, or that are given twice.
    """
    known = {arm.name: arm for arm in arms}
    problems = [
        f"--arms: there is no arm {name!r}{nearest(name, tuple(known))}; there are {', '.join(known)}"
        for name in names
        if name not in known
    ]
    problems += [f"--arms: {name!r} is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        raise ConfigError(problems)
    return [known[name] for name in names] if names else list(arms)


@dataclass(frozen=True)
class PlannedArm:
    """An arm at one batch size.

    Attributes:
        arm: what it is.
        batch: rows of a step on one rank.
        config: resolved; None where it was refused.
        refusal: why there is no ``config``, in one line; empty where there is one.
    """

    arm: Arm
    batch: int
    config: Config | None
    refusal: str = ""

    @property
    def family(self) -> Family | None:
        """What it does with gradients; None where it was refused."""
        if self.config is None:
            return None
        if self.config.schedule.early_backward:
            return "early"
        return "detached" if any(tower.detach for tower in self.config.towers) else "exact"


def plan_arms(
    config: str, overrides: Sequence[str], arms: Sequence[Arm], batches: Sequence[int], *, catalog: Catalog
) -> list[PlannedArm]:
    """Resolves every arm at every batch size, before any of them is built; batch sizes outside, arms inside.

    Args:
        config: name or path of the workload's configuration.
        overrides: of the command line, for all arms.
        arms: in turn order.
        batches: rows of a step on one rank; none: what the configuration says.
        catalog: what configurations may name.

    Raises:
        UserError: the configuration is wrong by itself, whatever the arm.
    """
    base = load_config(config, overrides, catalog=catalog).config
    sizes: Sequence[int | None] = list(batches) or [None]
    planned = []
    for size in sizes:
        rows = [] if size is None else [f"train.local_batch_size={size}"]
        load_config(config, [*overrides, *rows], catalog=catalog)
        for arm in arms:
            every = [*overrides, *rows, *loss_overrides(arm, base), *arm.overrides]
            batch = base.train.local_batch_size if size is None else size
            try:
                planned.append(PlannedArm(arm, batch, load_config(config, every, catalog=catalog).config))
            except ConfigError as error:
                planned.append(PlannedArm(arm, batch, None, "; ".join(error.problems)))
    return planned


def loss_overrides(arm: Arm, config: Config) -> Iterator[str]:
    """What gives the towers of ``config`` the arm's local losses; frozen towers keep theirs, which is none."""
    if arm.losses is None:
        return
    for tower in config.towers:
        if tower.frozen or (arm.losses == "none" and tower.loss is None):
            continue
        if arm.losses == "none":
            yield f"towers.{tower.name}.loss=null"
        elif tower.loss is None:
            yield f"towers.{tower.name}.loss={{target: {arm.losses}}}"
        else:
            yield f"towers.{tower.name}.loss.target={arm.losses}"
