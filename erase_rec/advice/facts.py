"""What ``erase-rec advise`` knows of a model beside its step times: data, memory, and NE from the user's own runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from erase_rec.advice.decision import NeVerdict
from erase_rec.bench.result import GIB, Row
from erase_rec.bench.turns import verdict

_HELD_PARTS = ("weights", "gradients", "optimizer state")
"""Parts of a floor's traffic that are there between two operations; each is counted read and written."""


@dataclass(frozen=True)
class DataCheck:
    """Batches of the training loader against the same rows kept on the device.

    Attributes:
        resident_ms: mean step on kept batches.
        loader_step_ms: mean step on the loader's batches, its wait included, over a few steps.
        measured_wait_ms: host time that such a step waited for its batch, mean.
        alone_ms: time in which the loader makes a batch when nothing else runs, mean over ``batches``.
        batches: that the loader made for it.
        workers: ``data.workers``; 0: batches are made between steps.
    """

    resident_ms: float
    loader_step_ms: float
    measured_wait_ms: float
    alone_ms: float
    batches: int
    workers: int

    @property
    def wait_ms(self) -> float:
        """What a step waits for its batch in the long run.

        A loader makes many batches at once, so a few steps may find all of theirs ready: it cannot be less than what
        the loader takes for a batch, less the step's time if it works beside it.
        """
        in_the_long_run = self.alone_ms if self.workers == 0 else max(0.0, self.alone_ms - self.resident_ms)
        return max(self.measured_wait_ms, in_the_long_run)


def bound_of(row: Row, data: DataCheck) -> str:
    """``data-bound``, ``host-bound`` or ``device-bound``, as :func:`erase_rec.bench.turns.verdict` says.

    On the CPU host and device are one, so that a step that does not wait for its data is bound by the device.
    """
    step_ms = data.resident_ms + data.wait_ms
    return verdict(step_ms, row.host_ms or 0.0, data.wait_ms, row.idle_share or 0.0)


@dataclass(frozen=True)
class Memory:
    """What a way to train needs.

    Attributes:
        arm: its name.
        peak_gib: measured on the device, tables included; None on the CPU.
        tables_gib: tables and their optimizer's state.
        dense_gib: dense weights, gradients and optimizer state; counted.
        activations_gib: what a step keeps for its backward, all of it together; counted. Early backward frees each
            tower's part before the next one's, so that it needs less at a time.
    """

    arm: str
    peak_gib: float | None
    tables_gib: float
    dense_gib: float
    activations_gib: float

    @property
    def total_gib(self) -> float:
        """Measured where it was, else the sum."""
        return self.tables_gib + self.dense_gib + self.activations_gib if self.peak_gib is None else self.peak_gib


def memory_of(row: Row, tables_bytes: int) -> Memory:
    """Of a row that ran."""
    assert row.floor is not None
    parts = row.floor["bytes"]  # traffic: what is held crosses memory twice
    held = sum(parts[part] for part in _HELD_PARTS) / 2
    return Memory(row.arm, row.peak_gib, tables_bytes / GIB, held / GIB, parts["activations"] / 2 / GIB)


@dataclass(frozen=True)
class KnownNe:
    """The NE gap of cut towers to exact ones in the user's own runs, in per cent; below 0 the cut ones are better.

    Attributes:
        verdict: what the interval says.
        low: lower bound at 95 %, over seeds and rows; None with one seed.
        mid: the gap.
        high: upper bound.
        seeds: paired.
        runs: folders that were read.
    """

    verdict: NeVerdict
    low: float | None
    mid: float
    high: float | None
    seeds: Sequence[int]
    runs: Sequence[str]
