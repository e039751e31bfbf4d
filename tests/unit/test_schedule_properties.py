"""Random configurations: what is legal equals plain training, what is not is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, assume, given, settings
from schedule_cases import assert_same, make_batch, refusals, train, train_plainly
from schedule_strategies import configurations

from erase_rec.config.schema import Config
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.world import World

STEPS = [make_batch(seed, 10) for seed in range(2)]
EXACT = 1e-12
"""Sums in another order differ in float64 by a few units in the last place, about 1e-16 each."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One rank with a process group, which DDP needs."""
    with join_world(on_cuda=False, timeout_s=30, grouped=True) as world:
        yield world


def mistakes(config: Config) -> dict[str, bool]:
    """Which mistakes a configuration makes, said without the rules."""
    schedule, dense, towers = config.schedule, config.optimizer.dense, config.towers
    learning = {tower.name for tower in towers if tower.loss is not None and tower.loss.weight > 0}
    kept = {tower.name for tower in towers if not tower.detach}
    trained = [tower for tower in towers if not tower.frozen]
    clipped = dense.max_grad_norm is not None
    return {
        "nothing trains a tower": any(tower.detach and tower.name not in learning for tower in trained),
        "a frozen tower has a loss": any(tower.frozen and tower.name in learning for tower in towers),
        "a local loss leaks": any(tower.detach and kept & set(tower.inputs.towers) for tower in trained),
        "a cut inside": any(
            tower.cut_at
            and (tower.frozen or tower.name in kept | {name for other in towers for name in other.inputs.towers})
            for tower in towers
        ),
        "nothing is early": schedule.early_backward and not any(tower.detach for tower in trained),
        "nothing to dispatch": schedule.dispatch == "non_blocking" and not schedule.early_backward,
        "workers without work": schedule.dispatch == "blocking" and schedule.workers > 1,
        "clipped before it is known": schedule.optimizer == "per_tower" and clipped and dense.clip == "global",
        "clipped to nothing": dense.clip == "per_tower" and not clipped,
        "threads issue collectives": (
            config.distributed.reduction == "ddp_per_tower" and schedule.dispatch == "non_blocking"
        ),
        "workers beside one graph": schedule.cuda_graph == "dense" and schedule.dispatch == "non_blocking",
        "a reducer of DDP in a graph": (
            schedule.cuda_graph == "dense" and config.distributed.reduction in {"ddp", "ddp_per_tower"}
        ),
        "no loss reaches the tables": {
            "main": not kept,
            "local": not learning,
            "both": not kept and not learning,
            "none": False,
        }[schedule.embedding_gradient or "none"],
    }


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(config=configurations(consistent=True))
def test_what_is_legal_equals_plain_training(config: Config, world: World) -> None:
    assume(refusals(config) == [])
    needs_group = config.distributed.reduction in {"ddp", "ddp_per_tower"}
    found = train(config, STEPS, world=world if needs_group else None)
    assert_same(found, train_plainly(config, STEPS), EXACT)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(config=configurations())
def test_exactly_what_is_wrong_is_refused(config: Config) -> None:
    assert bool(refusals(config)) == any(mistakes(config).values()), (refusals(config), mistakes(config))


def features(config: Config) -> set[str]:
    """What a property has seen, once it has seen the configuration."""
    if found := {name for name, wrong in mistakes(config).items() if wrong}:
        return found
    schedule = config.schedule
    return {
        f"{'early' if schedule.early_backward else 'aggregate'}, {config.distributed.reduction}",
        f"{schedule.dispatch}, {schedule.optimizer}",
        *("chain" for tower in config.towers if tower.inputs.towers),
        *("frozen" for tower in config.towers if tower.frozen),
    }


@pytest.mark.parametrize("consistent", [False, True])
def test_random_configurations_reach_every_case(consistent: bool) -> None:
    """The properties above are about more than a corner."""
    seen: Counter[str] = Counter()
    names: set[str] = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(config=configurations(consistent=consistent))
    def look(config: Config) -> None:
        seen.update(features(config))
        names.update(mistakes(config))

    look()
    if consistent:
        names = {f"early, {reduction}" for reduction in (None, "bucket", "ddp", "ddp_per_tower")}
        names |= {f"{dispatch}, {order}" for dispatch in ("blocking", "non_blocking") for order in ("end", "per_tower")}
        names |= {"chain", "frozen", "aggregate, ddp"}
    assert names <= seen.keys()
