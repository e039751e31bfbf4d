"""Serves an export over HTTP: ``python examples/serve/serve.py EXPORT``; what it offers is in ``docs/serve.md``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import prometheus_client as prometheus
import torch
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from micro_batches import MicroBatches, OverloadedError
from scorer import Predictions, RowError, Scorer
from starlette.requests import ClientDisconnect

from erase_rec.errors import UserError

BODY_S = 10.0
"""Longest time that the body of a request may take to arrive."""
SHUTDOWN_S = 30
"""Longest time that accepted requests have to end after SIGTERM."""
RETRY_AFTER_S = 1
CLIENT_GONE = 499
"""What ``/metrics`` counts a request as whose client went away before it had sent all of it; the habit of nginx."""
_LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Limits:
    """What the server takes.

    Attributes:
        max_batch_rows: rows that are scored together.
        max_wait_s: how long a row waits for others.
        max_pending_rows: rows that wait or are being scored; further requests are answered with 503.
        max_request_rows: rows of a request.
        max_body_bytes: of a request.
    """

    max_batch_rows: int = 256
    max_wait_s: float = 0.002
    max_pending_rows: int = 1024
    max_request_rows: int = 256
    max_body_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_request_rows > self.max_pending_rows:
            raise UserError(
                f"--max-request-rows: {self.max_request_rows} is more than may be pending "
                f"(--max-pending-rows {self.max_pending_rows}): such a request would never be taken"
            )


class Metrics:
    """What ``/metrics`` shows, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "erase_rec_requests", "Requests to /predict by status code.", ["status"], registry=self.registry
        )
        self.latency = prometheus.Histogram(
            "erase_rec_request_seconds",
            "Seconds from a request's arrival to its answer, of accepted requests.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.batch_rows = prometheus.Histogram(
            "erase_rec_batch_rows", "Rows that were scored together.", buckets=_ROW_BUCKETS, registry=self.registry
        )
        self.pending = prometheus.Gauge(
            "erase_rec_pending_rows", "Rows that wait or are being scored.", registry=self.registry
        )
        self.rejected = prometheus.Counter(
            "erase_rec_rejected", "Requests that were refused for want of room.", registry=self.registry
        )


class Service:
    """Takes a request apart, has its rows scored with those of others, and counts."""

    def __init__(self, scorer: Scorer, limits: Limits) -> None:
        """Starts nothing yet."""
        self.scorer, self.limits, self.metrics = scorer, limits, Metrics()
        self.batches: MicroBatches[Predictions | RowError] = MicroBatches(
            scorer.score,
            max_rows=limits.max_batch_rows,
            max_wait_s=limits.max_wait_s,
            max_pending_rows=limits.max_pending_rows,
            observe=self.metrics.batch_rows.observe,
        )
        self.metrics.pending.set_function(lambda: self.batches.pending_rows)
        self._in_flight = 0

    async def predict(self, request: Request) -> Predictions:
        """Answers ``/predict``.

        Raises:
            HTTPException: with one sentence on what is wrong.
        """
        # A request has at least a row: so many are pending at least, and more bodies need not be read.
        if self._in_flight >= self.limits.max_pending_rows:
            raise self._overloaded()
        self._in_flight += 1
        try:
            rows = self._rows(await self._body(request))
            self.scorer.refuse_malformed(rows)
            answer = await self.batches.submit(rows)
        except RowError as error:
            raise HTTPException(422, str(error)) from None
        except OverloadedError:
            raise self._overloaded() from None
        finally:
            self._in_flight -= 1
        if isinstance(answer, RowError):
            raise HTTPException(422, str(answer))
        return answer

    def _overloaded(self) -> HTTPException:
        self.metrics.rejected.inc()
        return HTTPException(503, "overloaded; try again later", headers={"Retry-After": str(RETRY_AFTER_S)})

    async def _body(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes
        too_large = HTTPException(413, f"the body is larger than {limit:,} bytes; send fewer rows a request")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {BODY_S:.0f} seconds") from None
        return bytes(body)

    def _rows(self, body: bytes) -> list[Any]:
        try:
            content = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, f"the body is not JSON: {error}") from None
        rows = content.get("rows") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not rows:
            raise HTTPException(422, 'expected {"rows": [{"column": value, ...}, ...]} with at least one row')
        if len(rows) > self.limits.max_request_rows:
            raise HTTPException(413, f"found {len(rows):,} rows, expected at most {self.limits.max_request_rows:,}")
        return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON; send null where a value is missing")


def create_app(scorer: Scorer, limits: Limits) -> FastAPI:
    """The application; requests are taken from its start to its shutdown."""
    service = Service(scorer, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batches.start()
        yield
        await service.batches.stop()

    # Its interactive pages load scripts from elsewhere.
    app = FastAPI(title="erase-rec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        start = time.perf_counter()
        try:
            answer = await service.predict(request)
        except HTTPException as error:
            service.metrics.requests.labels(str(error.status_code)).inc()
            raise
        except ClientDisconnect:
            service.metrics.requests.labels(str(CLIENT_GONE)).inc()
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        except Exception:
            logging.exception("a request failed")
            service.metrics.requests.labels("500").inc()
            return JSONResponse({"detail": "internal error"}, status_code=500)
        service.metrics.requests.labels("200").inc()
        service.metrics.latency.observe(time.perf_counter() - start)
        return JSONResponse({"probabilities": answer.probabilities, "logits": answer.logits})

    @app.get("/model")
    async def model() -> dict[str, Any]:
        manifest = scorer.folder.manifest
        return {"columns": scorer.columns, "origin": manifest.origin.model_dump()}

    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = service.batches.running
        return PlainTextResponse("ready" if ready else "not ready", status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        content = prometheus.generate_latest(service.metrics.registry)
        return Response(content, media_type=prometheus.CONTENT_TYPE_LATEST)

    return app


def main(
    export: Annotated[Path, typer.Argument(help="A folder that erase-rec export wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen on; beware of others than this machine's own.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8080,
    max_batch_rows: Annotated[int, typer.Option(min=1, help="Rows that are scored together.")] = 256,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long a row waits for others.")] = 2.0,
    max_pending_rows: Annotated[int, typer.Option(min=1, help="More rows than these are answered with 503.")] = 1024,
    max_request_rows: Annotated[int, typer.Option(min=1, help="Rows of a request.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Size of a request.")] = 1 << 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 1,
) -> None:
    """Serve an export until SIGTERM or Ctrl-C; what was accepted is answered before the end."""
    if not math.isfinite(max_wait_ms):
        raise UserError(f"--max-wait-ms: expected a finite number, found {max_wait_ms}")
    torch.set_num_threads(threads)
    # So that the thread that scores soon gives way to the one that takes requests and refuses them; by default 0.005.
    sys.setswitchinterval(0.001)
    limits = Limits(max_batch_rows, max_wait_ms / 1000, max_pending_rows, max_request_rows, max_body_bytes)
    app = create_app(Scorer.open(export), limits)
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise UserError(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    with listener:
        bound_host, bound_port = listener.getsockname()[:2]
        print(f"serving {export} at http://{bound_host}:{bound_port}", flush=True)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S, timeout_keep_alive=30
        )
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
