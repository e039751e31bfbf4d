"""What waits for what when ids are sent a step ahead, on a device that a log plays; on ranks see tests/distributed.

Streams are ``main`` (the steps'), ``data`` (what is ahead), ``copy`` (of batches) and ``nccl``, the group's own, where
collectives run in the order of asking, each after what the stream that asked was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from erase_rec.batch import SparseBatch
from erase_rec.distributed.world import World
from models.embeddings.sent_ids import INPUT, INPUT_SIZES, Ids, SentIds

BATCH = SparseBatch(torch.arange(3), torch.ones(3, dtype=torch.int32), None, 1, single_valued=True)


@dataclass
class Device:
    """A log of work, each with all that must have finished when it starts.

    Attributes:
        before: by name of the work.
        given: to each stream, all that its next work comes after.
        current: the stream that work goes to.
        host: work that the host waited for, in order.
    """

    before: dict[str, frozenset[str]] = field(default_factory=dict)
    given: dict[str, frozenset[str]] = field(default_factory=dict)
    current: str = "main"
    host: list[str] = field(default_factory=list)

    def work(self, name: str, stream: str | None = None) -> frozenset[str]:
        stream = stream or self.current
        self.before[name] = self.given.get(stream, frozenset())
        self.given[stream] = self.before[name] | {name}
        return self.given[stream]

    def wait(self, event: frozenset[str], stream: str | None = None) -> None:
        stream = stream or self.current
        self.given[stream] = self.given.get(stream, frozenset()) | event

    def collective(self, name: str) -> frozenset[str]:
        self.wait(self.given.get(self.current, frozenset()), "nccl")
        return self.work(name, "nccl")


@dataclass
class RecordingStream:
    """Implements :class:`erase_rec.data_stream.DataStream` on the log."""

    device: Device
    used: list[Any] = field(default_factory=list)

    @contextmanager
    def run(self, after: frozenset[str] | None) -> Iterator[None]:
        device = self.device
        device.wait(device.given.get(device.current, frozenset()) if after is None else after, "data")
        outer, device.current = device.current, "data"
        yield
        device.current = outer

    def mark(self) -> frozenset[str]:
        return self.device.given.get("data", frozenset())

    def use(self, *made: Any) -> None:
        self.device.wait(self.mark())
        self.used.extend(made)


@dataclass
class Later:
    """TorchRec's awaitable: waits for a collective, and asks for the next or gives what came."""

    device: Device
    event: frozenset[str]
    name: str

    def wait(self) -> Any:
        self.device.wait(self.event)
        if self.name.startswith("ids"):
            self.device.work(f"arranged{self.name.removeprefix('ids')}")
            return f"received{self.name.removeprefix('ids')}"
        self.device.host.append(self.name)
        name = f"ids{self.name.removeprefix('sizes')}"
        return Later(self.device, self.device.collective(name), name)


class Collection:
    """Stands in for a ShardedEmbeddingBagCollection."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def create_context(self) -> str:
        return "context"

    def input_dist(self, context: str, features: str) -> Later:
        name = f"sizes{features}"
        return Later(self.device, self.device.collective(name), name)


def sent_by(device: Device, stream: RecordingStream, world: World, number: int) -> SentIds:
    def make(sparse: SparseBatch) -> Ids:
        assert sparse is BATCH
        device.work(f"made{number}")
        return Ids(str(number), torch.full((2,), -1), 3, [3])

    arrived = device.work(f"copy{number}", "copy")
    return SentIds(
        BATCH,
        collection=Collection(device),
        make=make,
        world=world,
        stream=stream,
        arrived=arrived,  # type: ignore[arg-type]
    )


def steps(device: Device, stream: RecordingStream, world: World, count: int) -> None:
    """As :class:`models.embeddings.exchanged.ExchangedTables` and a step go about it."""
    following: SentIds | None = None
    for number in range(count):
        current = following or sent_by(device, stream, world, number)
        following = sent_by(device, stream, world, number + 1) if number + 1 < count else None
        current.send()
        _, received = current.receive()
        assert received == f"received{number}"
        device.work(f"lookup{number}")
        device.wait(device.collective(f"exchange{number}"))
        if following is not None:
            following.announce()
        device.work(f"towers{number}")
        reduced = device.collective(f"reduce{number}")
        if following is not None:
            following.send()
        device.wait(device.collective(f"gradient{number}"))
        device.work(f"tables{number}")
        device.wait(reduced)
        device.work(f"update{number}")


def test_ids_arrive_beside_the_step_and_rows_are_read_after_it() -> None:
    device = Device()
    stream, world = RecordingStream(device), World()
    steps(device, stream, world, 4)
    before = device.before
    for number in range(3):
        ahead = number + 1
        assert {f"arranged{ahead}", f"tables{number}", f"update{number}"} <= before[f"lookup{ahead}"], "no row is stale"
        assert before[f"ids{ahead}"] >= {f"copy{ahead}", f"made{ahead}", f"sizes{ahead}"}
        # Beside the step: none of its work on the main stream has to be over, but for what it sent before.
        beside = {f"tables{number}", f"update{number}", f"gradient{number}"}
        assert not beside & (before[f"ids{ahead}"] | before[f"arranged{ahead}"])
        assert f"towers{number}" not in before[f"made{ahead}"] | before[f"sizes{ahead}"]
        assert f"lookup{number}" not in before[f"made{ahead}"], "the host may wait for what is made"
        assert f"sizes{ahead}" not in before[f"towers{number}"], "nor does the step wait for what is ahead"
    assert device.host == [f"sizes{number}" for number in range(4)]
    assert stream.used.count("context") == 4
    assert sum(isinstance(made, torch.Tensor) for made in stream.used) == 4, "what crosses streams is kept"


def test_stages_are_logged_once_and_in_order() -> None:
    device, world = Device(), World()
    sent = sent_by(device, RecordingStream(device), world, 0)
    sent.announce()
    assert [entry.group for entry in world.collectives.recent] == [INPUT_SIZES]
    sent.announce()
    sent.send()
    sent.send()
    assert [entry.group for entry in world.collectives.recent] == [INPUT_SIZES, INPUT]


def test_of_a_batch_that_nobody_copied_ids_are_made_after_what_was_launched() -> None:
    device = Device()
    device.work("written")
    stream = RecordingStream(device)
    sent = sent_by(device, stream, World(), 0)
    sent = SentIds(
        BATCH,
        collection=Collection(device),
        make=sent._make,
        world=World(),
        stream=stream,
        arrived=None,  # type: ignore[arg-type]
    )
    sent.announce()
    device.work("later")
    sent.send()
    assert "written" in device.before["made0"]
    assert "later" not in device.before["ids0"]
