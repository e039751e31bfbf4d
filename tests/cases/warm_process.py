"""Processes as ``python ...`` starts them, forked from one that has loaded torch and what commands import.

A new interpreter takes seconds of a core to load torch; a fork takes none. A process from here is one of its own, with
its own signals, exit code, folder, environment and output. What it is no proof of is how the imports went, nor another
hash seed: tests of these, and of torchrun itself, start an interpreter.

The server has one thread. Forked from a test's process, a child can hang for ever: threads that run there (of a store,
of autograd, of earlier groups) may hold locks that nobody releases in the child.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

_IMPORTED_ONCE = ["torch", "torchrec", "fbgemm_gpu", "pytest", "erase_rec.api.assembly", "erase_rec.cli.main"]
OUTPUT = ("stdout", "stderr")


@cache
def server() -> ForkServerContext:
    """Where processes are forked; its own numpy starts no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OPENBLAS_NUM_THREADS", "1")
        first = context.Process(target=os.getpid)  # starts the server
        first.start()
        first.join()
    return context


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of ``size`` on one machine, whose store is at ``port``."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: str(number) for name, number in numbers.items()} | texts


class Running:
    """A started process; a part of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Exit code, waited for so many seconds; TimeoutExpired after them."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm process", timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        os.kill(self.pid, number)


@contextmanager
def started(
    cwd: Path, arguments: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """``python *arguments`` at work in ``cwd``; killed at the end. Appends to ``stdout`` and ``stderr`` in ``output``.

    ``environment`` is put over this process's.
    """
    given = dict(os.environ) | dict(environment or {})
    process = server().Process(target=_main, args=(str(cwd), list(arguments), str(output), given))
    process.start()
    try:
        yield Running(process)
    finally:
        process.kill()
        process.join()


def run(
    cwd: Path, *arguments: str, ranks: int = 1, expect: int = 0, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` to its end, on ranks as torchrun starts them; all must end with this exit code."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = [
            stack.enter_context(
                started(cwd, arguments, output, rank_environment(rank, ranks, store.port) if store else None)
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout_s
        codes = [process.wait(max(deadline - time.monotonic(), 0.0)) for process in processes]
        stdout, stderr = ((output / name).read_text() for name in OUTPUT)
    assert codes == [expect] * ranks, stdout + stderr
    return subprocess.CompletedProcess(arguments, expect, stdout, stderr)


def _main(cwd: str, arguments: list[str], output: str, environment: dict[str, str]) -> None:
    """In the child: becomes the interpreter that was asked for."""
    for number, name in enumerate(OUTPUT, start=1):
        file = os.open(os.path.join(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
        stream = getattr(sys, name)
        stream.reconfigure(encoding="utf-8", line_buffering=name == "stderr")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, cwd)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
