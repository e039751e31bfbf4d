"""`_base_` and overrides: what a change changes, and that no change vanishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erase_rec.config import merge as merge_module
from erase_rec.config.document import Node, read_document
from erase_rec.config.merge import merge, read_with_bases
from erase_rec.config.overrides import parse_overrides
from erase_rec.errors import ConfigError

BASE = """\
train: {epochs: 1, local_batch_size: 8}
over_arch: {hidden: [1, 64]}
towers:
  - {name: deep, kind: mlp, loss: {weight: 1}}
  - {name: cross, kind: dcn, loss: {weight: 1}}
features: {sparse: [C1, a.b, {name: a, encoding: id}, 7]}
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / "main.yaml"


def overridden(folder: Path, *overrides: str) -> tuple[Any, list[str]]:
    path = folder / "base.yaml"
    path.write_text(BASE)
    document, _ = read_document(path)
    patch, problems = parse_overrides(overrides, document)
    merged, more = merge(document, patch)
    return merged.plain(), problems + more


def test_sections_merge_lists_are_replaced_and_null_takes_back(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        base="a: {x: 1, y: {z: 1}}\nl: [1, 2]\nn: {q: 1}\n",
        main="_base_: base.yaml\na: {y: {w: 2}}\nl: [3]\nn: null\n",
    )
    merged, problems = read_with_bases(main)
    assert (merged.plain(), problems) == ({"a": {"x": "1", "y": {"z": "1", "w": "2"}}, "l": ["3"], "n": None}, [])


def test_bases_are_relative_to_their_file_and_later_ones_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", one="_base_: ../zero.yaml\na: 1\nb: 1\n", two="b: 2\n")
    main = write(tmp_path, zero="a: 0\nz: 0\n", main="_base_: [sub/one.yaml, sub/two.yaml]\nc: 3\n")
    monkeypatch.chdir("/")
    assert read_with_bases(main)[0].plain() == {"a": "1", "b": "2", "c": "3", "z": "0"}


def test_places_keep_the_file_that_wrote_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    merged, _ = read_with_bases(write(tmp_path, base="a:\n  x: 1\n", main="_base_: base.yaml\na: {y: 1}\n"))
    assert merged.place_of(("a", "x")) == "base.yaml:2"
    assert merged.place_of(("a", "y")) == "main.yaml:2"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"main": "_base_: main.yaml\n"}, "main.yaml:1: _base_: a file cannot be based on itself"),
        ({"main": "_base_: b.yaml\n", "b": "x: 1\n_base_: main.yaml\n"}, "b.yaml:2"),
        ({"main": "_base_: bsae.yaml\n", "base": "a: 1\n"}, "did you mean 'base.yaml'"),
        ({"main": "_base_: {a: 1}\n"}, "expected a file name"),
        ({"main": "_base_: [null]\n"}, "expected a file name"),
        ({"main": "_base_: b.yaml\n", "b": "a: [\n"}, "b.yaml:2"),
    ],
)
def test_bases_that_cannot_be_read(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_with_bases(write(tmp_path, **files))
    assert words in str(caught.value)


def test_a_section_over_a_list_changes_items_by_name(tmp_path: Path) -> None:
    change = (
        "_base_: base.yaml\ntowers: {cross: {loss: {weight: 5}}}\n"
        "features: {sparse: {C1: {encoding: hash}, a.b: {fill: x}, '7': {fill: y}}}\n"
    )
    merged, problems = read_with_bases(write(tmp_path, base=BASE, main=change))
    plain = merged.plain()
    assert problems == []
    assert plain["towers"][1] == {"name": "cross", "kind": "dcn", "loss": {"weight": "5"}}
    assert plain["towers"][0] == {"name": "deep", "kind": "mlp", "loss": {"weight": "1"}}
    assert plain["features"]["sparse"] == [
        {"name": "C1", "encoding": "hash"},
        {"name": "a.b", "fill": "x"},
        {"name": "a", "encoding": "id"},
        {"name": "7", "fill": "y"},
    ]


def test_an_unknown_item_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, problems = read_with_bases(
        write(tmp_path, base=BASE, main="_base_: base.yaml\ntowers:\n  crss: {detach: true}\n")
    )
    assert len(problems) == 1
    assert problems[0].startswith("main.yaml:3: towers.crss: no item of that name")
    assert "did you mean 'cross'?" in problems[0]


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.local_batch_size=1e3", ("train", "local_batch_size"), "1e3"),
        ("train.precision=null", ("train", "precision"), None),
        ("train.precision=", ("train", "precision"), None),
        ("train.precision='null'", ("train", "precision"), "null"),
        ("data.train=[a, b]", ("data", "train"), ["a", "b"]),
        ("data.train=*.csv", ("data", "train"), "*.csv"),
        ("data.train=a=b: c #d", ("data", "train"), "a=b: c #d"),
        ("data.params.delimiter=|", ("data", "params", "delimiter"), "|"),
        ("towers.cross.loss=null", ("towers", 1, "loss"), None),
        ("towers.cross.loss={weight: 3, kind: focal}", ("towers", 1, "loss"), {"weight": "3", "kind": "focal"}),
        ("towers.1.loss.weight=0.5", ("towers", 1, "loss", "weight"), "0.5"),
        ("over_arch.hidden.1=32", ("over_arch", "hidden"), ["1", "32"]),
        ("features.sparse.a.b.fill=x", ("features", "sparse", 1), {"name": "a.b", "fill": "x"}),
        ("features.sparse.a.encoding=hash", ("features", "sparse", 2, "encoding"), "hash"),
        ("features.sparse.7.fill=x", ("features", "sparse", 3), {"name": "7", "fill": "x"}),
        ("features.sparse.0=C9", ("features", "sparse", 0), "C9"),
    ],
)
def test_override_values_and_paths(tmp_path: Path, override: str, path: tuple[Any, ...], value: Any) -> None:
    plain, problems = overridden(tmp_path, override)
    assert problems == []
    for key in path:
        plain = plain[key]
    assert plain == value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.steps 200"], "expected key=value"),
        (["=5"], "expected a key"),
        (["train..steps=5"], "expected a key"),
        (["train.=5"], "expected a key"),
        (["data.train=[a"], "not YAML"),
        (["towers.crss.kind=x"], "did you mean 'cross'?"),
        (["towers.9.kind=x"], "no item of that name or number"),
        (["train.seed=1", "train.seed=2"], "set by override 'train.seed=1' too"),
        (["train={steps: 1}", "train.seed=2"], "set by override 'train={steps: 1}' too"),
        (["towers.cross.loss.weight=1", "towers.cross.loss=null"], "the same key"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(tmp_path: Path, overrides: list[str], words: str) -> None:
    _, problems = overridden(tmp_path, *overrides)
    assert len(problems) == 1
    assert words in problems[0]
    assert "override '" in problems[0]


def test_a_duration_replaces_the_inherited_one(tmp_path: Path) -> None:
    assert overridden(tmp_path, "train.steps=5")[0]["train"] == {"steps": "5", "local_batch_size": "8"}
    assert overridden(tmp_path, "train.steps=null")[0]["train"]["epochs"] == "1", "null asks for nothing"
    both = overridden(tmp_path, "train.steps=5", "train.samples=6")[0]["train"]
    assert both == {"steps": "5", "samples": "6", "local_batch_size": "8"}, "neither of two requests may vanish"


def test_merging_changes_neither_tree() -> None:
    base = Node({"a": Node({"x": Node("1", "b")}, "b")}, "b")
    patch = Node({"a": Node({"x": Node("2", "p")}, "p")}, "p")
    assert merge(base, patch)[0].plain() == {"a": {"x": "2"}}
    assert (base.plain(), patch.plain()) == ({"a": {"x": "1"}}, {"a": {"x": "2"}})


def test_a_shipped_configuration_is_a_base_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's own names a shipped one; one beside it takes precedence."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "base.yaml").write_text("seed: 3\n")
    monkeypatch.setattr(merge_module, "SHIPPED", shipped)
    mine = tmp_path / "mine.yaml"
    mine.write_text("_base_: base.yaml\n")
    assert read_with_bases(mine)[0].plain() == {"seed": "3"}
    (tmp_path / "base.yaml").write_text("seed: 4\n")
    assert read_with_bases(mine)[0].plain() == {"seed": "4"}
