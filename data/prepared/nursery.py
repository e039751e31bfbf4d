"""Worker processes that are forked from one which has imported, once, what they need.

Importing NumPy, Arrow and the features takes longer than preparing 100,000 rows. So a process is started that does
nothing else, the *nursery*, while its parent still reads the configuration; a worker is a fork of it and ready at once.
The nursery has one thread and holds no data, so that forking is safe there, which it is not in the parent: that one
may have threads of its own, a model or a GPU.

What workers need is imported there by name: nothing of the parent's main module, as multiprocessing would.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection
from types import ModuleType
from typing import NoReturn

from data.errors import DataError

_ORDER = struct.Struct("<cq")
_ANSWER = struct.Struct("<q")
_FORK, _KILL, _WAIT = b"f", b"k", b"w"
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from data.prepared.nursery import serve; serve()"
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of a memory pool that Arrow starts and does not use
}

Work = Callable[[Connection], None]


def ended(code: int) -> DataError:
    """What to say of a process of the pool that ended by itself with ``code``, minus a signal."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    cause = " (the machine may have run out of memory: give fewer --workers)" if code == -signal.SIGKILL else ""
    return DataError(f"a worker process was ended {how}{cause}; run the same command again: what is finished is kept")


class Nursery:
    """Handle of a nursery. It is started at once and ends, with all workers, when it is closed or this process ends."""

    def __init__(self, work: str, preload: Sequence[str] = ()) -> None:
        """Does not wait.

        Args:
            work: ``module:function`` that a worker calls with its end of a pipe.
            preload: modules to import besides.
        """
        ours, theirs = socket.socketpair()
        # Of this pipe nobody writes the other end: it is at its end when this process is gone, however it went.
        life, self._life = os.pipe()
        self._control, self._unanswered, self._forked = ours, 0, False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno()), str(life), work, *preload],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), life),
            env=os.environ | _ONE_THREAD,
            process_group=0,  # Ctrl-C reaches the whole group; the parent decides what becomes of workers
        )
        theirs.close()
        os.close(life)

    def fork(self) -> Connection:
        """A worker's pipe; what is sent through it waits until the worker is there.

        Raises:
            DataError: the nursery was ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._unanswered, self._forked = self._unanswered + 1, True
            try:
                socket.send_fds(self._control, [_ORDER.pack(_FORK, 0)], [theirs.fileno()])
            except OSError:
                raise ended(self._process.wait()) from None
        return Connection(ours.detach())

    def number(self) -> int:
        """Process number of the first forked worker that was not asked for yet; waits until it is there."""
        self._unanswered -= 1
        return self._answer()

    def wait(self, number: int, *, kill: bool) -> int:
        """Exit code of a worker that ends, or is killed; minus the signal that ended it."""
        assert not self._unanswered, "numbers come first"
        try:
            self._control.sendall(_ORDER.pack(_KILL if kill else _WAIT, number))
        except OSError:
            raise ended(self._process.wait()) from None
        return self._answer()

    def close(self) -> None:
        """Ends the nursery and all of its workers, whatever they do. Again it does nothing."""
        if self._control.fileno() < 0:
            return
        if not self._forked:
            self._process.kill()  # it may not have imported all yet
        self._control.close()  # it kills them, and ends
        os.close(self._life)
        self._process.wait()

    def _answer(self) -> int:
        try:
            found = self._control.recv(_ANSWER.size, socket.MSG_WAITALL)
        except OSError:
            raise ended(self._process.wait()) from None
        if len(found) < _ANSWER.size:
            raise ended(self._process.wait())
        return int(_ANSWER.unpack(found)[0])


def serve() -> NoReturn:
    """Runs in the nursery: imports, then does what it is told until its parent is gone."""
    control_fd, life, work, *preload = sys.argv[2:]
    control, workers = socket.socket(fileno=int(control_fd)), set[int]()
    module, _, name = work.partition(":")
    function: Work = getattr(importlib.import_module(module), name)
    for other in preload:
        importlib.import_module(other)
    _do_without_pandas()
    try:
        while not _obey(control, workers, function, int(life)):
            pass
    except ConnectionError:  # the parent is gone, or does not wait for what it asked for
        pass
    for number in workers:
        os.kill(number, signal.SIGKILL)
    for number in workers:
        os.waitpid(number, 0)  # when the nursery has ended, nobody writes any more
    os._exit(0)


def _obey(control: socket.socket, workers: set[int], function: Work, life: int) -> bool:
    """Does one thing that the parent asks for; whether it asks for no more."""
    order, descriptors, _, _ = socket.recv_fds(control, _ORDER.size, 1)
    if len(order) < _ORDER.size:
        return True
    kind, answer = _ORDER.unpack(order)
    if kind == _FORK:
        answer = os.fork()
        if not answer:
            control.close()
            _work(function, descriptors[0], life)
        workers.add(answer)
        os.close(descriptors[0])
    else:
        if kind == _KILL:
            os.kill(answer, signal.SIGKILL)
        workers.discard(answer)
        answer = os.waitstatus_to_exitcode(os.waitpid(answer, 0)[1])
    control.sendall(_ANSWER.pack(answer))
    return False


def _work(function: Work, pipe: int, life: int) -> NoReturn:
    """Runs in a worker."""

    def end_with_parent() -> None:
        os.read(life, 1)
        os._exit(1)

    # Without the nursery, too: a worker must not go on writing beside those of a second run.
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        function(Connection(pipe))
    finally:
        sys.stderr.flush()
        os._exit(0)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("workers have no frames", name="pandas")


def _do_without_pandas() -> None:
    """Arrow imports pandas with the first array that it converts, 0.4 s and 40 MiB, unless it is not found then."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pyarrow.array([0])
    finally:
        sys.meta_path.remove(finder)
