"""A rank that fails ends all of them soon, and the first rank says which rank and why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
import warm_process

from erase_rec.distributed.failure import Failure
from erase_rec.errors import UserError

BOUND_S = 30.0
"""Within this time of a failure every rank has ended."""

SCRIPT = """
import os, signal, sys, threading, time
import torch
from erase_rec.distributed.launch import join_world
from erase_rec.errors import UserError
from erase_rec.finite import NonFiniteLossError

def last_words():
    print("last words", flush=True)

with join_world(on_cuda=False, timeout_s=float(sys.argv[2]), grouped=False) as world:
    world.last_words = last_words
    world.barrier("start")
    os.write(1, f"started at {time.time()} on the clock\\n".encode())  # in one piece: three ranks share the output
    case = sys.argv[1]
    if case == "raise" and world.rank == 1:
        raise ValueError("tower deep: planted")
    if case == "nan" and world.rank != 1:  # both meet at the same time what rank 2 began
        raise NonFiniteLossError(8 if world.rank == 0 else 7, "the loss of deep is nan")
    if case == "user" and world.rank == 2:
        raise UserError("step 7: the loss of deep is nan")
    if case == "first" and world.rank == 0:
        raise ValueError("tower deep: planted")
    if case == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "terminate":
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    if case == "interrupt" and world.rank == 1:
        raise KeyboardInterrupt
    if case == "orphans":
        threading.Event().wait()
    if case == "blocked" and world.rank == 1:
        threading.Event().wait()
    if case == "blocked" and world.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if case == "all":
        raise UserError("data.train: no such file")
    if case == "skip" and world.rank != 1:
        world.sum("tower:cross", torch.ones(5)).wait()
    if case == "silent" and world.rank == 1:
        threading.Event().wait()
    world.sum("tower:deep", torch.ones(3000)).wait()
    world.gather_objects("loss", 1)
"""


def launch(
    folder: Path, checkout: Path, case: str, timeout_s: float = 60.0
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Three ranks under torchrun; what they said, and how long they lived after they had started."""
    script = folder / "ranks.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(checkout)!r})\n{SCRIPT}")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        str(script),
        case,
        str(timeout_s),
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    started = [float(clock) for clock in re.findall(r"started at ([0-9.]+) on the clock", result.stdout)]
    assert started, result.stderr
    return result, time.time() - max(started)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("case", "rank", "message", "code"),
    [
        ("raise", 1, "ValueError: tower deep: planted", 1),
        ("first", 0, "ValueError: tower deep: planted", 1),
        ("user", 2, "step 7: the loss of deep is nan", 2),
        ("interrupt", 1, "interrupted", 130),
    ],
)
def test_the_first_rank_says_who_failed(
    tmp_path: Path, checkout: Path, case: str, rank: int, message: str, code: int
) -> None:
    result, lived_s = launch(tmp_path, checkout, case)
    assert result.returncode != 0
    assert lived_s < BOUND_S
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        f"error: rank {rank}: {message}"
    ]
    assert result.stdout.count("last words") == 1
    assert f"rank      : {rank} (local_rank: {rank})" in result.stderr, "torchrun names the rank that failed"
    assert f"exitcode  : {code} " in result.stderr
    traceback_shown = "ranks.py" in result.stderr.partition("Traceback")[2].partition("torch/distributed/run.py")[0]
    assert traceback_shown == (code == 1), "a user's mistake needs no traceback"


@pytest.mark.timeout(150)
def test_what_all_ranks_say_is_printed_once(tmp_path: Path, checkout: Path) -> None:
    result, _ = launch(tmp_path, checkout, "all")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].endswith(": data.train: no such file")


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_others(tmp_path: Path, checkout: Path) -> None:
    result, lived_s = launch(tmp_path, checkout, "kill")
    assert result.returncode != 0
    assert lived_s < BOUND_S
    assert "Signal 9 (SIGKILL)" in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "CollectiveError: collective tower:deep at step 0 (3000 x float32): another rank has ended" in errors[0]
    assert result.stdout.count("last words") == 1


@pytest.mark.timeout(150)
def test_a_rank_that_does_not_answer_is_waited_for_no_longer_than_asked(tmp_path: Path, checkout: Path) -> None:
    result, lived_s = launch(tmp_path, checkout, "silent", timeout_s=3)
    assert result.returncode != 0
    assert lived_s < BOUND_S
    assert "did not answer within distributed.timeout_s" in result.stderr


@pytest.mark.timeout(150)
def test_ranks_that_ask_for_different_collectives_end(tmp_path: Path, checkout: Path) -> None:
    """Gloo aborts a rank that gets more than it asked for; one that is left says what became of its own collective."""
    result, lived_s = launch(tmp_path, checkout, "skip", timeout_s=5)
    assert result.returncode != 0
    assert lived_s < BOUND_S
    assert "CollectiveError: collective tower:" in result.stderr


@pytest.mark.timeout(150)
def test_ranks_that_are_told_to_end_do_so(tmp_path: Path, checkout: Path) -> None:
    result, lived_s = launch(tmp_path, checkout, "terminate")
    assert result.returncode != 0
    assert lived_s < BOUND_S
    assert re.search(r"error: rank \d: terminated by SIGTERM\n", result.stderr)


class Ranks:
    """Three ranks without torchrun, whose part is the test's."""

    def __init__(self, folder: Path, checkout: Path, case: str, timeout_s: float) -> None:
        self._folder, self._stack = folder, ExitStack()
        (folder / "ranks.py").write_text(f"import sys; sys.path.insert(0, {str(checkout)!r})\n{SCRIPT}")
        self.store: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = [
            self._stack.enter_context(
                warm_process.started(
                    folder,
                    ["ranks.py", case, str(timeout_s)],
                    folder,
                    warm_process.rank_environment(rank, 3, self.store.port),
                )
            )
            for rank in range(3)
        ]
        limit = time.monotonic() + 60
        while (folder / "stdout").exists() is False or (folder / "stdout").read_text().count("started at") < 3:
            assert time.monotonic() < limit, (folder / "stderr").read_text()
            time.sleep(0.05)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def codes(self) -> list[int]:
        """Once all have ended, which they do within the bound."""
        deadline = time.monotonic() + BOUND_S
        return [process.wait(max(deadline - time.monotonic(), 0)) for process in self._processes]

    def errors(self) -> list[str]:
        return [line for line in (self._folder / "stderr").read_text().splitlines() if line.startswith("error:")]


def test_a_signal_is_heard_while_the_main_thread_is_blocked(tmp_path: Path, checkout: Path) -> None:
    with Ranks(tmp_path, checkout, "blocked", timeout_s=300) as ranks:
        assert ranks.codes() == [143] * 3
        assert len(ranks.errors()) == 1
        assert re.match(
            r"error: rank \d: terminated by SIGTERM; rank 1 is behind, the last .* is start at", ranks.errors()[0]
        )


def test_the_rank_whose_loss_was_nan_first_is_named(tmp_path: Path, checkout: Path) -> None:
    with Ranks(tmp_path, checkout, "nan", timeout_s=60) as ranks:
        assert ranks.codes() == [2] * 3
        assert ranks.errors() == ["error: rank 2: step 7: the loss of deep is nan"]


def test_ranks_do_not_outlive_their_launcher(tmp_path: Path, checkout: Path) -> None:
    with Ranks(tmp_path, checkout, "orphans", timeout_s=2) as ranks:
        ranks.store = None  # it goes with the process that holds it
        assert ranks.codes() == [1] * 3
        said = "the launcher that holds the ranks' store is gone"
        assert sorted(ranks.errors()) == [f"error: rank {rank}: {said}" for rank in range(3)]


def test_a_failure_speaks_for_its_kind() -> None:
    assert Failure.of(1, UserError("say")) == Failure(1, "say", 2)
    assert Failure.of(1, KeyboardInterrupt()) == Failure(1, "interrupted", 130)
    noted = RuntimeError("size mismatch")
    noted.add_note("tower cross")
    assert Failure.of(0, noted) == Failure(0, "RuntimeError: size mismatch (tower cross)", 1)
