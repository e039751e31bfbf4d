"""One rank that fails ends all of them, and the first rank says why.

A rank that raises puts its message on a board in the rendezvous store, which every rank reads from a thread of its
own: the main thread may be blocked in a collective that will never complete. The first rank prints the message and
leaves a last word, the failed rank ends (so that torchrun names it), and the others follow.

Of a rank that is killed, torchrun tells the others by SIGTERM before their collectives fail: that signal ends them only
after a grace period in which they can say what they met.
"""

from __future__ import annotations

import json
import math
import os
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

from erase_rec.distributed.collective_log import LogTail, first_difference
from erase_rec.distributed.world import World
from erase_rec.errors import UserError

POLL_S = 0.1
SPEAK_S = 5.0
"""Longest time that the others leave the first rank to speak."""
LINGER_S = 2.0
"""Time that the failed rank has to end before the others do."""
LOGS_S = 1.0
"""Longest time that the first rank waits for the others' logs of collectives."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
TERMINATED = 143
"""Exit code after SIGTERM, likewise."""

_FAILURE, _SPOKEN, _LOG = "failure", "spoken", "log"


@dataclass(frozen=True)
class Failure:
    """What the board holds: which rank failed first, its message, and the exit code of all."""

    rank: int
    message: str
    exit_code: int

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """From what was raised; a user's mistake speaks for itself, anything else names its kind."""
        if isinstance(error, UserError):
            return cls(rank, str(error), 2)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, "interrupted", INTERRUPTED)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return cls(rank, f"{type(error).__name__}: {error}{notes}", 1)


class Board:
    """Watches for a failure of any rank, from a daemon thread, until it is closed; made by the main thread."""

    def __init__(self, store: Store, world: World) -> None:
        """Starts watching.

        Args:
            store: shared by the ranks; a connection that nothing else uses.
            world: this rank.
        """
        self._store = store
        self._world = world
        self._closed = threading.Event()
        self._ends_at = math.inf
        self._old_handler = signal.signal(signal.SIGTERM, self._terminate)
        self._thread = threading.Thread(target=self._watch, name="failure board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching: this rank has done its work."""
        self._closed.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._old_handler)

    def fail(self, error: BaseException) -> None:
        """Posts ``error`` unless another rank was first, and ends this process with the exit code of the first."""
        failure = Failure.of(self._world.rank, error)
        if self._post(failure) and failure.exit_code == 1:
            traceback.print_exception(error)
        self._thread.join(2 * SPEAK_S + LINGER_S)
        _exit(failure.exit_code)

    def _post(self, failure: Failure) -> bool:
        """Whether no other rank was first."""
        posted = json.dumps(asdict(failure))
        try:
            return bool(self._store.compare_set(_FAILURE, "", posted) == posted.encode())
        except dist.DistError:
            return True  # the store went down with the process that held it

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._ends_at = min(self._ends_at, time.monotonic() + LINGER_S)

    def _watch(self) -> None:
        try:
            while not self._store.check([_FAILURE]):
                if self._closed.wait(POLL_S):
                    return
                if time.monotonic() > self._ends_at:
                    self._post(Failure(self._world.rank, "terminated", TERMINATED))
            failure = Failure(**json.loads(self._store.get(_FAILURE)))
        except dist.DistError:
            return  # the store went down with the process that held it, which its launcher reports
        try:
            self._end(failure)
        finally:
            _exit(failure.exit_code)

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
        difference = self._difference()
        detail = f"; {difference}" if difference else ""
        print(f"error: rank {failure.rank}: {failure.message}{detail}", file=sys.stderr, flush=True)

    def _difference(self) -> str | None:
        """Where the ranks' logs of collectives part, as far as the ranks still answer."""
        keys = {rank: f"{_LOG}/{rank}" for rank in range(self._world.size)}
        self._await(list(keys.values()), LOGS_S)
        present = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return first_difference({rank: LogTail(**json.loads(self._store.get(key))) for rank, key in present.items()})

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


def _exit(code: int) -> None:
    """Ends the process at once: its main thread may be blocked for good, and clean-up would be, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
