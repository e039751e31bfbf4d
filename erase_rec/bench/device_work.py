"""What the device did during some steps: kernels by stream, from torch.profiler (CUPTI); inside graph replays too."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

MOST_NAMES = 40
"""Kernels that the table of the longest holds."""
COLLECTIVE = "nccl"
"""What names of NCCL's kernels begin with. One that waits for another rank runs meanwhile."""
_KINDS: dict[str, Literal["kernel", "copy"]] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}


@dataclass(frozen=True)
class Work:
    """One kernel or copy.

    Attributes:
        name: as the profiler has it.
        kind: what it was; setting memory counts as a copy.
        stream: number of the stream; a graph's own inside a replay.
        start_us: from a start that all share.
        end_us: likewise.
    """

    name: str
    kind: Literal["kernel", "copy"]
    stream: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class TopKernel:
    """All runs of one kernel: how many in a step, and their time in a step."""

    name: str
    a_step: float
    us_a_step: float


@dataclass(frozen=True)
class WorkReport:
    """A mean step's work on the device.

    Attributes:
        kernels: launched a step.
        copies: copies and memory settings a step.
        streams: streams that did something.
        sum_ms: time of all, each by itself.
        union_ms: time in which at least one ran.
        overlap_share: part of ``sum_ms`` that ran beside other work: 1 - union / sum.
        top: those with most time first.
        collective_ms: time in which a collective ran or waited for other ranks.
        exposed_ms: part of it in which nothing else ran.
    """

    kernels: float
    copies: float
    streams: int
    sum_ms: float
    union_ms: float
    overlap_share: float
    top: tuple[TopKernel, ...]
    collective_ms: float
    exposed_ms: float


def profiled(run: Callable[[], None]) -> list[Work]:
    """The device's work while ``run`` runs. Synchronises the host; CUDA only."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return work_of(json.loads(path.read_text(encoding="utf-8")))


def work_of(trace: dict[str, list[dict[str, object]]]) -> list[Work]:
    """The device's work in a trace of Chrome's format, in order of its start."""
    found = []
    for event in trace["traceEvents"]:
        kind = _KINDS.get(str(event.get("cat")))
        if kind is None:
            continue
        start, duration, arguments = event["ts"], event["dur"], event["args"]
        assert isinstance(start, float | int)
        assert isinstance(duration, float | int)
        assert isinstance(arguments, dict)
        found.append(Work(str(event["name"]), kind, int(arguments["stream"]), start, start + duration))
    return sorted(found, key=lambda work: work.start_us)


def report(work: Sequence[Work], steps: int) -> WorkReport:
    """Means over ``steps`` steps."""
    total = sum(each.end_us - each.start_us for each in work)
    union = _union_us(work)
    times: dict[str, list[float]] = defaultdict(list)
    for each in work:
        times[each.name].append(each.end_us - each.start_us)
    top = [TopKernel(name, len(us) / steps, sum(us) / steps) for name, us in times.items()]
    top.sort(key=lambda kernel: -kernel.us_a_step)
    kernels = sum(each.kind == "kernel" for each in work)
    collectives = [each for each in work if each.name.startswith(COLLECTIVE)]
    others = [each for each in work if not each.name.startswith(COLLECTIVE)]
    return WorkReport(
        kernels=kernels / steps,
        copies=(len(work) - kernels) / steps,
        streams=len({each.stream for each in work}),
        sum_ms=1e-3 * total / steps,
        union_ms=1e-3 * union / steps,
        overlap_share=1 - union / total if total else 0.0,
        top=tuple(top[:MOST_NAMES]),
        collective_ms=1e-3 * _union_us(collectives) / steps,
        exposed_ms=1e-3 * (union - _union_us(others)) / steps,
    )


def _union_us(work: Sequence[Work]) -> float:
    """Time in which at least one ran; ``work`` in order of its start."""
    union, reached = 0.0, float("-inf")
    for each in work:
        union += max(0.0, each.end_us - max(each.start_us, reached))
        reached = max(reached, each.end_us)
    return union
