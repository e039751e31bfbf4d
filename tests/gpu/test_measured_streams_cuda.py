"""Operations timed by device events, and the audit, on CUDA."""

from __future__ import annotations

import pytest
import torch

from erase_rec.cli.short_run import ShortRun
from erase_rec.schedule.audit import audit
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.overlap import overlap_report
from erase_rec.schedule.program import Op, guaranteed_order, program
from erase_rec.schedule.streams import make_streams

pytestmark = pytest.mark.gpu
SMALL = ["data.params={rows: 20000, eval_rows: 2000}", "train.local_batch_size=2048", "train.device=cuda"]
RESOLUTION_MS = 0.01
"""Of CUDA's timing events, with room."""
CYCLES = 200_000_000
"""A device is busy with these for about 0.1 s, far longer than the host needs to launch a few operations."""


def test_streams_are_timed_without_making_the_host_wait() -> None:
    """Two streams sleep beside each other; a third operation waits for one of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = MeasuredStreams(make_streams(("tower:a",), device), device)
    ops = (
        Op("lookup"),
        Op("early_backward", "tower:a", "a", ("lookup",)),
        Op("over_arch"),
        Op("end", waits=("early_backward:a",)),
    )
    streams.begin(measure=True)
    for op in ops:
        with streams.run(op):
            if op.kind in {"early_backward", "over_arch"}:
                torch.cuda._sleep(CYCLES)
    found = {interval.op.key: interval for interval in streams.intervals()}
    backward, over_arch = found["early_backward:a"], found["over_arch"]
    assert backward.duration_ms > 10
    assert found["end"].launched_ms < backward.end_ms
    assert found["end"].start_ms >= backward.end_ms - RESOLUTION_MS
    tower = overlap_report(tuple(found.values()), ops).towers["a"]
    assert tower.beside_ms["over_arch"] > 0
    assert backward.start_ms < over_arch.end_ms
    assert over_arch.start_ms < backward.end_ms


@pytest.mark.parametrize("dispatch", ["blocking", "non_blocking"])
def test_a_measured_step_keeps_the_order_that_its_program_guarantees(dispatch: str) -> None:
    with ShortRun.open("ctr_erase.yaml", [*SMALL, f"schedule.dispatch={dispatch}"]) as run:
        for batch in run.batches(3):
            run.parts.step(batch, measure=True)
        intervals = {interval.op.key: interval for interval in run.parts.streams.intervals()}
        for key, earlier in guaranteed_order(program(run.parts.plan)).items():
            for other in earlier:
                assert intervals[other].end_ms <= intervals[key].start_ms + RESOLUTION_MS, (other, key)


@pytest.mark.parametrize(
    "changes", [["schedule.preset=exact"], [], ["schedule.dispatch=non_blocking", "train.micro_batches=2"]]
)
def test_the_audit_passes(changes: list[str]) -> None:
    with ShortRun.open("ctr_erase.yaml", [*SMALL, *changes]) as run:
        for batch in run.batches(2):
            assert audit(run.parts.model, run.parts.plan, run.losses, batch).findings == ()
            run.parts.step(batch)
