"""The example notebook runs from the first cell to the last, and what is committed is such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from data.errors import DataError
from data.fetch import fetch

START_S, CELL_S = 240, 280
MAX_BYTES = 100_000


@pytest.fixture
def notebook(checkout: Path) -> Any:
    return nbformat.read(checkout / "examples" / "movielens.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def shown(notebook: Any) -> str:
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)
    )


def check(notebook: Any) -> None:
    """A whole run without an error that came to a useful model."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs(notebook) if output.output_type == "stream"} == {"stdout"}
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 1
    text = shown(notebook)
    assert "audit passed" in text
    assert "unknown key" in text
    (final,) = (line for line in text.splitlines() if line.startswith("step 88 of 88: held-out NE "))
    assert 0.75 < float(final.split("NE ")[1].split(",")[0]) < 0.82


def test_what_is_committed_is_a_whole_run(notebook: Any, checkout: Path) -> None:
    check(notebook)
    assert (checkout / "examples" / "movielens.ipynb").stat().st_size < MAX_BYTES
    assert str(checkout) not in nbformat.writes(notebook)


@pytest.mark.timeout(900)
def test_it_runs(notebook: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        fetch("movielens-100k", tmp_path / "datasets" / "movielens-100k")
    except DataError as error:
        if "download" not in str(error):
            raise
        pytest.skip(f"the package index cannot be reached: {error}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    kernel = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, startup_timeout=START_S, timeout=CELL_S, kernel_name="python3", resources=kernel).execute()
    check(notebook)
    assert len(list((tmp_path / "runs").glob("ctr_movielens-*/summary.json"))) == 1
