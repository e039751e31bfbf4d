"""CUDA graphs of the towers (``schedule.cuda_graph: tower``): forward, local loss and early backward, replayed.

A detached tower with a local loss is a straight-line program. Each of its operations is captured once and replayed from
then on, which costs one launch instead of dozens. Operations of one tower and micro-batch are replayed in one order on
one stream and share a memory pool; different towers replay side by side and share none.

What a graph reads and writes has fixed addresses. Inputs that change from step to step are copied into buffers
(:meth:`TowerGraphs.hold`); outputs are overwritten by the next replay. A captured backward runs no hook, so it goes
with reductions that need none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from erase_rec.protocols import CTRModel
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.program import Op

WARM_UP_STEPS = 3
"""Steps of one batch size before it is captured: libraries set themselves up in the first ones."""

Outputs = Sequence[Tensor | None]
logger = logging.getLogger(__name__)


class Graphs(Protocol):
    """Runs the operations of towers, perhaps by replaying a capture."""

    def begin(self, rows: int) -> bool:
        """Starts a step over ``rows`` rows; says whether it will capture, which only the main thread may do."""
        ...

    def hold(self, name: str, value: Tensor) -> Tensor:
        """``value``, or a buffer of fixed address that it was copied into, on the current stream."""
        ...

    def run(self, op: Op, compute: Callable[[], Outputs]) -> Outputs:
        """What ``compute`` returns; or its captured work replayed on the current stream, and the same tensors."""
        ...


class NoGraphs:
    """Everything is launched kernel by kernel."""

    def begin(self, rows: int) -> bool:
        """Captures nothing."""
        return False

    def hold(self, name: str, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    def run(self, op: Op, compute: Callable[[], Outputs]) -> Outputs:
        """Computes."""
        return compute()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    outputs: Outputs


class TowerGraphs:
    """Graphs of one batch size: the first that comes :data:`WARM_UP_STEPS` times. Other batches are not captured."""

    def __init__(self, plan: Plan, model: CTRModel, device: torch.device) -> None:
        """Captures nothing yet; says which towers it will not capture, and why."""
        self._device = device
        self._towers = {tower.name for tower in plan.towers if tower.early} - _with_dropout(plan, model)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default stream cannot capture
        self._pools: dict[tuple[str, int], Any] = {}
        self._captured: dict[str, _Captured] = {}
        self._held: dict[str, Tensor] = {}
        self._seen: dict[int, int] = {}
        self._rows: int | None = None
        self._active = self._capturing = False
        self._said: set[int] = set()

    def begin(self, rows: int) -> bool:
        """See :class:`Graphs`."""
        seen = self._seen[rows] = self._seen.get(rows, 0) + 1
        if self._rows is None and seen > WARM_UP_STEPS:
            self._rows = rows
        self._active = rows == self._rows
        self._capturing = self._active and not self._captured
        if self._rows is not None and not self._active and rows not in self._said:
            self._said.add(rows)
            logger.warning(
                "schedule.cuda_graph: batches of %d rows run uncaptured; captured are those of %d", rows, self._rows
            )
        return self._capturing

    def hold(self, name: str, value: Tensor) -> Tensor:
        """See :class:`Graphs`. The copy is detached."""
        if not self._active:
            return value
        if self._capturing:
            self._held[name] = value.detach().clone()
        held = self._held[name]
        assert (held.shape, held.dtype) == (value.shape, value.dtype), f"{name} changed since it was captured"
        return held if self._capturing else held.copy_(value.detach())

    def run(self, op: Op, compute: Callable[[], Outputs]) -> Outputs:
        """See :class:`Graphs`."""
        if not self._active or op.tower not in self._towers:
            return compute()
        if self._capturing:
            return self._capture(op, compute)
        captured = self._captured[op.key]
        captured.graph.replay()
        return captured.outputs

    def _capture(self, op: Op, compute: Callable[[], Outputs]) -> Outputs:
        """Captures, replays, and returns what the tower's next operations are captured on."""
        assert op.tower is not None
        graph = torch.cuda.CUDAGraph()
        pool = self._pools.setdefault((op.tower, op.micro), torch.cuda.graph_pool_handle())
        # cuBLAS keeps one workspace a stream. Without a new one in each pool, graphs that were captured on one stream
        # would write into the same workspace while they replay side by side.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream):  # synchronises the host
            outputs = compute()
        torch._C._cuda_clearCublasWorkspaces()
        # Kept without their autograd graph: it would keep the parameters' accumulators, made on the capturing stream.
        self._captured[op.key] = _Captured(graph, [None if value is None else value.detach() for value in outputs])
        graph.replay()
        return outputs


def make_graphs(plan: Plan, model: CTRModel, device: torch.device) -> Graphs:
    """The graphs that the plan asks for; none on a device that has no CUDA graphs."""
    captures = plan.cuda_graph == "tower" and device.type == "cuda"
    return TowerGraphs(plan, model, device) if captures else NoGraphs()


def _with_dropout(plan: Plan, model: CTRModel) -> set[str]:
    """Towers that draw random numbers: concurrent graphs would share one generator."""
    drawing = set()
    for tower in plan.towers:
        block = model.tower(tower.name)
        assert isinstance(block, nn.Module)
        if tower.early and any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules()):
            drawing.add(tower.name)
    if drawing:
        names = ", ".join(sorted(drawing))
        logger.warning("schedule.cuda_graph: dropout draws random numbers; uncaptured run the towers %s", names)
    return drawing
