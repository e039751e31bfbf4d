"""The phases of a tower in a step: what follows what, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from erase_rec.schedule.tower_state import IllegalTransitionError, Phase, TowerStates

WAYS: dict[str, tuple[Phase, ...]] = {
    "early, reduced": (
        Phase.FORWARD,
        Phase.LOSS,
        Phase.BACKWARD,
        Phase.GRADIENTS,
        Phase.REDUCING,
        Phase.REDUCED,
        Phase.STEPPED,
    ),
    "one process": (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.GRADIENTS, Phase.STEPPED),
    "without a loss": (Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENTS, Phase.STEPPED),
}
LEGAL = {pair for way in WAYS.values() for pair in zip((Phase.IDLE, *way), way, strict=False)}
REACH = {Phase.IDLE: ()} | {phase: way[: at + 1] for way in WAYS.values() for at, phase in enumerate(way)}
"""How to get to each phase."""


def at_phase(phase: Phase, micro_batches: int = 1) -> TowerStates:
    states = TowerStates(["deep", "cross"])
    states.begin(micro_batches)
    if phase is Phase.FAILED:
        states.fail("deep")
    else:
        for step in REACH[phase]:
            states.advance("deep", step)
    return states


@pytest.mark.parametrize(("start", "to"), list(product(Phase, Phase)), ids=lambda phase: phase.value)
def test_every_transition(start: Phase, to: Phase) -> None:
    states = at_phase(start)
    if (start, to) in LEGAL:
        states.advance("deep", to)
        assert states.phase("deep") is to
    else:
        with pytest.raises(IllegalTransitionError, match=f"tower deep cannot go from {start.value} to {to.value}"):
            states.advance("deep", to)
        assert states.phase("deep") is Phase.FAILED
    assert states.phase("cross") is Phase.IDLE, "towers are apart"


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
def test_a_step_starts_unless_a_tower_is_at_work_or_failed(phase: Phase) -> None:
    states = at_phase(phase)
    if phase in {Phase.BACKWARD, Phase.REDUCING, Phase.FAILED}:
        with pytest.raises(IllegalTransitionError, match=f"tower deep cannot start a step: it is still {phase.value}"):
            states.begin()
    else:
        states.begin()
        assert states.phase("deep") is Phase.IDLE


def test_micro_batches_go_apart_up_to_the_reduction() -> None:
    states = at_phase(Phase.IDLE, micro_batches=2)
    for phase in REACH[Phase.GRADIENTS]:
        states.advance("deep", phase, 0)
    assert states.phase("deep", 1) is Phase.IDLE
    with pytest.raises(IllegalTransitionError, match="tower deep cannot go from idle to reducing"):
        states.advance("deep", Phase.REDUCING)
    assert {states.phase("deep", micro) for micro in (0, 1)} == {Phase.FAILED}
