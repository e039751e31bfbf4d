"""Captured steps whose batches are copied beside the step before: what waits for what, in any order that this allows.

The device is played by streams whose operations run at the end, in a random order that their waits allow: a wait that
is missing gives a wrong number in some of these orders. On a real one see ``tests/gpu/test_step_graph_cuda.py``.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from erase_rec.batch import Batch, SparseBatch, StepOutput
from erase_rec.distributed.collective_log import CollectiveLog
from erase_rec.errors import UserError
from erase_rec.prefetch import prefetch
from erase_rec.schedule.measured_streams import MeasuredStreams
from erase_rec.schedule.program import Op
from erase_rec.schedule.step_graphs import WARM_UP_STEPS, Holds, StepGraphs
from erase_rec.schedule.step_state import StepState
from erase_rec.schedule.streams import NullStreams

ROWS, TOWERS = 4, 3
STEPS = 24
CPU = torch.device("cpu")
Event = frozenset[int]
"""Operations, all of which are done."""


class CopiesOnly(TorchDispatchMode):
    """Collects copies, for later, instead of making them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.found.append((args[0], args[1]))
        return args[0]


@dataclass
class Device:
    """Streams of operations; implements :class:`erase_rec.schedule.replays.Replays` and the prefetch's ``Copies``.

    Attributes:
        names: of the operations, in the order in which the host gave them.
        captures: outputs of each capture.
    """

    names: list[str] = field(default_factory=list)
    captures: list[StepOutput] = field(default_factory=list)
    _work: list[Callable[[], None]] = field(default_factory=list)
    _after: list[Event] = field(default_factory=list)
    _state: dict[str, Event] = field(default_factory=dict)
    _captured: list[Callable[[], None]] | None = None
    _free: list[Batch] = field(default_factory=list)

    def give(self, stream: str, name: str, work: Callable[[], None]) -> None:
        """``work`` on ``stream``; or into the capture that is being made."""
        if self._captured is not None:
            assert stream == "main"
            self._captured.append(work)
            return
        self._after.append(self.event(stream))
        self._state[stream] = frozenset([len(self.names)])
        self.names.append(name)
        self._work.append(work)

    def event(self, stream: str) -> Event:
        return self._state.get(stream, frozenset())

    def wait(self, stream: str, event: Event) -> None:
        self._state[stream] = self.event(stream) | event

    def before(self, first: str, then: str) -> bool:
        """Whether the only operation of one name is done when that of another name starts."""
        target, left, seen = self.names.index(first), [self.names.index(then)], set()
        while left:
            for each in self._after[left.pop()] - seen:
                seen.add(each)
                left.append(each)
        return target in seen

    def finish(self, seed: int) -> None:
        """Runs everything, in an order that depends on ``seed``."""
        generator, done = random.Random(seed), set[int]()
        while len(done) < len(self._work):
            ready = [each for each, after in enumerate(self._after) if each not in done and after <= done]
            chosen = generator.choice(ready)
            self._work[chosen]()
            done.add(chosen)

    # Replays

    def copy(self, work: Callable[[], None], after: Iterable[Event | None]) -> None:
        for event in after:
            self.wait("copy", self.event("main") if event is None else event)
        with CopiesOnly() as copies:
            work()
        name = f"fill {sum(each.startswith('fill') for each in self.names)}"
        self.give("copy", name, lambda: [there.copy_(here) for there, here in copies.found] and None)
        self.wait("main", self.event("copy"))

    def on_main(self, work: Callable[[], None]) -> None:
        with CopiesOnly() as copies:
            work()
        self.give(
            "main", f"take {len(self.names)}", lambda: [there.copy_(here) for there, here in copies.found] and None
        )

    def mark(self) -> Event:
        return self.event("main")

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        operations = self._captured = []
        made = output, _ = work()
        self._captured = None
        self.captures.append(output)

        def run() -> None:
            for other in self.captures:  # they share their memory with this one's intermediates
                if other is not output:
                    other.logit.fill_(torch.nan)
            for operation in operations:
                operation()

        def replay() -> None:
            self.give("main", f"replay {sum(each.startswith('replay') for each in self.names)}", run)

        return replay, made

    def forget(self) -> None:
        pass

    # Copies: into memory that is used again as soon as the host drops the batch.

    def begin(self, batch: Batch) -> tuple[Batch, Event]:
        place = next((each for each in reversed(self._free) if each.size == batch.size), None)
        if place is None:
            place = clone(batch)
        else:
            self._free = [each for each in self._free if each is not place]
        pairs = list(zip(tensors(place), tensors(batch), strict=True))
        self.wait("prefetch", self.event("main"))
        self.give("prefetch", f"arrival {batch.row_ids[0]}", lambda: [to.copy_(at) for to, at in pairs] and None)
        event: Any = self.event("prefetch")
        moved = Batch(place.dense, place.sparse, place.label, batch.row_ids, event)
        weakref.finalize(moved, lambda: self._free.append(place))
        return moved, event

    def use(self, copied: Event) -> None:
        self.wait("main", copied)


def tensors(batch: Batch) -> list[Tensor]:
    return [batch.dense, batch.label, batch.sparse.values, batch.sparse.lengths]


def clone(batch: Batch) -> Batch:
    sparse = SparseBatch(*(each.clone() for each in tensors(batch)[2:]), None, 2, batch.sparse.single_valued)
    return Batch(batch.dense.clone(), sparse, batch.label.clone(), batch.row_ids)


def make_batch(number: int, rows: int = ROWS) -> Batch:
    """Every tensor says which batch it is."""
    ids = torch.full((2 * rows,), number)
    sparse = SparseBatch(ids, torch.ones(2 * rows, dtype=torch.int32), None, 2, single_valued=True)
    return Batch(torch.full((rows, 3), float(number)), sparse, torch.full((rows,), float(number)), ids[:rows])


@dataclass
class Tables:
    """What captures ask of tables."""

    scalars: tuple[float, ...] = ()

    def frozen_scalars(self) -> tuple[float, ...]:
        return self.scalars

    def capture_problem(self, sparse: SparseBatch) -> str | None:
        return None


@dataclass
class Trainer:
    """Runs steps on a device, each of which reads its batch and says what it read; they are their own ``StepParts``.

    Attributes:
        numbers: the batch that each step read, on the main stream, right after the step.
        flags: which losses were finite, as a number in binary, read beside the steps that follow.
        updated: the batches that tables outside of the graph were updated with, one after the other.
        launched: kinds (measured, exact) of steps that were not replayed.
    """

    device: Device
    tables: Tables = field(default_factory=Tables)
    holds: Holds = "step"
    strict: bool = False
    numbers: dict[int, float] = field(default_factory=dict)
    flags: dict[int, int] = field(default_factory=dict)
    updated: list[float] = field(default_factory=list)
    launched: list[tuple[bool, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = MeasuredStreams(NullStreams(), CPU)
        tables: Any = self.tables
        log = CollectiveLog()
        self.graphs = StepGraphs(self.device, self.streams, tables, log, holds=self.holds, strict=self.strict)
        self.given = 0

    def begin(self, batch: Batch, measure: bool, exact: bool) -> StepState:
        self.streams.begin(measure=measure)
        return StepState.of(batch, 1, measure=measure, exact=exact)

    def launch_before(self, state: StepState) -> None:
        if self.holds == "step":
            return
        self.given += 1
        state.pooled, ids = torch.full((state.batch.size, 2), torch.nan), state.batch.sparse.values

        def look_up() -> None:
            state.pooled.fill_(float(ids[0]))

        with self.streams.run(Op("lookup")):
            self.device.give("main", f"lookup {self.given}", look_up)

    def launch_captured(self, state: StepState, flags: Tensor | None = None) -> StepOutput:
        batch = state.batch
        logit = state.table_gradient = torch.full((batch.size,), torch.nan)
        finite = torch.empty(1 + TOWERS, dtype=torch.bool) if flags is None else flags
        dense, label = batch.dense, batch.label
        found = batch.sparse.values if self.holds == "step" else state.pooled[:, 0]
        if flags is None:
            self.launched.append((state.measure, state.exact))

        def read() -> None:
            same = float(dense[0, 0]) == float(found[0]) == float(label[0])
            logit.copy_(label if same else torch.full_like(label, torch.nan))
            finite.copy_(torch.tensor([int(label[0]) >> bit & 1 for bit in range(1 + TOWERS)]))

        with self.streams.run(Op("forward", tower="a")):
            self.device.give("main", f"launch {len(self.launched)}", read)
        return StepOutput(logit, {f"tower {index}": logit for index in range(TOWERS)}, logit[0], finite)

    def launch_after(self, state: StepState) -> None:
        if self.holds == "step":
            return
        gradient, pooled = state.table_gradient, state.pooled
        assert gradient is not None

        def update() -> None:
            self.updated.append(float(gradient[0]) if torch.equal(gradient, pooled[:, 0]) else torch.nan)

        with self.streams.run(Op("table_update")):
            self.device.give("main", f"update {self.given}", update)

    def step(self, number: int, batch: Batch, *, measure: bool = False, exact: bool = False) -> None:
        output, done = self.graphs.run(batch, measure, exact, self)
        device, logit, finite = self.device, output.logit, output.finite
        device.give("main", f"reader {number}", lambda: self.numbers.update({number: float(logit[0])}))
        device.wait("guard", device.event("main") if done is None else done)
        powers = 2 ** torch.arange(1 + TOWERS)
        device.give("guard", f"guard {number}", lambda: self.flags.update({number: int((finite * powers).sum())}))
        self.graphs.keep_until(device.event("guard"))


def resident(batches: Sequence[Batch]) -> Iterator[Batch]:
    """They have been there for long."""
    arrived: Any = frozenset()
    return (Batch(each.dense, each.sparse, each.label, each.row_ids, arrived) for each in batches)


WAYS: dict[str, Callable[[Device, Sequence[Batch]], Iterable[Batch]]] = {
    "prefetched": lambda device, batches: prefetch((each for each in batches), torch.device("cuda"), device),
    "resident": lambda device, batches: resident(batches),
    "written on the main stream": lambda device, batches: batches,
}


BOTH = pytest.mark.parametrize("holds", get_args(Holds))


@BOTH
@pytest.mark.parametrize("way", WAYS)
def test_every_step_reads_its_batch_in_any_order_that_the_waits_allow(way: str, holds: Holds) -> None:
    for seed in range(12):
        device, kinds = Device(), random.Random(seed)
        trainer = Trainer(device, holds=holds)
        rows = [ROWS] * WARM_UP_STEPS + [kinds.choice([ROWS, ROWS, ROWS, ROWS, 2]) for _ in range(STEPS)]
        for number, batch in enumerate(WAYS[way](device, [make_batch(n, size) for n, size in enumerate(rows)])):
            trainer.step(number, batch, measure=kinds.random() < 0.3, exact=kinds.random() < 0.3)
            del batch  # the next one may lie where it was
        device.finish(seed)
        assert trainer.numbers == {number: float(number) for number in range(len(rows))}
        assert trainer.flags == {number: number % 16 for number in range(len(rows))}
        assert trainer.updated == [*range(len(rows) if holds == "dense" else 0)]


@BOTH
def test_a_batch_is_copied_beside_the_step_before_it(holds: Holds) -> None:
    device = Device()
    trainer = Trainer(device, holds=holds)
    batches = [make_batch(number) for number in range(WARM_UP_STEPS + 6)]
    for number, batch in enumerate(WAYS["prefetched"](device, batches)):
        trainer.step(number, batch)
    for step in range(2, 6):
        arrival, fill, replay = f"arrival {WARM_UP_STEPS + step}", f"fill {step}", f"replay {step}"
        assert device.before(arrival, fill)
        assert device.before(fill, replay)
        assert device.before(f"replay {step - 2}", fill), "the last to read where it goes"
        assert device.before(f"guard {WARM_UP_STEPS + step - 2}", fill), "and the last to read what that replay put out"
        assert not device.before(f"replay {step - 1}", fill)
        assert not device.before(f"replay {step - 1}", arrival)
        assert not device.before(f"guard {WARM_UP_STEPS + step - 1}", replay), "the guard holds no step up"
    assert "launch 4" not in device.names, "three steps warm up"


def test_a_kind_of_step_is_captured_where_it_comes_up(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    trainer = Trainer(device)
    kinds = [(False, False)] * (WARM_UP_STEPS + 1) + [(True, False), (False, False), (False, True), (True, False)]
    captured = []
    with caplog.at_level(logging.INFO):
        for number, (measure, exact) in enumerate([(False, True)] * WARM_UP_STEPS + kinds * 2):
            trainer.step(number, make_batch(number), measure=measure, exact=exact)
            captured.append(len(device.captures))
    # Replays begin with the fourth step of a kind and alternate between two held batches.
    assert captured == [0, 0, 0, *[0] * WARM_UP_STEPS, 1, 2, 2, 3, 4, *[5] * 8]
    said = [record.message for record in caplog.records]
    assert "captured a plain step in" in said[0]
    assert "captured a measured step in" in said[1]
    assert any("captured a plain step that cuts nothing in" in each for each in said)


def test_steps_that_cut_nothing_warm_up_too() -> None:
    device = Device()
    trainer = Trainer(device)
    kinds = [False] * (WARM_UP_STEPS + 2) + [True] * (WARM_UP_STEPS + 2)
    for number, exact in enumerate(kinds):
        trainer.step(number, make_batch(number), exact=exact)
    assert trainer.launched == [(False, False)] * WARM_UP_STEPS + [(False, True)] * WARM_UP_STEPS
    device.finish(0)
    assert trainer.numbers == {number: float(number) for number in range(len(kinds))}


def test_numbers_of_the_host_hold_no_graph_up_that_leaves_tables_outside() -> None:
    device = Device()
    trainer = Trainer(device, holds="dense")
    for number in range(WARM_UP_STEPS + 4):
        trainer.tables.scalars = (0.1 * number,)
        trainer.step(number, make_batch(number))
    assert len(trainer.launched) == WARM_UP_STEPS


@BOTH
def test_a_measured_replay_has_its_marks_beside_those_of_what_is_launched(holds: Holds) -> None:
    """Of a replay all operations are launched at once, of what frames it by themselves."""
    trainer = Trainer(Device(), holds=holds)
    for number in range(WARM_UP_STEPS + 3):
        trainer.step(number, make_batch(number), measure=number >= WARM_UP_STEPS)
    found = trainer.streams.intervals()
    framed = ["lookup", "forward:a", "table_update"] if holds == "dense" else ["forward:a"]
    assert [each.op.key for each in found] == framed
    replayed = next(each for each in found if each.op.key == "forward:a")
    assert replayed.launch_ms == replayed.launched_ms >= 0
    assert replayed.launch_ms == 0 or holds == "dense"
    if holds == "dense":
        assert found[0].launched_ms <= replayed.launch_ms <= found[2].launch_ms


def test_a_changed_number_of_the_host_is_captured_anew() -> None:
    """The step that first has it is launched plainly: it might change in every step."""
    device = Device()
    trainer = Trainer(device)
    for number in range(WARM_UP_STEPS + 8):
        trainer.tables.scalars = (0.1,) if number < WARM_UP_STEPS + 4 else (0.2,)
        trainer.step(number, make_batch(number))
    assert len(trainer.launched) == WARM_UP_STEPS + 1
    assert len(device.captures) == 4
    device.finish(0)
    assert trainer.numbers == {number: float(number) for number in range(WARM_UP_STEPS + 8)}


@BOTH
def test_more_ids_than_there_is_room_for_are_captured_anew(holds: Holds) -> None:
    """A graph without the lookup reads no ids."""
    device = Device()
    trainer = Trainer(device, holds=holds)
    for number in range(WARM_UP_STEPS + 6):
        batch, bags = make_batch(number), 1 if number < WARM_UP_STEPS + 3 else 4
        lengths = torch.full_like(batch.sparse.lengths, bags)
        sparse = SparseBatch(batch.sparse.values.repeat(bags), lengths, None, 2)
        trainer.step(number, Batch(batch.dense, sparse, batch.label, batch.row_ids))
    assert len(device.captures) == (4 if holds == "step" else 2)
    assert len(trainer.launched) == WARM_UP_STEPS
    device.finish(0)
    assert trainer.numbers == {number: float(number) for number in range(WARM_UP_STEPS + 6)}


@BOTH
@pytest.mark.parametrize("strict", [False, True])
def test_a_batch_of_other_rows_is_launched_plainly_and_said_once(
    strict: bool, holds: Holds, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(Device(), holds=holds, strict=strict)
    for number in range(WARM_UP_STEPS + 2):
        trainer.step(number, make_batch(number))
    if strict:
        said = rf"graph: {holds}, .* cannot be replayed: batches of 2 rows, where the captured step has 4"
        with pytest.raises(UserError, match=said):
            trainer.step(0, make_batch(0, rows=2))
        return
    for _ in range(2):
        trainer.step(0, make_batch(0, rows=2))
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
