"""What rows of a benchmark recommend: the fastest way of each promise, and whether cutting towers pays.

A way is faster than another where the interval of its speed, from paired turns, lies above 1 as a whole; else the
simpler one is kept. What is gained has to be more than what the reference gains over itself (A/A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from erase_rec.advice.candidates import CANDIDATES, CONFIGURED, Promise
from erase_rec.bench.result import Row
from erase_rec.errors import UserError

Speed = tuple[float | None, float, float | None]
"""Speed relative to another way: low, mid, high at 95 %; a bound is None where the turns leave it open."""

Verdict = Literal["cut_faster", "cut_faster_but_worse", "nothing_gained", "cut_slower", "only_exact", "only_cut"]
NeVerdict = Literal["better", "worse", "inside the noise", "one seed: no verdict"]

_ORDER = (*(candidate.name for candidate in CANDIDATES), CONFIGURED)


@dataclass(frozen=True)
class Decision:
    """What is recommended.

    Attributes:
        verdict: whether cutting towers pays.
        exact: the fastest way that keeps every gradient; None where none ran.
        cut: the fastest way that cuts towers; likewise.
        recommended: one of both.
        gain: speed of ``cut`` relative to ``exact``; None where one of them is missing.
        change: speed of ``recommended`` relative to what the configuration says; None where it is that, or that did
            not run.
        noise: speed of the reference relative to itself; None where it did not run.
    """

    verdict: Verdict
    exact: Row | None
    cut: Row | None
    recommended: Row
    gain: Speed | None
    change: Speed | None
    noise: Speed | None

    @property
    def restless(self) -> bool:
        """The reference differs from itself by more than chance: the machine did other things meanwhile."""
        return self.noise is not None and not includes_one(self.noise)


def decide(rows: Sequence[Row], reference: str, ne: NeVerdict | None = None) -> Decision:
    """Recommends one of the ways that ran.

    Args:
        rows: of one batch size, refused ones and the A/A pair among them.
        reference: name of the way that the configuration says.
        ne: what the user's own runs say of the NE of cut towers; None: nothing is known.

    Raises:
        UserError: no way ran.
    """
    ran = [row for row in rows if row.refused is None and row.repeats is None]
    exact, cut = (fastest([row for row in ran if promise_of_row(row) == promise]) for promise in ("exact", "cut"))
    pair = next((row for row in rows if row.repeats == reference and row.refused is None), None)
    noise = None if pair is None else pair.ratio_to.get(reference)
    gain = None if exact is None or cut is None else cut.ratio_to[exact.arm]
    if exact is None or cut is None:
        recommended = exact or cut
        verdict: Verdict = "only_exact" if cut is None else "only_cut"
    else:
        assert gain is not None
        verdict = _judged(gain, noise, ne)
        recommended = cut if verdict == "cut_faster" else exact
    if recommended is None:
        raise UserError(
            "advise: no way to train could be run here: "
            + "; ".join(f"{row.arm}: {row.refused}" for row in rows if row.refused is not None)
        )
    return Decision(verdict, exact, cut, recommended, gain, recommended.ratio_to.get(reference), noise)


def includes_one(speed: Speed) -> bool:
    """Whether 1 lies inside; an open bound holds everything on its side."""
    low, _, high = speed
    return (low is None or low <= 1) and (high is None or high >= 1)


def promise_of_row(row: Row) -> Promise:
    """What a row that ran says about gradients."""
    return "exact" if row.family == "exact" else "cut"


def fastest(rows: Sequence[Row]) -> Row | None:
    """The simplest of the ways that ran that no other is faster than beyond chance; None without rows."""
    best: Row | None = None
    for row in sorted(rows, key=lambda row: _ORDER.index(row.arm)):
        if best is None:
            best = row
            continue
        low, _, _ = row.ratio_to[best.arm]
        if low is not None and low > 1:
            best = row
    return best


def _judged(gain: Speed, noise: Speed | None, ne: NeVerdict | None) -> Verdict:
    low, mid, _ = gain
    inside_noise = noise is not None and not includes_one(noise) and max(mid, 1 / mid) <= max(noise[1], 1 / noise[1])
    if includes_one(gain) or inside_noise:
        return "nothing_gained"
    if low is None or low <= 1:
        return "cut_slower"
    return "cut_faster_but_worse" if ne == "worse" else "cut_faster"
