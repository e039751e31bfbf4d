"""Every command and program of the pages and the README runs, or says why it cannot run here and is checked instead.

Blocks of a page run in order in one folder: ``bash`` blocks line by line, ``python`` blocks as one program, blocks with
a ``title`` become files of that name. Commands of this project run in the test's process, with the overrides of
:data:`documentation.SMALL`. A block that cannot run has ``<!-- not run: REASON -->`` above it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import documentation
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import yaml
from documentation import Block, blocks, commands_of, inline_commands, lines_of
from in_process import call

from models.registry import TOWERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
LANGUAGES = {"bash", "python", "yaml", "text", "mermaid", "json", ""}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with what cannot be fetched or installed by a test: the data set's package."""
    put_movielens(tmp_path / "datasets" / "movielens-100k")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def put_movielens(folder: Path) -> None:
    """The package that ``erase-rec fetch movielens-100k`` downloads, in its layout, with made-up ratings."""
    folder.mkdir(parents=True)
    users, items = range(1, 41), range(1, 26)
    files = {
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        + "".join(f"{u}\t{i}\t{1 + (u * i + u) % 5}\t{100 + (u * i) % 97}\n" for u in users for i in items),
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        + "".join(f"{u}\t{20 + u}\t{'MF'[u % 2]}\tartist\t8571{u % 10}\n" for u in users),
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        + "".join(f"{i}\tFilm {i}\t{1970 + i}\t{'Drama' if i % 2 else 'Comedy'} War\n" for i in items),
    }
    with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{name}", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_or_say_why_not(page: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = python_names()
    for block in blocks(page, ROOT):
        assert block.language in LANGUAGES, f"{block.place}: blocks are {sorted(LANGUAGES)}, found {block.language!r}"
        if block.title is not None:
            put_file(block, scratch, monkeypatch)
        elif block.reason is not None or block.language in {"text", ""}:
            check(block)
        elif block.language == "bash" and any(line.endswith(" &") for line in lines_of(block.text)):
            serve(block, scratch)
        elif block.language == "bash":
            for line in lines_of(block.text):
                run(line, block, scratch)
        elif block.language == "python":
            with chdir(scratch):
                exec(compile(documentation.small_program(block.text), block.place, "exec"), names)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
    plt.close("all")
    for command in inline_commands(page):
        documentation.check_synopsis(command, str(page.relative_to(ROOT)))


def put_file(block: Block, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with a file name; a new module of ``models`` is imported, and a line of its registry is entered."""
    assert block.title is not None
    if block.title == "registry line":
        monkeypatch.setattr("models.registry.TOWERS", TOWERS)
        for kind, place in re.findall(r'"(\w+)": "([\w.:]+)"', block.text):
            monkeypatch.setitem(TOWERS, kind, place)
        return
    path = scratch / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"^seeds: .*$", "seeds: [1]", block.text, flags=re.MULTILINE), encoding="utf-8")
    if path.suffix == ".py" and block.title.startswith("models/"):
        name = block.title.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)


def python_names() -> dict[str, Any]:
    """What programs of the pages find: rows as their text says of them."""
    rng = np.random.default_rng(5)
    size = 400
    frame = pd.DataFrame(
        {
            "click": rng.integers(0, 2, size),
            "user_id": rng.integers(0, 30, size).astype(str),
            "age": rng.normal(40, 9, size).round(1),
            "page": rng.choice(["home", "search", "cart"], size),
        }
    )
    return {"frame": frame, "later_rows": frame.iloc[-100:], "new_rows": frame.drop(columns="click").iloc[:20]}


def serve(block: Block, scratch: Path) -> None:
    """A block that starts a server and ends it: one script, on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = re.sub(r"\b8080\b", str(port), block.text)
    ending = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    shell(ending + re.sub(r"(?<= )examples/", f"{ROOT}/examples/", script), scratch)


def check(block: Block) -> None:
    """A block that is not run: what can be known of it without running it."""
    if block.language == "python":
        compile(block.text, block.place, "exec")
    elif block.language == "bash":
        for line in lines_of(block.text):
            for words in commands_of(line):
                documentation.check_words(words, block.place)
    elif block.language in {"text", ""}:
        for line in lines_of(block.text):
            if line.startswith(("erase-rec ", "make ")):
                documentation.check_synopsis(line, block.place)


def run(line: str, block: Block, scratch: Path) -> None:
    """A line of a ``bash`` block."""
    for words in commands_of(line):
        arguments = documentation.own_arguments(words)
        if words[:1] == ["make"]:
            documentation.check_make(words[1:], block.place)
        elif words[:1] == ["source"]:
            assert words == ["source", ".venv/bin/activate"], block.place
        elif arguments is not None and words[0] != "torchrun" and not documentation.needs_a_shell(words):
            doctor = arguments[:1] == ["doctor"]  # exit code 1 says that this machine has a problem
            given = documentation.made_small(expanded(arguments, scratch))
            outcome: Callable[..., Any] = tolerant if doctor else call
            outcome(scratch, *given)
        else:
            shell(line, scratch)
            return


def tolerant(cwd: Path, *arguments: str) -> None:
    """A command that may find this machine at fault."""
    try:
        call(cwd, *arguments)
    except AssertionError:
        call(cwd, *arguments, expect=1)


def expanded(arguments: list[str], cwd: Path) -> list[str]:
    """Braces and globs as bash expands them; what the page quoted stays one word."""
    written = " ".join(
        word if re.fullmatch(r"[^\s'\"\[\](){}]*\{[\w,]+\}\S*", word) else quoted(word) for word in arguments
    )
    result = subprocess.run(
        ["bash", "-c", rf"printf '%s\n' {written}"], cwd=cwd, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def shell(line: str, cwd: Path) -> None:
    """What needs a shell or processes of its own, such as torchrun."""
    line = re.sub(r"(?<=\s)train\.py(?=\s)", str(ROOT / "train.py"), line)
    config = re.search(r"--config (\S+)", line)
    if config is not None:
        line += "".join(f" {quoted(item)}" for item in documentation.small_overrides(config[1], line.split()))
    result = subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


def messages() -> str:
    """All texts in the sources, what is put into them left out."""
    texts = []
    for folder in ("erase_rec", "models", "data", "eval"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts += [
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return "\n".join(texts)


def test_messages_that_troubleshooting_quotes_exist() -> None:
    said = messages()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [text for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip() for text in quoted for part in text.split("...") if " " in part.strip()]
    assert len(parts) > 20
    assert [part for part in parts if part not in said] == []
