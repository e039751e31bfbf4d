"""One rank that fails ends all of them, and the first rank says why.

A rank that raises puts its message on a board in the rendezvous store, which every rank reads from a thread of its
own: the main thread may be blocked in a collective that will never complete. The first rank prints the message and
leaves a last word, the failed rank ends (so that torchrun names it), and the others follow.

The thread also hears signals while the main thread is blocked, and settles where ranks that are told to end stop
(:mod:`erase_rec.distributed.stop`). Of a rank that is killed, torchrun tells the others by SIGTERM before their
collectives fail: where no agreement comes about, that signal ends them only after a grace period in which they can say
what they met.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from erase_rec.distributed.collective_log import LogTail, first_difference, standing
from erase_rec.distributed.stop import LINGER_S, StopAgreement
from erase_rec.distributed.world import CollectiveError, World
from erase_rec.errors import UserError
from erase_rec.finite import NonFiniteLossError

POLL_S = 0.1
SPEAK_S = 5.0
"""Longest time that the others leave the first rank to speak."""
BEAT_S = 1.0
"""Time between two notes of a rank's last collective, which speak for it once it is killed."""
LOGS_S = 1.0
"""Longest time that the first rank waits for the others' logs of collectives."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_FAILURE, _SPOKEN, _LOG, _BEAT = "failure", "spoken", "log", "beat"


@dataclass(frozen=True)
class Failure:
    """What the board holds: which rank failed first, its message, and the exit code of all.

    ``waited``: it waited for other ranks, so that what each of them asked for last belongs to the message.
    ``nan_step``: the step whose loss was not finite; a gradient that is nan makes the next loss of every rank nan, so
    that the rank with the lowest is the cause.
    """

    rank: int
    message: str
    exit_code: int
    waited: bool = False
    nan_step: int | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """From what was raised; a user's mistake speaks for itself, anything else names its kind."""
        if isinstance(error, NonFiniteLossError):
            return cls(rank, str(error), 2, nan_step=error.step)
        if isinstance(error, UserError):
            return cls(rank, str(error), 2)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, "interrupted", INTERRUPTED)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return cls(rank, f"{type(error).__name__}: {error}{notes}", 1, waited=isinstance(error, CollectiveError))


class Board:
    """Watches for a failure of any rank, from a daemon thread, until it is closed; made by the main thread."""

    def __init__(self, store: Store, world: World, timeout_s: float) -> None:
        """Starts watching, and hears SIGTERM and SIGINT.

        Args:
            store: shared by the ranks; a connection that nothing else uses.
            world: this rank.
            timeout_s: longest time that ranks which are told to stop, or whose store is gone, have to come to an end.
        """
        self._store = store
        self._world = world
        self._timeout_s = timeout_s
        self._agreement = StopAgreement(store, world.stop, world.rank, world.size, timeout_s)
        self._closed = threading.Event()
        self._posted = False
        self._next_beat_s = 0.0
        self._heard: int | None = None
        # Python runs handlers in the main thread, once that comes back from whatever it is blocked in. The number of
        # the signal is in this pipe at once.
        self._signals, into = os.pipe()
        os.set_blocking(into, False)
        self._old_handler = signal.signal(signal.SIGTERM, _leave_to_the_board)
        self._old_wakeup = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        self._into = into
        self._thread = threading.Thread(target=self._watch, name="failure board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching: this rank has done its work."""
        self._closed.set()
        self._thread.join()
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGTERM, self._old_handler)
        os.close(self._into)
        os.close(self._signals)

    def fail(self, error: BaseException) -> None:
        """Posts ``error`` unless another rank was first, and ends this process with the exit code of the first."""
        failure = Failure.of(self._world.rank, error)
        # From a thread: where the network is gone, the store answers no more.
        posting = threading.Thread(target=self._post_first, args=(failure, error), daemon=True)
        posting.start()
        posting.join(SPEAK_S)
        self._thread.join(2 * SPEAK_S + LINGER_S if self._posted else 0)
        if not self._posted:
            print(f"error: rank {failure.rank}: {failure.message}", file=sys.stderr, flush=True)
        _exit(failure.exit_code)

    def _post_first(self, failure: Failure, error: BaseException) -> None:
        if self._post(failure) and failure.exit_code == 1:
            traceback.print_exception(error)

    def _post(self, failure: Failure) -> bool:
        """Whether no other rank was first."""
        posted = json.dumps(asdict(failure))
        try:
            if failure.nan_step is not None:
                self._store.set(f"{_FAILURE}/{failure.rank}", posted)
            first = bool(self._store.compare_set(_FAILURE, "", posted) == posted.encode())
        except dist.DistError:
            return True  # the store went down with the process that held it
        self._posted = True
        return first

    def _watch(self) -> None:
        try:
            failure = self._failure()
        except dist.DistError:
            self._outlive_the_store()
            return
        if failure is None:
            return
        try:
            self._end(failure)
        finally:
            _exit(failure.exit_code)

    def _failure(self) -> Failure | None:
        """The first one, of any rank; None where this rank ends without."""
        while not self._store.check([_FAILURE]):
            if self._closed.is_set():
                return None
            self._hear()
            self._beat()
            if problem := self._agreement.poll(self._heard):
                self._post(Failure(self._world.rank, problem, self._agreement.exit_code, waited=True))
        return Failure(**json.loads(self._store.get(_FAILURE)))

    def _outlive_the_store(self) -> None:
        """Ends this rank unless it ends by itself: it must not go on beside one that is started in its place.

        Collectives go on without the store, which may answer again no more after a break of the network: they have
        ``distributed.timeout_s`` to find out for themselves.
        """
        give_up_s = time.monotonic() + self._timeout_s
        while self._heard is None and time.monotonic() < give_up_s:
            if self._closed.is_set():
                return
            self._hear()
        if self._heard is not None:
            time.sleep(LINGER_S)
            _exit(128 + self._heard)
        print(f"error: rank {self._world.rank}: the launcher that holds the ranks' store is gone", file=sys.stderr)
        _exit(1)

    def _hear(self) -> None:
        """Waits a little, for a signal too; an interrupt that Python raises in the main thread is not for the board."""
        if not select.select([self._signals], [], [], POLL_S)[0]:
            return
        for number in os.read(self._signals, 64):
            if number == signal.SIGTERM or (number == signal.SIGINT and self._world.stop.listens):
                self._heard = self._heard or number

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + BEAT_S
            self._store.set(f"{_BEAT}/{self._world.rank}", json.dumps(asdict(self._world.collectives.tail(1))))

    def _end(self, failure: Failure) -> None:
        world = self._world
        self._store.set(f"{_LOG}/{world.rank}", json.dumps(asdict(world.collectives.tail())))
        if world.is_first:
            self._say(failure)
            try:
                world.last_words()
            finally:
                self._store.set(_SPOKEN, "")
        elif not self._await([_SPOKEN], SPEAK_S) and failure.rank == world.rank:
            self._say(failure)  # the first rank is no more
        if failure.rank != world.rank:
            time.sleep(LINGER_S)

    def _say(self, failure: Failure) -> None:
        detail = "".join(f"; {sentence}" for sentence in self._logs(failure))
        if failure.nan_step is not None:
            failure = self._cause(failure.nan_step, failure)
        print(f"error: rank {failure.rank}: {failure.message}{detail}", file=sys.stderr, flush=True)

    def _logs(self, failure: Failure) -> list[str]:
        """Where the ranks' logs of collectives part, and where each stands if one waited for another."""
        keys = {rank: f"{_LOG}/{rank}" for rank in range(self._world.size)}
        self._await(list(keys.values()), LOGS_S)
        tails = {rank: tail for rank, key in keys.items() if (tail := self._tail(key)) is not None}
        found = first_difference(tails)
        if found is not None or not failure.waited:
            return [] if found is None else [found]
        silent = {rank: self._tail(f"{_BEAT}/{rank}") for rank in keys if rank not in tails}
        return standing(tails, silent)

    def _cause(self, step: int, failure: Failure) -> Failure:
        """The failure of the rank whose loss was nan first, which may not have been first to see it."""
        posted = (f"{_FAILURE}/{rank}" for rank in range(self._world.size))
        for other in [Failure(**json.loads(self._store.get(key))) for key in posted if self._store.check([key])]:
            if other.nan_step is not None and other.nan_step < step:
                step, failure = other.nan_step, other
        return failure

    def _tail(self, key: str) -> LogTail | None:
        return LogTail(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _await(self, keys: Sequence[str], seconds: float) -> bool:
        """Waits for ``keys``, but no longer than ``seconds``; whether they are there."""
        deadline = time.monotonic() + seconds
        while not self._store.check(list(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def board_store(store: Store) -> Store:
    """A connection of its own to the board's part of ``store``."""
    own = PrefixStore("board", store.clone())  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=SPEAK_S))
    return own


def _leave_to_the_board(number: int, frame: FrameType | None) -> None:
    pass


def _exit(code: int) -> None:
    """Ends the process at once: its main thread may be blocked for good, and clean-up would be, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
