"""Configurations that nobody means well with: aliases that multiply, deep nesting, texts that no file can hold."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.document import MAX_BYTES, MAX_DEPTH, parse_value, read_document
from erase_rec.config.load import load_config
from erase_rec.errors import ConfigError, UserError
from erase_rec.sweep.file import MAX_POINTS, read_sweep

LEVELS = "abcdefghi"


def laughs() -> str:
    """Nine lines that stand for 9^9 values."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{level}: &{level} [{', '.join([f'*{below}'] * 9)}]" for below, level in pairwise(LEVELS)]
    return "\n".join(lines)


def refusal(folder: Path, text: str) -> str:
    path = folder / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, catalog=ContentCatalog())
    (problem,) = caught.value.problems
    return problem


def test_aliases_that_multiply_are_refused_and_not_expanded(tmp_path: Path) -> None:
    assert "more than 100,000 values" in refusal(tmp_path, laughs())


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused_with_its_place(tmp_path: Path, opening: str) -> None:
    problem = refusal(tmp_path, f"train:\n {opening * 3000}")
    assert problem.startswith("hostile.yaml:2:") or "hostile.yaml:2:" in problem
    assert f"more than {MAX_DEPTH} sections and lists inside each other" in problem


def test_nesting_as_deep_as_the_bound_is_read() -> None:
    assert parse_value("[" * (MAX_DEPTH - 1) + "a" + "]" * (MAX_DEPTH - 1), "here").plain() != []


@pytest.mark.parametrize("text", ['data: {kind: csv, train: "a\\0b"}', '_base_: "a\\0b"', '"a\\0b": 1'])
def test_a_nul_is_refused(tmp_path: Path, text: str) -> None:
    document, problems = read_document(write(tmp_path, text))
    assert document.value
    assert ["NUL character" in problem for problem in problems] == [True]


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    _, problems = read_document(write(tmp_path, 'run: {name: "\\ud800"}'))
    assert ["surrogate" in problem for problem in problems] == [True]
    with pytest.raises(ConfigError, match="surrogate"):
        load_config("ctr_erase.yaml", [os.fsdecode(b"run.name=\xff")], catalog=ContentCatalog())


def test_a_file_too_large_for_a_configuration_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="has 4,194,305 bytes, more than the 4,194,304 of any configuration"):
        read_document(path)


def test_names_too_long_for_a_file_system_are_not_found(tmp_path: Path) -> None:
    long = "x" * 5000
    assert "not found" in refusal(tmp_path, f"_base_: {long}/x.yaml")
    assert "not found" in refusal(tmp_path, f"_base_: {long}")
    with pytest.raises(UserError, match=r"configuration 'xxx.*\[\.\.\.\]"):
        load_config(long, catalog=ContentCatalog())


def test_a_path_of_keys_too_deep_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_DEPTH} sections inside each other"):
        load_config("ctr_erase.yaml", [".".join(["a"] * 3000) + "=1"], catalog=ContentCatalog())


@pytest.mark.parametrize("override", ["{kind: mlp}=1", "[a]=1", "a=1"])
def test_an_override_that_names_nothing_is_a_problem(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config("ctr_erase.yaml", [override], catalog=ContentCatalog())


def test_a_grid_of_more_runs_than_anyone_waits_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1")
    keys = ", ".join(f"k{key}: [1, 2, 3, 4, 5, 6, 7, 8]" for key in range(40))
    path = write(tmp_path, f"base: base.yaml\ngrid: {{{keys}}}")
    with pytest.raises(ConfigError, match=rf"grid: comes to [0-9,]+ runs, more than {MAX_POINTS:,}"):
        read_sweep(path)
    path = write(tmp_path, "base: base.yaml\nsearch: {space: {train.steps: {low: 1, high: 2}}, trials: 9999999}")
    with pytest.raises(ConfigError, match="trials: comes to 9,999,999 runs"):
        read_sweep(path)


def write(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path
