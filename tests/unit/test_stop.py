"""Runs that are told to stop: signals are noted, and ranks agree on one place without a collective."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from erase_rec.distributed import stop
from erase_rec.distributed.stop import Stop, StopAgreement, Stopped

TIMEOUT_S = 30.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_a_lone_process_at_the_next_place(number: signal.Signals, code: int) -> None:
    alone, before = Stop(), signal.getsignal(number)
    with alone.listening():
        alone.passed()
        signal.raise_signal(number)
        with pytest.raises(Stopped, match=f"stopped by {number.name}") as caught:
            alone.passed()
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stop().listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a launcher and a terminal, say, told it both
        monkeypatch.setattr(stop, "AGAIN_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_no_signal_is_taken() -> None:
    before = [signal.getsignal(number) for number in stop.SIGNALS]
    found = []

    def listen() -> None:
        with Stop().listening():
            found.extend(signal.getsignal(number) for number in stop.SIGNALS)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == before


class Rank:
    """A rank that passes places as it is told to, and takes part in agreements."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.stop = Stop(alone=False)
        self.agreement = StopAgreement(store, self.stop, rank, size, TIMEOUT_S)
        self.passed = 0
        self.stopped: Stopped | None = None
        self.trained = ExitStack()

    def listen(self) -> None:
        """From another thread: signals are those of the test's process."""
        waiting(lambda: self.trained.enter_context(self.stop.listening())).join(TIMEOUT_S)

    def go(self, to: int) -> None:
        """Passes places up to this one, counted from 1; may wait."""
        try:
            while self.passed < to:
                self.stop.passed()
                self.passed += 1
        except Stopped as stopped:
            self.stopped = stopped


@pytest.fixture
def ranks() -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, 3) for rank in range(3)]


def polled(ranks: list[Rank], heard: int | None = None) -> list[str | None]:
    """Every rank's board looks twice: it says where it is, then it sees where the others are. The last was told."""
    for rank in ranks:
        rank.agreement.poll(heard if rank is ranks[-1] else None)
    return [rank.agreement.poll(None) for _ in range(2) for rank in ranks]


def waiting(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_ranks_stop_at_the_place_that_the_furthest_comes_to(ranks: list[Rank]) -> None:
    for rank, places in zip(ranks, (4, 6, 5), strict=True):
        rank.listen()
        rank.go(places)
    ranks[2].agreement.poll(signal.SIGTERM)
    ahead = waiting(lambda: ranks[2].go(100))  # frozen before the others know of anything
    assert polled(ranks) == [None] * 6
    for rank in ranks[:2]:
        rank.go(100)
    ahead.join(TIMEOUT_S)
    assert [rank.passed for rank in ranks] == [6, 6, 6], "all did six places, and stopped at the seventh"
    assert all(rank.stopped is not None and rank.stopped.exit_code == 143 for rank in ranks)


def test_ranks_go_on_where_one_has_come_to_its_end(ranks: list[Rank]) -> None:
    for rank, places in zip(ranks, (9, 9, 8), strict=True):
        rank.listen()
        rank.go(places)
    ranks[0].trained.close()
    assert polled(ranks, signal.SIGTERM) == [None] * 6
    for rank in ranks:
        rank.go(12)  # of the one at its end: places of what comes after training, where nothing can stop
    assert [(rank.stopped, rank.passed) for rank in ranks] == [(None, 12)] * 3


def test_a_rank_that_listens_not_yet_ends_all_after_a_while(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].listen()
    ranks[1].listen()
    assert polled(ranks, signal.SIGTERM) == [None] * 6
    monkeypatch.setattr(stop, "LINGER_S", 0.0)
    time.sleep(0.01)
    assert [rank.agreement.poll(None) for rank in ranks] == ["terminated by SIGTERM"] * 3
    assert [rank.agreement.exit_code for rank in ranks] == [143] * 3


def test_a_rank_that_does_not_answer_is_named(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ranks:
        rank.listen()
    assert polled(ranks[1:], signal.SIGINT) == [None] * 4
    monkeypatch.setattr(stop, "AGREE_S", 0.0)
    time.sleep(0.01)
    assert ranks[1].agreement.poll(None) == "terminated by SIGINT; no answer of rank 0"


def test_ranks_that_agreed_have_a_bounded_time_to_end() -> None:
    store = dist.HashStore()
    alone = Rank(store, 0, 1)
    alone.agreement = StopAgreement(store, alone.stop, 0, 1, timeout_s=0.0)
    alone.listen()
    assert alone.agreement.poll(signal.SIGTERM) is None
    time.sleep(0.01)
    assert alone.agreement.poll(None) == "terminated by SIGTERM: no end of a step within distributed.timeout_s"
