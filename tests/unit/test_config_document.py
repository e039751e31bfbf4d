"""YAML reading: what is text stays text, what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from erase_rec.config.document import Node, parse_value, read_document
from erase_rec.errors import ConfigError


def read(folder: Path, text: str | bytes) -> tuple[Node, list[str]]:
    path = folder / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_document(path)


@pytest.mark.parametrize(
    "text", ["yes", "on", "true", "1e-3", "0123", "0o17", "12:30", "2024-01-01", "0x1F", ".inf", "=", "Null", "1_000"]
)
def test_plain_scalars_are_text(tmp_path: Path, text: str) -> None:
    root, problems = read(tmp_path, f"a: {text}\nb: [{text}]\n{text}: x\n")
    assert (root.plain(), problems) == ({"a": text, "b": [text], text: "x"}, [])


def test_null_is_the_only_other_scalar_and_quotes_make_text(tmp_path: Path) -> None:
    root, _ = read(tmp_path, "a: null\nb: ~\nc:\nd: 'null'\ne: \"\"\nf: [~, '~']\nname: nullable\n")
    assert root.plain() == {"a": None, "b": None, "c": None, "d": "null", "e": "", "f": [None, "~"], "name": "nullable"}


def test_places_are_lines_of_keys_and_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root, _ = read(
        tmp_path, "# comment\ntrain:\n  steps: 1\ntowers:\n  - name: a\n  - name: b\n    loss:\n      weight: 2\n"
    )
    assert root.place_of(("train", "steps")) == "a.yaml:3"
    assert root.place_of(("towers", 1)) == "a.yaml:6"
    assert root.place_of(("towers", 1, "loss", "weight")) == "a.yaml:8"
    assert root.place_of(("towers", 1, "loss", "kind")) == "a.yaml:7", "a missing key is reported at its section"
    assert root.shown(("towers", 1, "loss", "kind")) == "towers.b.loss.kind"


def test_a_key_given_twice_names_both_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, problems = read(tmp_path, "a: 1\nb: {c: 1,\n    c: 2}\na: 3\n")
    assert problems == [
        "a.yaml:3: c: the key is given twice, first at a.yaml:2; keep one",
        "a.yaml:4: a: the key is given twice, first at a.yaml:1; keep one",
    ]


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    root, problems = read(tmp_path, "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: {<<: [{x: 9}, *a]}\n")
    assert problems == []
    assert root.plain() == {
        "a": {"x": "1", "y": "2"},
        "b": {"x": "1", "y": "3"},
        "c": {"x": "1", "y": "2"},
        "d": {"x": "9", "y": "2"},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a {b: *a}\n", "part of"),
        ("a: !!int 5\n", "tag"),
        ("a: !thing 5\n", "tag"),
        ("? [x]\n: 1\n", "key must be text"),
        ("~: 1\n", "key must be text"),
        ("a: {<<: 5}\n", "<<: expected a section"),
    ],
)
def test_yaml_that_a_configuration_does_not_have(tmp_path: Path, text: str, words: str) -> None:
    _, problems = read(tmp_path, text)
    assert len(problems) == 1
    assert words in problems[0]
    assert "a.yaml:1" in problems[0]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "a.yaml:3:"),
        ("a: 1\n\tb: 2\n", "a.yaml:2:"),
        ("a: *nobody\n", "a.yaml:1:"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2:"),
        ("- 1\n", "a.yaml:1: expected a section"),
        (b"a: \xff\n", "not UTF-8"),
        (b"a: \x01\n", "not YAML text"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_message(tmp_path: Path, text: str | bytes, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert len(caught.value.problems) == 1
    assert place in caught.value.problems[0]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_an_empty_section(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text)[0].plain() == {}


def test_bom_and_crlf(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\r\nb: x\r\n")[0].plain() == {"a": "1", "b": "x"}


def test_values_of_the_command_line_follow_the_same_rules() -> None:
    assert parse_value("[on, 1e-3, null, 'null']", "p").plain() == ["on", "1e-3", None, "null"]
    with pytest.raises(ConfigError, match="p: not YAML"):
        parse_value("[a", "p")
