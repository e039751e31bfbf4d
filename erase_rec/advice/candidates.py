"""The ways to train one model that ``erase-rec advise`` compares, simplest first in each of the two promises.

A step that cuts nothing keeps every gradient: its order of work changes the speed alone, and NE stays what it is. A
step that cuts towers trains another objective, whatever its order of work; so its NE is a question of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from erase_rec.bench.arms import Arm, PlannedArm, loss_overrides
from erase_rec.config.catalog import Catalog
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.errors import ConfigError
from erase_rec.sweep.points import Override, layered

CONFIGURED = "configured"
Promise = Literal["exact", "cut"]

_EAGER = ("schedule.cuda_graph=none", "schedule.strict=false")
_CAPTURED = ("schedule.cuda_graph=step", "schedule.strict=true")


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        name: short.
        promise: what it says about gradients.
        about: one sentence.
        overrides: over the configuration.
    """

    name: str
    promise: Promise
    about: str
    overrides: tuple[str, ...]


CANDIDATES = (
    Candidate("exact", "exact", "every gradient exact, one stream", ("schedule.preset=exact", *_EAGER)),
    Candidate("exact_streams", "exact", "exact, a stream a tower", ("schedule.preset=exact_streams", *_EAGER)),
    Candidate(
        "exact_graph", "exact", "exact, one stream, the step one CUDA graph", ("schedule.preset=exact", *_CAPTURED)
    ),
    Candidate(
        "exact_streams_graph",
        "exact",
        "exact, a stream a tower, the step one CUDA graph",
        ("schedule.preset=exact_streams", *_CAPTURED),
    ),
    Candidate("detached", "cut", "towers cut, one backward at the end", ("schedule.preset=detached", *_EAGER)),
    Candidate(
        "erase",
        "cut",
        "early backward, launched by the main thread",
        ("schedule.preset=erase", "schedule.dispatch=blocking", *_EAGER),
    ),
    Candidate(
        "erase_threads",
        "cut",
        "early backward, launched by a worker",
        ("schedule.preset=erase", "schedule.dispatch=non_blocking", *_EAGER),
    ),
    Candidate(
        "detached_graph",
        "cut",
        "towers cut, one backward, the step one CUDA graph",
        ("schedule.preset=detached", *_CAPTURED),
    ),
    Candidate(
        "erase_graph",
        "cut",
        "early backward, the step one CUDA graph",
        ("schedule.preset=erase", "schedule.dispatch=blocking", *_CAPTURED),
    ),
)
"""In each promise the simpler way comes first: it is kept where another is not seen to be faster."""


@dataclass(frozen=True)
class Plans:
    """All ways to train a configuration.

    Attributes:
        arms: the reference first, which the benchmark builds twice.
        reference: name of the way that the configuration says.
    """

    arms: tuple[PlannedArm, ...]
    reference: str


def plan_candidates(config: str, overrides: Sequence[str], *, on_cuda: bool, catalog: Catalog) -> Plans:
    """Resolves every way to train ``config``; one that is refused keeps the reason.

    Local losses are the configuration's. Where it cuts towers, the exact ways have none, as the model that NE is
    compared with has none; where it has none, the ways that cut get the ``joint`` target.

    Args:
        config: name or path.
        overrides: of the command line; where a way says otherwise of the same key, that goes before.
        on_cuda: whether there are streams and graphs; elsewhere the configuration's way is the uncaptured one.
        catalog: what configurations may name.

    Raises:
        UserError: the configuration is wrong by itself.
    """
    base = load_config(config, overrides, catalog=catalog).config
    cuts = any(tower.detach for tower in base.towers)
    arms = []
    for candidate in CANDIDATES:
        if candidate.promise == "exact":
            losses: Literal["none", "joint"] | None = "none" if cuts else None
        else:
            losses = None if any(tower.loss for tower in base.towers) else "joint"
        own = [*loss_overrides(Arm(name="losses", about="their losses", losses=losses), base), *candidate.overrides]
        own += _optimizer(candidate, base)
        arm = _planned(config, overrides, candidate.name, candidate.about, own, base, catalog)
        arms.append(_refused_where_it_is_not_itself(arm, candidate, on_cuda=on_cuda))
    uncaptured = [] if on_cuda or base.schedule.cuda_graph == "none" else list(_EAGER)
    configured = _planned(config, overrides, CONFIGURED, "as the configuration says", uncaptured, base, catalog)
    same = next((arm for arm in arms if _resolved(arm) == _resolved(configured)), None)
    if same is None:
        return Plans((configured, *arms), CONFIGURED)
    return Plans((same, *(arm for arm in arms if arm is not same)), same.arm.name)


def promise_of(planned: PlannedArm) -> Promise | None:
    """What a resolved way says about gradients; None where it was refused."""
    if planned.family is None:
        return None
    return "exact" if planned.family == "exact" else "cut"


def _optimizer(candidate: Candidate, base: Config) -> Iterator[str]:
    """``erase`` updates towers by themselves where it can: its captured rival does so too."""
    dense = base.optimizer.dense
    if candidate.name == "exact_streams_graph" and (dense.max_grad_norm is None or dense.clip == "per_tower"):
        yield "schedule.optimizer=per_tower"


def _planned(
    config: str, overrides: Sequence[str], name: str, about: str, own: Sequence[str], base: Config, catalog: Catalog
) -> PlannedArm:
    arm = Arm(name=name, about=about, overrides=tuple(own))
    texts = [each.text for each in layered(parsed(overrides), parsed(own))]
    size = base.train.local_batch_size
    try:
        return PlannedArm(arm, size, load_config(config, texts, catalog=catalog).config)
    except ConfigError as error:
        return PlannedArm(arm, size, None, "; ".join(error.problems))


def parsed(overrides: Sequence[str]) -> list[Override]:
    """``key=value`` texts of which the configuration's loader has found none wrong."""
    return [Override(key.strip(), value, "") for key, _, value in (text.partition("=") for text in overrides)]


def _refused_where_it_is_not_itself(planned: PlannedArm, candidate: Candidate, *, on_cuda: bool) -> PlannedArm:
    found = promise_of(planned)
    early = candidate.name.startswith("erase")
    if found is not None and (found != candidate.promise or early != (planned.family == "early")):
        reason = (
            "the configuration sets towers[].detach or schedule.early_backward itself, which makes it "
            f"{planned.family}; leave them to the preset to compare it"
        )
        return replace(planned, config=None, refusal=reason)
    if found is not None and candidate.name == "exact_streams" and not on_cuda:
        return replace(planned, config=None, refusal="the CPU has no streams: it would be exact again")
    return planned


def _resolved(planned: PlannedArm) -> dict[str, object] | None:
    """What is trained, without whether a failed capture ends the run; None where it was refused."""
    if planned.config is None:
        return None
    found: dict[str, object] = planned.config.model_dump(mode="json")
    found["schedule"] = planned.config.schedule.model_dump(mode="json", exclude={"strict"})
    return found
