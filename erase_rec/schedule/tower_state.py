"""Where each tower is in a step. A tower that would do something out of order raises instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum


class Phase(Enum):
    """What a tower did last, as the host launched it."""

    IDLE = "idle"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    REDUCING = "reducing"
    REDUCED = "reduced"
    STEPPED = "stepped"
    FAILED = "failed"


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.FORWARD}),
    Phase.FORWARD: frozenset({Phase.LOSS, Phase.BACKWARD}),
    Phase.LOSS: frozenset({Phase.BACKWARD}),
    Phase.BACKWARD: frozenset({Phase.GRADIENTS}),
    Phase.GRADIENTS: frozenset({Phase.REDUCING, Phase.STEPPED}),
    Phase.REDUCING: frozenset({Phase.REDUCED}),
    Phase.REDUCED: frozenset({Phase.STEPPED}),
    Phase.STEPPED: frozenset(),
    Phase.FAILED: frozenset(),
}
_BUSY = frozenset({Phase.BACKWARD, Phase.REDUCING, Phase.FAILED})


class IllegalTransitionError(RuntimeError):
    """A tower was asked for a phase that does not follow its present one."""


class TowerStates:
    """The phase of each tower in each micro-batch; from ``reducing`` on a tower's micro-batches go together."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._phases: dict[tuple[str, int], Phase] = {(name, 0): Phase.IDLE for name in self._names}

    def begin(self, micro_batches: int = 1) -> None:
        """Starts a step.

        Raises:
            IllegalTransitionError: the step before left a tower at work, or it failed.
        """
        for (name, _), phase in self._phases.items():
            if phase in _BUSY:
                raise IllegalTransitionError(f"tower {name} cannot start a step: it is still {phase.value}")
        self._phases = {(name, micro): Phase.IDLE for name in self._names for micro in range(micro_batches)}

    def advance(self, tower: str, to: Phase, micro: int | None = None) -> None:
        """Moves a tower on, in one micro-batch or (None) in all.

        Raises:
            IllegalTransitionError: ``to`` does not follow; the tower is failed then.
        """
        keys = [key for key in self._phases if key[0] == tower and micro in {None, key[1]}]
        for key in keys:
            phase = self._phases[key]
            if to not in _NEXT[phase]:
                self.fail(tower)
                raise IllegalTransitionError(f"tower {tower} cannot go from {phase.value} to {to.value}")
            self._phases[key] = to

    def fail(self, tower: str) -> None:
        """Marks a tower whose work raised."""
        for key in self._phases:
            if key[0] == tower:
                self._phases[key] = Phase.FAILED

    def phase(self, tower: str, micro: int = 0) -> Phase:
        """The present phase."""
        return self._phases[tower, micro]
