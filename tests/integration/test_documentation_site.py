"""The site builds without a warning and needs no network; what is generated in it is all there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from pydantic import BaseModel

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.main import app
from erase_rec.config.reference_page import configuration_as_markdown

_LOADED = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=\"https?://|<link\b[^>]*\bhref=\"https?://|@import url\(.?http"
)
"""What a browser loads by itself; a link that one may click is none."""


@pytest.fixture(scope="module")
def site(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as ``make docs`` does."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert not _LOADED.findall(page.read_text(encoding="utf-8")), page.relative_to(site)


def test_pictures_are_drawn_without_a_program_from_elsewhere(site: Path, checkout: Path) -> None:
    written = (checkout / "docs" / "schedules.md").read_text(encoding="utf-8").count("```mermaid")
    page = (site / "schedules.html").read_text(encoding="utf-8")
    assert written > 5
    assert page.count('<svg class="schedule"') == written
    assert "flowchart TB" not in page


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f'id="{name}"' in page
        for parameter in command.params:
            assert all(f"<code>{option}</code>" in page for option in parameter.opts), (name, parameter.opts)


def test_every_public_name_of_the_python_reference_is_described(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("Config", "Trainer", "Callback", "Predictor", "read_history", "UserError"):
        assert f'id="erase_rec.{name}"' in page


def rows(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_key_of_the_schema_says_what_it_means() -> None:
    page = configuration_as_markdown(ContentCatalog())
    schema = page[: page.index("\n## Towers\n")]
    missing = [cells[0] for cells in rows(schema) if not cells[-1]]
    assert missing == [], "write a text below these fields in erase_rec/config/schema.py"


def test_every_kind_and_its_parameters_are_in_the_reference() -> None:
    page = configuration_as_markdown(ContentCatalog())
    catalog, keys = ContentCatalog(), [cells[0] for cells in rows(page)]
    for group, place in (
        ("tower", "towers[].params"),
        ("local_loss", "towers[].loss.params"),
        ("source", "data.params"),
    ):
        for kind in catalog.kinds(group):  # type: ignore[arg-type]
            model: type[BaseModel] = catalog.params_model(group, kind)  # type: ignore[arg-type]
            assert f"`{kind}`\n" in page
            assert all(f"`{place}.{name}`" in keys for name in model.model_fields)


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        ("train.local_batch_size", "whole number > 0", "`1024`"),
        ("data.eval_fraction", "number > 0 and < 1 or null", "`null`"),
        ("schedule.dispatch", "`blocking`, `non_blocking` or null", "`null`"),
        ("towers[].inputs.sparse", "true, false or list of names", "`true`"),
        ("data.kind", "text", "required"),
        ("over_arch.hidden", "list, each whole number > 0", "`[64, 32]`"),
        ("towers[].loss", "section or null", "`null`"),
    ],
)
def test_what_the_reference_says_of_a_key(key: str, value: str, default: str) -> None:
    found = {cells[0]: cells[1:3] for cells in rows(configuration_as_markdown(ContentCatalog()))}
    assert found[f"`{key}`"] == [value, default]
