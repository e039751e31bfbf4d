"""The drawn step: the chart's blocks, and a trace in Chrome's format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from erase_rec.schedule.measured_streams import Interval
from erase_rec.schedule.program import Op
from eval.timeline import PHASES, chrome_trace, draw_timeline

INTERVALS = (
    Interval(Op("lookup"), "MainThread", 0.0, 2.0, 0.0, 0.5),
    Interval(Op("forward", "tower:a", "a", ("lookup",)), "MainThread", 2.0, 5.0, 0.5, 1.0),
    Interval(Op("early_backward", "tower:a", "a", ("forward:a",), micro=1), "worker", 5.0, 9.0, 1.0, 2.5),
    Interval(Op("over_arch", waits=("forward:a",)), "MainThread", 5.0, 7.0, 1.2, 1.4),
    Interval(Op("check", waits=("over_arch",)), "MainThread", 7.0, 7.0, 1.4, 1.5),
)
COLOURS = {kind: tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for kind, (colour, _) in PHASES.items()}


def drawn(path: Path, **options: object) -> np.ndarray:
    draw_timeline(INTERVALS, path, title="a step", **options)  # type: ignore[arg-type]
    return np.asarray(Image.open(path).convert("RGB"))


def pixels(image: np.ndarray, kind: str) -> int:
    return int((image == COLOURS[kind]).all(axis=2).sum())


def test_every_phase_of_the_step_is_drawn_in_its_colour(tmp_path: Path) -> None:
    image = drawn(tmp_path / "step.png")
    present = {interval.op.kind for interval in INTERVALS} & PHASES.keys()
    for kind in PHASES.keys() - {"table_update"}:  # white, as the background
        # Letters' edges hold a few pixels of grey.
        assert (pixels(image, kind) > 500) == (kind in present), kind


def test_a_block_is_as_wide_as_its_time(tmp_path: Path) -> None:
    """On the streams 4 ms of early backward against 3 of forward; the threads' 1.5 against 0.5 are drawn as well."""
    image = drawn(tmp_path / "step.png")
    expected = (4.0 + 1.5) / (3.0 + 0.5)
    assert pixels(image, "early_backward") / pixels(image, "forward") == pytest.approx(expected, rel=0.15)


def test_the_critical_path_is_outlined(tmp_path: Path) -> None:
    plain = drawn(tmp_path / "plain.png")
    outlined = drawn(tmp_path / "outlined.png", critical=("lookup", "forward:a"))
    black = [int((image == 0).all(axis=2).sum()) for image in (plain, outlined)]
    assert black[1] > black[0] + 500


def test_colours_differ_for_every_phase() -> None:
    assert len({colour for colour, _ in PHASES.values()}) == len(PHASES)


def test_the_trace_holds_every_operation_on_its_stream_and_thread() -> None:
    trace = json.loads(json.dumps(chrome_trace(INTERVALS, {"device": "CPU"})))
    events = trace["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "streams", 2: "host threads"}
    found = {
        (processes[event["pid"]], names[event["pid"], event["tid"]], event["name"]): (event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    }
    for interval in INTERVALS:
        stream = found["streams", interval.op.stream, interval.op.key]
        thread = found["host threads", interval.thread, interval.op.key]
        assert stream == pytest.approx((1e3 * interval.start_ms, 1e3 * interval.duration_ms))
        assert thread == pytest.approx((1e3 * interval.launch_ms, 1e3 * (interval.launched_ms - interval.launch_ms)))
    assert len(found) == 2 * len(INTERVALS)
    assert trace["otherData"] == {"device": "CPU"}


def test_the_trace_names_tower_micro_batch_and_waits() -> None:
    events = chrome_trace(INTERVALS, {})["traceEvents"]
    backward = next(event for event in events if event["name"] == "early_backward:a@1")
    assert backward["args"] == {"tower": "a", "micro_batch": 1, "waits": ["forward:a"]}


def test_blocks_of_one_stream_that_overlap_get_rows_of_their_own() -> None:
    """As on a CPU, where a worker and the main thread may be at work for one stream."""
    overlapping = (*INTERVALS, Interval(Op("forward", "tower:a", "a", micro=1), "MainThread", 6.0, 8.0, 2.0, 2.5))
    events = chrome_trace(overlapping, {})["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["main", "tower:a", "tower:a (2)", "MainThread", "worker"]
    rows: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            assert event["ts"] >= rows.get(row, 0.0)
            rows[row] = event["ts"] + event["dur"]
