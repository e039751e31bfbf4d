"""``erase-rec dashboard`` in a real browser: Debian's chromium without a window, against TensorBoard on localhost."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import matplotlib.image
import numpy as np
import pytest
from report_cases import STEP

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.dashboard import command
from erase_rec.cli.timeline_images import draw_missing
from erase_rec.config.load import load_config
from erase_rec.errors import UserError
from erase_rec.run_log import FileRunLog

DRIVER = shutil.which("chromedriver")
RUN_COLOURS = ((0x42, 0x50, 0x66), (0x12, 0xB5, 0xCB))
"""What the Time Series dashboard draws the first two runs in."""
CUSTOM_COLOURS = ((0xFF, 0x70, 0x43), (0x00, 0x77, 0xBB))
"""The same of the Custom Scalars dashboard."""
CURVE_WIDTH = 100
"""Pixel columns: half of a chart; a legend's dot has a dozen."""
PATIENCE_S = 120
SHOWN = "^(eval/ne|throughput/qps_p90)$"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Key under which WebDriver names an element (W3C WebDriver, section 11)."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny runs, logged as training logs them; one kept a measured step."""
    folder = tmp_path_factory.mktemp("runs")
    for number, preset in enumerate(("exact", "erase")):
        config = load_config(f"ctr_{preset}.yaml", [], catalog=ContentCatalog()).config
        with FileRunLog(folder / f"of_{preset}") as log:
            log.text("config", f"preset {preset}")
            log.text("audit", f"audit of {preset} passed")
            log.hparams(config)
            for step in range(1, 21):
                ne = 0.8 + 0.2 * math.exp(-step / 8) + 0.05 * number
                log.scalars(step, {"train/ne": ne, "throughput/qps_p90": 1000 + 400 * number + 10 * (step % 4)})
                log.scalars(step, {"eval/ne": ne})
            log.final(20, {"final/ne": ne, "final/qps_p90": 1000.0 + 400 * number})
    STEP.write(folder / "of_erase")
    return folder


@contextmanager
def dashboard(checkout: Path, folder: Path) -> Iterator[str]:
    """The command as a user starts it, on a free port; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "erase_rec", "dashboard", str(folder), "--port", "0"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # Where the tests run in the background Ctrl-C is ignored, and a child inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"\(2 runs\): (http://\S+/) \(Ctrl-C ends it\)", line)
        assert found, line
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def call(url: str, body: object = None, method: str | None = None) -> Any:
    """JSON of an answer; with a body it is posted."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data=data, headers={"Content-Type": "application/json"}, method=method)
    with urlopen(request, timeout=90) as answer:
        return json.loads(answer.read())


class Browser:
    """Chromium without a window, by the WebDriver protocol."""

    def __init__(self, session: str) -> None:
        self._session = session

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Browser]:
        assert DRIVER is not None
        process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            port = next(found[1] for line in lines if (found := re.search(r"started successfully on port (\d+)", line)))
            flags = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,1100"]
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}}
            address = f"http://127.0.0.1:{port}/session"
            session = f"{address}/{call(address, wanted)['value']['sessionId']}"
            yield cls(session)
            call(session, method="DELETE")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def open(self, page: str) -> None:
        call(f"{self._session}/url", {"url": "about:blank"})  # another fragment of one page would not load it again
        call(f"{self._session}/url", {"url": page})

    def elements(self, css: str) -> list[str]:
        found = call(f"{self._session}/elements", {"using": "css selector", "value": css})["value"]
        return [element[ELEMENT] for element in found]

    def text(self, element: str) -> str:
        return str(call(f"{self._session}/element/{element}/text")["value"])

    def picture(self, element: str | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Pixels [height, width, 3] of an element or of the window."""
        place = "" if element is None else f"/element/{element}"
        png = base64.b64decode(call(f"{self._session}{place}/screenshot")["value"])
        return np.rint(255 * matplotlib.image.imread(io.BytesIO(png))[..., :3]).astype(np.int64)


def width(picture: np.ndarray[Any, np.dtype[np.int64]], colour: tuple[int, int, int]) -> int:
    """Pixel columns in which a colour occurs."""
    return int((np.abs(picture - colour).sum(-1) < 40).any(axis=0).sum())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not seen within {PATIENCE_S} s: {what}"
        time.sleep(1)


def test_what_the_dashboards_are_served(checkout: Path, runs: Path) -> None:
    with dashboard(checkout, runs) as address:
        tags = call(f"{address}data/plugin/scalars/tags")
        assert set(tags) == {"of_exact", "of_erase"}  # hyperparameters made no run of their own
        assert {"eval/ne", "throughput/qps_p90"} <= set(tags["of_erase"])
        layout = call(f"{address}data/plugin/custom_scalars/layout")
        assert [category["title"] for category in layout["category"]] == ["NE", "QPS (rows a second)"]
        metrics = [{"metric": {"tag": tag}} for tag in ("final/ne", "final/qps_p90")]
        query = {"allowedStatuses": ["STATUS_SUCCESS"], "startIndex": 0, "sliceSize": 10, "colParams": metrics}
        groups = call(f"{address}data/plugin/hparams/session_groups", query)["sessionGroups"]
        found = {group["hparams"]["preset"]: _metrics(group) for group in groups}
        assert found["exact"]["final/qps_p90"] == pytest.approx(1000)
        assert found["erase"]["final/qps_p90"] == pytest.approx(1400)
        assert found["erase"]["final/ne"] - found["exact"]["final/ne"] == pytest.approx(0.05, abs=1e-6)
        assert set(call(f"{address}data/plugin/text/tags")["of_exact"]) == {"config", "audit"}
        wait_until(lambda: "of_erase" in call(f"{address}data/plugin/images/tags"), "the timeline of a run")
        shown = call(f"{address}data/plugin/images/tags")
        assert {run: set(tags) for run, tags in shown.items() if tags} == {"of_erase": {"timeline"}}
        (image,) = call(f"{address}data/plugin/images/images?run=of_erase&tag=timeline&sample=0")
        assert image["step"] == STEP.step
        with urlopen(f"{address}data/plugin/images/individualImage?{image['query']}", timeout=90) as answer:
            assert matplotlib.image.imread(io.BytesIO(answer.read())).shape[1] == 1680
        assert len(list((runs / "of_erase").glob("events*.timeline"))) == 1
        draw_missing([runs / "of_erase"])  # it is there: drawn once
        assert len(list((runs / "of_erase").glob("events*.timeline"))) == 1


def _metrics(group: dict[str, Any]) -> dict[str, float]:
    return {metric["name"]["tag"]: metric["value"] for metric in group["metricValues"]}


def test_the_browser_shows_the_curves_of_ne_and_qps(checkout: Path, runs: Path) -> None:
    if DRIVER is None:
        assert not os.environ.get("CI"), "CI installs chromium-driver, and it is not here"
        pytest.skip("needs chromium and its driver: apt-get install chromium-driver")
    with dashboard(checkout, runs) as address, Browser.opened() as browser:
        browser.open(f"{address}?tagFilter={quote(SHOWN)}&smoothing=0#timeseries")
        wait_until(lambda: len(browser.elements("scalar-card line-chart")) == 2, "a card of NE and one of QPS")
        cards = browser.elements("scalar-card")
        wait_until(lambda: all("of_erase" in browser.text(card) for card in cards), "the values of the runs")
        for card, tag in zip(cards, ("eval/ne", "throughput/qps_p90"), strict=True):
            assert browser.text(card).replace("\n", "").startswith(tag)
        for card in cards:
            for colour in RUN_COLOURS:
                wait_until(lambda c=card, k=colour: width(browser.picture(c), k) > CURVE_WIDTH, "a curve in each card")
        browser.open(f"{address}#custom_scalars")
        for colour in CUSTOM_COLOURS:
            wait_until(lambda k=colour: width(browser.picture(), k) > CURVE_WIDTH, "curves of the Custom Scalars")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder; train first"):
        command(tmp_path / "none")


# At its import TensorBoard's own copy of html5lib announces that a part of it is retired.
@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another port, or 0"):
            command(tmp_path, port=taken.getsockname()[1])
