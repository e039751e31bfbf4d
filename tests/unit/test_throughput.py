"""Step times: what counts as a step, and which clock reading belongs to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from erase_rec import throughput
from erase_rec.throughput import HostClock, StepTimer, clock_for


class ManualClock:
    """Time moves when the test says so; reading a duration is counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.readings = 0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        self.readings += 1
        return end - start


def run(timer: StepTimer, clock: ManualClock, durations: list[float], rows: int = 100) -> None:
    for duration in durations:
        clock.now += duration
        timer.step(rows)


def test_percentiles_are_over_steps_and_the_mean_over_time() -> None:
    clock = ManualClock()
    timer = StepTimer(clock)
    timer.resume()
    durations = [0.5, 0.25, 1.0, 0.125]
    run(timer, clock, durations)
    total = timer.total()
    qps = 100 / np.array(durations)
    expected = np.percentile(qps, [10, 50, 90])
    assert [total.qps_p10, total.qps_p50, total.qps_p90] == pytest.approx(expected.tolist())
    assert total.qps_mean == pytest.approx(400 / 1.875)
    assert total.steps == 4


def test_warm_up_and_pauses_are_left_out_and_a_short_batch_counts_its_own_rows() -> None:
    clock = ManualClock()
    timer = StepTimer(clock, warmup_steps=2)
    timer.resume()
    run(timer, clock, [50.0, 50.0, 1.0])
    timer.pause()
    clock.now += 1000.0
    timer.resume()
    run(timer, clock, [1.0])
    run(timer, clock, [1.0], rows=10)
    total = timer.total()
    assert total.steps == 3
    assert total.qps_mean == pytest.approx(70.0)
    assert total.qps_p90 == pytest.approx(100.0)
    assert total.qps_p10 < 100.0


def test_a_window_holds_the_steps_since_the_last_one() -> None:
    clock = ManualClock()
    timer = StepTimer(clock)
    timer.resume()
    run(timer, clock, [1.0, 1.0])
    assert timer.window().qps_mean == pytest.approx(100.0)
    run(timer, clock, [0.5])
    assert timer.window().qps_mean == pytest.approx(200.0)
    assert timer.window().scalars() == {}
    assert timer.total().steps == 3


def test_no_duration_is_read_before_numbers_are_asked_for() -> None:
    clock = ManualClock()
    timer = StepTimer(clock)
    timer.resume()
    run(timer, clock, [1.0] * 5)
    assert clock.readings == 0
    timer.window()
    timer.total()
    assert clock.readings == 5


def test_waiting_for_data_belongs_to_the_step_that_waited() -> None:
    clock = ManualClock()
    timer = StepTimer(clock, warmup_steps=1)
    timer.resume()
    for wait in (5.0, 0.25, 0.75):
        with timer.waiting():
            clock.now += wait
        clock.now += 1.0
        timer.step(100)
    total = timer.total()
    assert total.data_wait_ms == pytest.approx(500.0)
    assert total.step_ms == pytest.approx(1500.0)
    assert total.scalars()["time/data_wait_share"] == pytest.approx(1 / 3)


class DeviceBehind(ManualClock):
    """A device that the host gives work to and does not wait for: a mark is reached after the work before it."""

    done = 0.0

    def mark(self) -> float:
        self.done = max(self.done, self.now)
        return self.done

    def launch(self, seconds: float) -> None:
        self.done = max(self.done, self.now) + seconds


def test_a_device_that_is_at_work_does_not_wait_for_data_when_its_host_does() -> None:
    clock = DeviceBehind()
    timer = StepTimer(clock)
    timer.resume()
    for host_waits in (0.5, 0.75, 1.0, 3.0):
        with timer.waiting():
            clock.now += host_waits
        clock.launch(1.0)
        timer.step(100)
    total = timer.total()
    # It waits 0.5 s for the first batch; the fourth comes at 5.25 s, when it has been without work since 3.5 s.
    assert total.data_wait_ms == pytest.approx(1e3 * (0.5 + 1.75) / 4)
    assert total.step_ms == pytest.approx(1e3 * 6.25 / 4)


def test_nothing_measured_is_nan_and_logs_nothing() -> None:
    timer = StepTimer(ManualClock(), warmup_steps=10)
    timer.resume()
    timer.step(1)
    assert math.isnan(timer.total().qps_mean)
    assert timer.total().scalars() == {}


def test_a_step_after_a_pause_needs_a_start() -> None:
    timer = StepTimer(ManualClock())
    with pytest.raises(AssertionError, match="resume"):
        timer.step(1)


def test_the_cpu_is_timed_by_the_host() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    start = clock.mark()
    assert clock.seconds(start, clock.mark()) >= 0.0


def test_a_long_run_keeps_a_sample_of_its_steps_and_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of all steps was what made the memory of long runs grow."""
    monkeypatch.setattr(throughput, "MOST_SPEEDS", 64)
    total = throughput._Total()
    for step in range(10_000):
        total.add(10, 1.0 + step % 100, 0.25)
        assert len(total._speeds) < 64
    found = total.throughput()
    assert found.steps == 10_000
    assert found.qps_mean == pytest.approx(10 / 50.5)
    assert found.step_ms == pytest.approx(50_500)
    assert found.data_wait_ms == pytest.approx(250)
    assert found.qps_p10 < found.qps_p50 < found.qps_p90
    assert found.qps_p50 == pytest.approx(10 / 50, rel=0.3)
