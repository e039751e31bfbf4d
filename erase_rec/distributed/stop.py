"""A run that is told to stop does so between two steps: with several ranks, all between the same two.

SIGTERM and SIGINT are noted, and met where the main thread passes :meth:`Stop.passed`: after each step and each batch
of an evaluation, places that all ranks pass in the same order. On which one they stop is agreed without a collective,
which would cost time in every step: once a rank is told, each says through the store how many places it has passed,
from the failure board's thread, since the main thread may be busy for long. From then on no rank passes a place before
all have spoken; the furthest rank stops at its next place, the others go on to that one.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.distributed_c10d import Store

LINGER_S = 2.0
"""Time that ranks which cannot stop together have to say what they met, before they end all the same."""
AGREE_S = 5.0
"""Longest wait for another rank's place: a rank that is killed has none."""
AGAIN_S = 1.0
"""A second Ctrl-C so long after the first ends the process at once; launchers send some signals twice."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_TOLD = "told"


class Stopped(KeyboardInterrupt):
    """The run was told to stop; on several ranks raised by all of them, at the same place.

    Attributes:
        exit_code: as shells have it: 143 after SIGTERM, 130 after Ctrl-C.
    """

    def __init__(self, number: int) -> None:
        """By the signal of this number."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Stop:
    """Where this rank is among the places at which it can stop, and whether it is to.

    Attributes:
        noted: number of the signal that this process got while it listened.
        listens: signals are noted, not acted upon.
    """

    def __init__(self, *, alone: bool = True) -> None:
        """``alone``: there is no other rank to agree with."""
        self.noted: int | None = None
        self.listens = False
        self._noted_s = math.inf
        self._alone = alone
        self._changed = threading.Condition()
        self._passed: float | None = None
        self._frozen = False
        self._target: float | None = None
        self._number = int(signal.SIGTERM)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which SIGINT and SIGTERM stop the run at the next place; other threads than the main get none."""
        with self._changed:
            self._passed = 0
        self.listens = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._note) for number in SIGNALS} if self.listens else {}
        try:
            yield
        finally:
            self.listens = False
            for number, handler in before.items():
                signal.signal(number, handler)
            with self._changed:
                self._passed = math.inf  # what is left has no place to stop at, and the others need not wait for it

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The main thread may hold any lock here.
        if self.noted is None:
            self.noted, self._noted_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._noted_s + AGAIN_S:
            raise KeyboardInterrupt

    def passed(self) -> None:
        """The main thread is at a place where all ranks can stop. May wait for the others, once one is told.

        Raises:
            Stopped: this is the place.
            RuntimeError: the ranks could not agree on one.
        """
        if self._alone:
            if self.noted is not None:
                raise Stopped(self.noted)
            return
        with self._changed:
            if self._frozen:
                # The board ends this process where the ranks come to no agreement; nobody does once the store is gone.
                self._changed.wait_for(lambda: self._target is not None, 2 * (AGREE_S + LINGER_S))
                if self._target is None:
                    raise RuntimeError("told to stop, but the other ranks do not say where they are")
                if self._target < math.inf and (self._passed is None or self._passed + 1 >= self._target):
                    raise Stopped(self._number)
            if self._passed is not None:
                self._passed += 1

    def freeze(self) -> float | None:
        """Places passed: final until :meth:`agree`. None: it listens not yet; infinite: not any more."""
        with self._changed:
            self._frozen = True
            return self._passed

    def agree(self, target: float, number: int) -> None:
        """Stop at place ``target``, counted from 1; infinite: go on to the end."""
        with self._changed:
            self._target, self._number = target, number
            self._changed.notify_all()


class StopAgreement:
    """One rank's part in agreeing on a place, polled by the thread of its failure board."""

    def __init__(self, store: Store, stop: Stop, rank: int, size: int, timeout_s: float) -> None:
        """Nobody is told yet; ``timeout_s`` bounds the time from the agreement to the end of the process."""
        self._store = store
        self._stop = stop
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._number: int | None = None
        self._told_s = self._agreed_s = math.inf

    def poll(self, heard: int | None) -> str | None:
        """Goes on with what there is to do.

        Args:
            heard: number of the signal that this process was sent, if any.

        Returns:
            Why this process has to end without having stopped; None: it has not.
        """
        if self._number is None and not self._is_told(heard):
            return None
        now = time.monotonic()
        if self._agreed_s < math.inf:
            late = now > self._agreed_s + self._timeout_s
            return f"{self._name()}: no end of a step within distributed.timeout_s" if late else None
        silent = [rank for rank in range(self._size) if not self._store.check([f"{_TOLD}/{rank}"])]
        if silent:
            ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
            return f"{self._name()}; no answer of {ranks}" if now > self._told_s + AGREE_S else None
        places = [json.loads(self._store.get(f"{_TOLD}/{rank}")) for rank in range(self._size)]
        if None in places:
            return self._name() if now > self._told_s + LINGER_S else None
        self._agreed_s = now
        assert self._number is not None
        self._stop.agree(max(places) + 1, self._number)
        return None

    def _is_told(self, heard: int | None) -> bool:
        """Whether any rank was sent a signal; if so, freezes and says where this one is."""
        if heard is not None:
            self._store.compare_set(_TOLD, "", str(heard))
        if not self._store.check([_TOLD]):
            return False
        self._number = int(self._store.get(_TOLD))
        self._told_s = time.monotonic()
        self._store.set(f"{_TOLD}/{self._rank}", json.dumps(self._stop.freeze()))
        return True

    @property
    def exit_code(self) -> int:
        """Of a process that ends for what :meth:`poll` returned."""
        return 128 + (self._number or signal.SIGTERM)

    def _name(self) -> str:
        return f"terminated by {signal.Signals(self._number or signal.SIGTERM).name}"
