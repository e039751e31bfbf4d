"""Two machines on one: network namespaces, joined by a slow and lossy link, train together; the link is cut.

    python benchmarks/faults_network.py --out docs/results/faults-network

Needs root (or CAP_NET_ADMIN), iproute2 and /dev/net/tun. The link is a program between two tun devices that holds every
packet back and drops some of them, both ways: kernels without netem (CONFIG_NET_SCH_NETEM) have no other, and TCP
cannot tell. torchrun starts one rank in each namespace. A first run is left alone; in a second one the link is cut in
the middle, and both sides must end within the bound, each saying why; then the link is mended, the same commands are
given again, and the run goes on by itself. Rows are audited by their ids, and the result must be, bit for bit, the
first one.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults import CHECKOUT, END_S, ID, SETTINGS, STEPS, VARIANTS, Suite, audit, differences

from erase_rec import environment
from erase_rec.cli.main import run
from erase_rec.errors import UserError

SIDES = ("erase-a", "erase-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "link0"
PORT = 29500
PATIENCE_S = 400.0
TIMEOUT_S = 12.0
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass
class Link:
    """Carries packets between two tun devices, late and with losses, from a thread.

    Attributes:
        delay_s: of each packet.
        jitter_s: up to so much more, at random; packets may overtake each other.
        loss: share of packets that are dropped.
        is_cut: none arrives.
        carried: packets that arrived.
        dropped: packets that did not, cuts aside.
    """

    ends: tuple[int, int]
    delay_s: float
    jitter_s: float
    loss: float
    seed: int
    is_cut: bool = False
    carried: int = 0
    dropped: int = 0
    closed: bool = False
    _due: list[tuple[float, int, int, bytes]] = field(default_factory=list)

    def work(self) -> None:
        """Until it is closed."""
        rng, number = random.Random(self.seed), 0
        while not self.closed:
            wait_s = min(0.05, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.05
            for end in select.select(self.ends, [], [], wait_s)[0]:
                packet = os.read(end, 65536)
                if self.is_cut:
                    continue
                if rng.random() < self.loss:
                    self.dropped += 1
                    continue
                number += 1
                other = self.ends[1 - self.ends.index(end)]
                due_s = time.monotonic() + self.delay_s + rng.uniform(0, self.jitter_s)
                heapq.heappush(self._due, (due_s, number, other, packet))
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(self._due)
                if not self.is_cut:
                    os.write(other, packet)
                    self.carried += 1


@contextmanager
def namespaces(delay_s: float, jitter_s: float, loss: float, seed: int) -> Iterator[Link]:
    """Two of them and their link; gone at the end.

    Raises:
        UserError: the kernel or our rights do not allow it; says what was refused.
    """
    with ExitStack() as stack:
        ends = []
        for side, address in zip(SIDES, ADDRESSES, strict=True):
            ip("netns", "add", side)
            stack.callback(ip, "netns", "del", side)
            ends.append(tun(side))
            stack.callback(os.close, ends[-1])
            ip("-n", side, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", side, "link", "set", DEVICE, "up")
            ip("-n", side, "link", "set", "lo", "up")
        link = Link((ends[0], ends[1]), delay_s, jitter_s, loss, seed)
        carrier = threading.Thread(target=link.work, daemon=True)
        carrier.start()
        try:
            yield link
        finally:
            link.closed = True
            carrier.join()


def ip(*arguments: str) -> None:
    """iproute2."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"ip {' '.join(arguments)}: {result.stderr.strip()}; this needs root and iproute2")


def tun(side: str) -> int:
    """A new device in a namespace; what is read from its descriptor was sent there, what is written arrives there."""
    made: list[int | OSError] = []

    def make() -> None:  # in a thread of its own, which is left behind in that namespace
        try:
            with open(f"/run/netns/{side}", "rb") as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            descriptor = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
            made.append(descriptor)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise UserError(f"no tun device in namespace {side}: {made[0]}")
    return made[0]


class Pair:
    """The two sides of one start, each under a torchrun of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        """Starts both on run ``name``, anew or on what there is of it."""
        self.number = len(list(folder.glob(f"{name}.attempt-*")))
        self.output = folder / f"{name}.attempt-{self.number}"
        self.output.mkdir()
        files = ("data.train=rows/train-00000.csv", "data.eval=rows/eval.csv")
        files += (f"run.name={name}", f"distributed.timeout_s={TIMEOUT_S}")
        overrides = dict(each.split("=", 1) for each in (*SETTINGS, *VARIANTS["whole tables"], *files))
        program = [str(CHECKOUT / "benchmarks" / "faults_rank.py"), str(self.output / "record"), ID]
        self._sides = []
        for rank, side in enumerate(SIDES):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                *("--node-rank", str(rank), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)),
                *("--rdzv-id", name),
            ]
            arguments = [
                *program,
                "--config",
                "ctr_criteo.yaml",
                *(f"{key}={value}" for key, value in overrides.items()),
            ]
            with (self.output / f"side-{rank}").open("wb") as said:
                self._sides.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", side, *torchrun, *arguments],
                        cwd=folder,
                        stdout=said,
                        stderr=said,
                        env=os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"},
                    )
                )

    @property
    def record(self) -> Path:
        """What the names of the ranks' records begin with."""
        return self.output / "record-0"

    def ended(self) -> list[int | None]:
        """Exit codes so far."""
        return [side.poll() for side in self._sides]

    def wait(self, limit_s: float) -> list[float]:
        """Seconds until each side ended.

        Raises:
            UserError: one did not; both are killed.
        """
        start_s = time.monotonic()
        took: dict[int, float] = {}
        while len(took) < len(self._sides):
            for rank, code in enumerate(self.ended()):
                if code is not None:
                    took.setdefault(rank, round(time.monotonic() - start_s, 1))
            if time.monotonic() > start_s + limit_s:
                for side in self._sides:
                    side.kill()
                late = ", ".join(str(rank) for rank in range(len(self._sides)) if rank not in took)
                raise UserError(f"side {late} does not end within {limit_s:g} s, see {self.output}")
            time.sleep(0.05)
        return [took[rank] for rank in range(len(self._sides))]

    def errors(self) -> list[list[str]]:
        """What each side said was wrong."""
        lines = [(self.output / f"side-{rank}").read_text().splitlines() for rank in range(len(self._sides))]
        return [[line for line in said if line.startswith("error:")] for said in lines]


def at_step(folder: Path, name: str, step: int, pair: Pair) -> None:
    """Waits until a run has logged ``step``."""
    log, give_up_s = folder / "runs" / name / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not (log.exists() and f'"step": {step}' in log.read_text()):
        if pair.ended() != [None, None] or time.monotonic() > give_up_s:
            raise UserError(f"the run does not come to step {step}: {pair.ended()}, {pair.errors()}, see {pair.output}")
        time.sleep(0.05)


def main(
    delay_ms: Annotated[float, typer.Option(min=0, help="One way.")] = 10.0,
    jitter_ms: Annotated[float, typer.Option(min=0, help="Up to so much more, at random.")] = 5.0,
    loss_pct: Annotated[float, typer.Option(min=0, max=50, help="Packets dropped, each way.")] = 1.0,
    cut_after: Annotated[int, typer.Option(min=5, max=STEPS - 5, help="Step, a multiple of five.")] = 10,
    seed: Annotated[int, typer.Option(help="Of delays and losses.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json.")] = None,
) -> None:
    """Train over the link, cut it, mend it, go on, audit; code 2 where anything is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="faults-network-"))
    suite = Suite(folder)
    with namespaces(1e-3 * delay_ms, 1e-3 * jitter_ms, 1e-2 * loss_pct, seed) as link:
        undisturbed = Pair(folder, "whole")
        whole_s = max(undisturbed.wait(PATIENCE_S))
        wrong = [] if undisturbed.ended() == [0, 0] else [f"the undisturbed run fails: {undisturbed.errors()}"]
        whole_carried, whole_dropped = link.carried, link.dropped
        first = Pair(folder, "cut")
        at_step(folder, "cut", cut_after, first)
        link.is_cut = True
        ended_s = first.wait(TIMEOUT_S + END_S)
        codes, said = first.ended(), first.errors()
        link.is_cut = False
        again = Pair(folder, "cut")
        again.wait(PATIENCE_S)
    if 0 in codes:
        wrong.append(f"a side ended as if all were well: {codes}")
    wrong += [f"side {rank} did not say why it ended" for rank, lines in enumerate(said) if not lines]
    if again.ended() != [0, 0]:
        wrong.append(f"does not go on: {again.errors()}")
    else:
        wrong += audit([first.record, again.record]) + differences(suite.result("cut"), suite.result("whole"))
    found = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "environment": environment.describe(),
        "link": {"delay_ms": delay_ms, "jitter_ms": jitter_ms, "loss_pct": loss_pct, "seed": seed},
        "undisturbed": {"seconds": whole_s, "packets": whole_carried, "dropped": whole_dropped},
        "cut": {"after_step": cut_after, "timeout_s": TIMEOUT_S, "ended_s": ended_s, "codes": codes, "said": said},
        "wrong": wrong,
    }
    print(json.dumps({key: value for key, value in found.items() if key != "environment"}, indent=2))
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if wrong:
        raise UserError("\n".join([f"{len(wrong)} things are wrong, see {folder}:", *wrong]))
    shutil.rmtree(folder)


if __name__ == "__main__":
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(main)
    run(program)
