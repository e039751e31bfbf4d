"""Load test of the server on this machine: ``python examples/serve/load_test.py EXPORT ROWS.parquet --out load.json``.

Starts ``serve.py`` on a free local port and finds out how many requests a second it can answer (closed loop: a fixed
number of clients, as many as may be pending, each waits for its answer). Then it offers shares of that, and more than
that (open loop: requests start by the clock, whether or not earlier ones were answered, so that waiting in the client
does not hide the server's). Client and server share the machine's cores: alone, the server can do more.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import typer

HOST = "127.0.0.1"
LONGEST_S = 60.0
MOST_REQUESTS = 100_000
SHARES = (0.25, 0.5, 4.0)
"""Offered rates, in parts of what the closed loop came to."""
_SERVER = Path(__file__).with_name("serve.py")


@dataclass(frozen=True)
class Phase:
    """What came out of a phase.

    Attributes:
        kind: ``closed`` or ``open``.
        offered_per_s: requests that were started a second; of a closed loop, those that were answered.
        answered_per_s: requests that got predictions, a second.
        statuses: how often each status code came; ``error`` where none did.
        latency_ms: percentiles over requests that got predictions, from the moment when they were due.
        refused_latency_ms: the same of those that were refused with 503.
        late_starts: requests of the open loop that this client started more than 10 ms late.
    """

    kind: str
    offered_per_s: float
    answered_per_s: float
    statuses: dict[str, int]
    latency_ms: dict[str, float]
    refused_latency_ms: dict[str, float]
    late_starts: int


class Recorder:
    """Statuses and latencies of a phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self.late = 0

    async def request(self, port: int, body: bytes, due: float) -> None:
        """Sends one request that was due at ``due`` (``time.perf_counter``)."""
        try:
            status = await asyncio.wait_for(_post(port, body), LONGEST_S)
        except (OSError, TimeoutError):
            status = "error"
        self._seconds.setdefault(status, []).append(time.perf_counter() - due)

    def phase(self, kind: str, seconds: float) -> Phase:
        """What was recorded in a phase of that length."""
        statuses = Counter({status: len(found) for status, found in self._seconds.items()})
        return Phase(
            kind=kind,
            offered_per_s=round(sum(statuses.values()) / seconds, 1),
            answered_per_s=round(statuses["200"] / seconds, 1),
            statuses=dict(statuses),
            latency_ms=_percentiles(self._seconds.get("200", [])),
            refused_latency_ms=_percentiles(self._seconds.get("503", [])),
            late_starts=self.late,
        )


async def _post(port: int, body: bytes) -> str:
    """The status of one request on a connection of its own.

    No client library: a pool of connections looks through all that are open whenever one more is wanted, and so keeps
    no clock where many are.
    """
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"POST /predict HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    return answer.split(maxsplit=2)[1].decode() if answer else "error"


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, (50, 90, 99, 100))
    return dict(zip(("p50", "p90", "p99", "max"), np.round(values, 2).tolist(), strict=True))


async def closed_loop(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> Phase:
    """``clients`` requests at any time, for ``seconds``."""
    recorder, start = Recorder(), time.perf_counter()

    async def one(number: int) -> None:
        at = number
        while (now := time.perf_counter()) < start + seconds and at < MOST_REQUESTS:
            await recorder.request(port, bodies[at % len(bodies)], now)
            at += clients

    await asyncio.gather(*map(one, range(clients)))
    return recorder.phase("closed", time.perf_counter() - start)


async def open_loop(port: int, bodies: Sequence[bytes], per_s: float, seconds: float) -> Phase:
    """``per_s`` requests a second for ``seconds``, and what became of all of them."""
    recorder, start = Recorder(), time.perf_counter()
    tasks = []
    count = min(int(per_s * seconds), MOST_REQUESTS)
    for number in range(count):
        due = start + number / per_s
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        elif left < -0.01:
            recorder.late += 1
            await asyncio.sleep(0)  # answers are taken in the meantime
        tasks.append(asyncio.create_task(recorder.request(port, bodies[number % len(bodies)], due)))
    offered_s = time.perf_counter() - start
    await asyncio.gather(*tasks)
    return recorder.phase("open", offered_s)


async def measure(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> list[Phase]:
    """Warms the server up, then runs all phases."""
    await closed_loop(port, bodies, clients, min(1.0, seconds))
    phases = [await closed_loop(port, bodies, clients, seconds)]
    capacity = phases[0].answered_per_s
    for share in SHARES:
        phases.append(await open_loop(port, bodies, share * capacity, seconds))
    return phases


@contextmanager
def server(export: Path, options: Sequence[str]) -> Any:
    """The URL of a server that lives until the block ends."""
    command = [sys.executable, str(_SERVER), str(export), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(process.wait())  # it has said why
            yield line.split()[-1]
        finally:
            process.terminate()


def bodies_of(path: Path, columns: Sequence[str], rows_a_request: int, requests: int = 64) -> list[bytes]:
    """Requests of the first rows of a Parquet file."""
    rows = pq.read_table(path, columns=list(columns)).slice(0, rows_a_request * requests).to_pylist()
    parts = [rows[start : start + rows_a_request] for start in range(0, len(rows), rows_a_request)]
    return [json.dumps({"rows": [_plain(row) for row in part]}).encode() for part in parts]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no nan."""
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}


def main(
    export: Annotated[Path, typer.Argument(help="A folder that erase-rec export wrote.")],
    rows: Annotated[Path, typer.Argument(help="A Parquet file of rows as the server takes them.")],
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    seconds: Annotated[float, typer.Option(min=0.5, max=LONGEST_S, help="Of a phase.")] = 5.0,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Of the closed loop.")] = 16,
    rows_a_request: Annotated[int, typer.Option(min=1, max=256)] = 1,
    max_pending_rows: Annotated[int, typer.Option(min=1, help="Of the server.")] = 16,
) -> None:
    """Measure latency, throughput and behaviour at overload, on localhost only."""
    options = ["--max-pending-rows", str(max_pending_rows), "--max-request-rows", str(min(256, max_pending_rows))]
    load = os.getloadavg()
    with server(export, options) as url:
        columns = httpx.get(f"{url}/model").json()["columns"]
        port = httpx.URL(url).port
        assert port is not None
        phases = asyncio.run(measure(port, bodies_of(rows, columns, rows_a_request), clients, seconds))
    settings = {"rows_a_request": rows_a_request, "clients": clients, "max_pending_rows": max_pending_rows}
    machine = {"cores": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()}
    result = {"settings": settings, "machine": machine, "phases": [asdict(phase) for phase in phases]}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for phase in phases:
        typer.echo(
            f"{phase.kind:6}  offered {phase.offered_per_s:8.1f}/s  answered {phase.answered_per_s:8.1f}/s  "
            f"{phase.statuses}  latency ms {phase.latency_ms}  refused ms {phase.refused_latency_ms}"
        )


if __name__ == "__main__":
    typer.run(main)
