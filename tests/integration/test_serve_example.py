"""``examples/serve``: the predictions of the trainer over HTTP, and what happens when too much or nonsense comes in."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import export_cases
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from fastapi import FastAPI
from in_process import call

from erase_rec.api.predictor import Predictor
from erase_rec.errors import UserError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve"
sys.path.insert(0, str(EXAMPLE))

from scorer import Predictions, RowError, Scorer  # noqa: E402
from serve import Limits, create_app  # noqa: E402

ROWS = export_cases.json_rows(export_cases.rows(5, 40))
WAIT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run ``runs/r`` and its export ``served``."""
    folder = tmp_path_factory.mktemp("serve")
    export_cases.train(folder)
    call(folder, "export", "--checkpoint", "runs/r", "--out", "served")
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Scorer:
    return Scorer.open(folder / "served")


@pytest.fixture
def client(scorer: Scorer) -> Iterator[httpx.Client]:
    with serving(create_app(scorer, Limits(max_request_rows=50, max_body_bytes=100_000))) as client:
        yield client


class Held:
    """A scorer that waits until it is let go; knows the sizes of the batches that it was given."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self.go, self.batches = scorer, threading.Event(), list[list[int]]()
        self.folder, self.columns, self.refuse_malformed = scorer.folder, scorer.columns, scorer.refuse_malformed

    def score(self, requests: Sequence[Any]) -> list[Predictions | RowError]:
        self.batches.append([len(rows) for rows in requests])
        assert self.go.wait(WAIT_S)
        return self._scorer.score(requests)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def serving(app: FastAPI, lifespan: Literal["on", "off"] = "on") -> Iterator[httpx.Client]:
    """A client of the application, which runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan=lifespan))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=WAIT_S) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
    assert not thread.is_alive()


def post(client: httpx.Client, rows: Any) -> httpx.Response:
    return client.post("/predict", json={"rows": rows})


def metric(client: Any, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_predictions_are_the_trainers(folder: Path, client: httpx.Client) -> None:
    frame = export_cases.rows(5, 40)
    expected = Predictor.load(folder / "runs" / "r", device="cpu").predict(frame)
    answer = post(client, ROWS).json()
    assert answer["probabilities"] == pytest.approx(expected["prediction"].tolist(), abs=1e-6)
    assert answer["logits"] == pytest.approx(expected["logit"].tolist(), abs=1e-5)
    assert expected["prediction"].std() > 0.001, "equal because the model knows nothing"


def test_rows_alone_and_together_get_the_same(scorer: Scorer) -> None:
    """The first request holds the scorer; the others come meanwhile and are one batch."""
    held = Held(scorer)
    with serving(create_app(held, Limits())) as client, ThreadPoolExecutor(12) as pool:  # type: ignore[arg-type]
        parts = [ROWS[:1], *(ROWS[start : start + 3] for start in range(1, 31, 3))]
        answers = [pool.submit(post, client, parts[0])]
        until(lambda: len(held.batches) == 1)
        answers += [pool.submit(post, client, part) for part in parts[1:]]
        until(lambda: metric(client, "erase_rec_pending_rows") == 31)
        held.go.set()
        together = [answer.result().json() for answer in answers]
        assert held.batches == [[1], [3] * 10]
        assert metric(client, 'erase_rec_batch_rows_bucket{le="32.0"}') == 2
        assert metric(client, 'erase_rec_requests_total{status="200"}') == 11
        assert metric(client, "erase_rec_request_seconds_count") == 11
    with serving(create_app(scorer, Limits(max_batch_rows=1))) as client:
        for part, answer in zip(parts, together, strict=True):
            alone = [post(client, [row]).json()["probabilities"][0] for row in part]
            assert answer["probabilities"] == pytest.approx(alone, abs=1e-6)


def test_overload_is_answered_at_once(scorer: Scorer) -> None:
    """While nothing comes out, ten rows are taken and the rest is refused; then all that was taken is answered."""
    held = Held(scorer)
    limits = Limits(max_batch_rows=4, max_pending_rows=10, max_request_rows=10)
    with serving(create_app(held, limits)) as client, ThreadPoolExecutor(10) as pool:  # type: ignore[arg-type]
        accepted = [pool.submit(post, client, [row]) for row in ROWS[:9]]
        until(lambda: metric(client, "erase_rec_pending_rows") == 9)
        for rows in (ROWS[:2], ROWS[:10]):
            refused = post(client, rows)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json() == {"detail": "overloaded; try again later"}
        accepted.append(pool.submit(post, client, [ROWS[9]]))
        until(lambda: metric(client, "erase_rec_pending_rows") == 10)
        assert post(client, [ROWS[0]]).status_code == 503
        assert not any(answer.done() for answer in accepted)
        assert metric(client, "erase_rec_rejected_total") == 3
        held.go.set()
        assert [answer.result().status_code for answer in accepted] == [200] * 10
        assert metric(client, "erase_rec_pending_rows") == 0
        assert post(client, [ROWS[0]]).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"age": "old"},
            "row 1: column 'age': found text 'old', expected a number as in the rows before; send one type",
        ),
        ({"slot": 5}, "row 1: column 'slot': found id '5', expected a whole number from 0 to 4"),
        ({"slot": -1}, "row 1: column 'slot': found id '-1', expected a whole number from 0 to 4"),
        ({"city": {"a": 1}}, "row 1: column 'city': found an object, expected text, a number, true, false or null"),
        ({"city": ["Rome"]}, "row 1: column 'city': found a list, expected text"),
        ({"terms": [["x"]]}, "row 1: column 'terms': found a list, expected text, a number, true, false or null, or"),
        ({"shares": [1.0, 2.0, 3.0, 4.0, 5.0]}, "row 1: column 'shares': found 5 weights for"),
        (
            {"city": 10**30},
            "row 1: column 'city': found a number '1000000000000000000000000000000', expected a number of 64",
        ),
        ({"age": 2**70}, "row 1: column 'age': found a number '1180591620717411303424', expected a number of 64 bits"),
        ({"city": "\ud800"}, "row 1: column 'city': found text '\\ud800', expected a number of 64 bits, or valid text"),
        ({"tags": 7}, "row 1: column 'tags': found a number '7', expected text as in the rows before"),
        ({"terms": ["x"] * 3000, "shares": [3e38] * 3000}, "row 1: its logit is "),  # no number, which JSON cannot say
    ],
)
def test_a_malformed_row_is_named(client: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = json.dumps({"rows": [ROWS[0], ROWS[1] | change, ROWS[2]]})
    answer = client.post("/predict", content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(message)


def test_a_missing_column_is_named(client: httpx.Client) -> None:
    row = {name: value for name, value in ROWS[0].items() if name != "before"}
    assert post(client, [row]).json() == {
        "detail": "row 0: column 'before' is not there; send null where a value is missing"
    }
    assert post(client, [dict.fromkeys(ROWS[0])]).status_code == 200
    assert post(client, [ROWS[0] | {"more": {"is": "ignored"}}]).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "the body is not JSON"),
        (b"\xff", 422, "the body is not JSON"),
        (b'{"rows": [{"age": NaN}]}', 422, "the body is not JSON: NaN is no JSON; send null"),
        (b"[" * 50_000, 422, "the body is not JSON"),
        (b'{"rows": ' + b"9" * 5000 + b"}", 422, "the body is not JSON"),
        (b"[]", 422, 'expected {"rows"'),
        (b'{"rows": []}', 422, 'expected {"rows"'),
        (b'{"rows": [7]}', 422, "row 0: found a number, expected an object"),
        (b'{"rows": [' + b",".join([b"1"] * 51) + b"]}", 413, "found 51 rows, expected at most 50"),
        (b" " * 100_001, 413, "the body is larger than 100,000 bytes"),
    ],
)
def test_bodies_that_are_none(client: httpx.Client, body: bytes, status: int, message: str) -> None:
    answer = client.post("/predict", content=body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(message)
    streamed = client.post("/predict", content=iter([body]))  # of unknown length
    assert (streamed.status_code, streamed.json()) == (answer.status_code, answer.json())


def test_requests_of_one_batch_do_not_disturb_each_other(scorer: Scorer) -> None:
    """One has a bad value, one text where the others have numbers: each gets its own answer."""
    bad, texts = ROWS[1] | {"age": "old"}, ROWS[2] | {"age": "30", "slot": "4"}
    requests = [[ROWS[0]], [ROWS[3], bad], [texts], [ROWS[4] | {"tags": 7}]]
    first, second, third, fourth = scorer.score(requests)
    assert isinstance(first, Predictions)
    assert isinstance(third, Predictions)
    assert str(second).startswith("row 1: column 'age': found text 'old'")
    assert str(fourth).startswith("all rows: feature 'tags': found type int64, expected a list")
    (numbers,) = scorer.score([[ROWS[2] | {"age": 30, "slot": 4}]])
    assert third == numbers


def test_health_and_what_is_served(client: httpx.Client) -> None:
    assert client.get("/healthz").text == "ok"
    assert client.get("/readyz").status_code == 200
    model = client.get("/model").json()
    assert model["columns"][:3] == ["age", "price", "before"]
    assert model["origin"]["checkpoint"].startswith("r/step_")


def test_not_ready_before_the_start(scorer: Scorer) -> None:
    with serving(create_app(scorer, Limits()), lifespan="off") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 503
        assert post(client, ROWS[:1]).status_code == 503


def test_a_fault_of_the_scorer_is_one_requests_fault(scorer: Scorer) -> None:
    class Faulty(Held):
        def score(self, requests: Sequence[Any]) -> list[Predictions | RowError]:
            if not self.go.is_set():
                self.go.set()
                raise RuntimeError("of the first batch")
            return self._scorer.score(requests)

    app = create_app(Faulty(scorer), Limits())  # type: ignore[arg-type]
    with serving(app) as client:
        assert post(client, ROWS[:1]).status_code == 500
        assert post(client, ROWS[:1]).status_code == 200
        assert metric(client, "erase_rec_pending_rows") == 0


def test_a_client_that_goes_away_is_no_fault(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
    until(lambda: 'erase_rec_requests_total{status="499"} 1.0' in client.get("/metrics").text)
    assert "a request failed" not in caplog.text


def test_damaged_exports_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / "served", copy)
    file = next(copy.glob("vocabulary_*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="not the file that was written"):
        Scorer.open(copy)


def test_sigterm_answers_what_was_accepted(folder: Path) -> None:
    """The request waits for others to join it when the signal comes."""
    command = [sys.executable, str(EXAMPLE / "serve.py"), str(folder / "served"), "--port", "0"]
    options = [*command, "--max-wait-ms", "3000"]
    with subprocess.Popen(options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
            with httpx.Client(base_url=url, timeout=WAIT_S) as client, ThreadPoolExecutor(1) as pool:
                until(lambda: client.get("/readyz").status_code == 200)
                answer = pool.submit(lambda: httpx.post(f"{url}/predict", json={"rows": ROWS[:2]}, timeout=WAIT_S))
                until(lambda: metric(client, "erase_rec_pending_rows") == 2)
                os.kill(server.pid, signal.SIGTERM)
                assert answer.result().status_code == 200
                assert len(answer.result().json()["probabilities"]) == 2
            assert server.communicate(timeout=WAIT_S) == ("", "")
            assert server.returncode == -signal.SIGTERM  # by the signal, as supervisors expect it
        finally:
            server.kill()


def test_a_folder_that_is_no_export_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", str(tmp_path)])
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE / "serve.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is no export")


def test_limits_that_would_refuse_every_large_request() -> None:
    with pytest.raises(
        UserError, match=r"--max-request-rows: 20 is more than may be pending \(--max-pending-rows 10\)"
    ):
        Limits(max_pending_rows=10, max_request_rows=20)


def test_the_load_test_offers_more_than_can_be_answered(folder: Path, checkout: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "rows.parquet")
    command = [sys.executable, str(checkout / "examples/serve/load_test.py"), "served", "rows.parquet"]
    options = ["--out", "load.json", "--seconds", "0.5", "--clients", "2", "--max-pending-rows", "2"]
    subprocess.run([*command, *options], cwd=folder, check=True, timeout=240, stdout=subprocess.DEVNULL)
    closed, *opened = json.loads((folder / "load.json").read_text())["phases"]
    assert [phase["kind"] for phase in opened] == ["open"] * 3
    assert set(closed["statuses"]) == {"200"}
    assert all(set(phase["statuses"]) <= {"200", "503"} for phase in opened)
    assert sum(opened[-1]["statuses"].values()) == int(4 * closed["answered_per_s"] * 0.5)
