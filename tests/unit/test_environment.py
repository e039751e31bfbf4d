"""Versions are read without imports, and a set that does not belong together is named."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from erase_rec import environment
from erase_rec.environment import TESTED_TRIPLES, Versions, describe, git_commit, triple_problem

TESTED = Versions("2.13.0", "1.8.0", "1.8.0", numpy="2.4.0", pyarrow="20.0.0")


def unpack(folder: Path, name: str, version: str) -> None:
    """What unpacking a wheel leaves of its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


@pytest.mark.parametrize("triple", TESTED_TRIPLES)
def test_tested_triples_pass(triple: tuple[str, str, str]) -> None:
    assert triple_problem(Versions(*triple, numpy=None, pyarrow=None)) is None


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        (replace(TESTED, torch="2.12.1"), "torch 2.12.1, fbgemm-gpu 1.8.0, torchrec 1.8.0"),
        (replace(TESTED, torch="2.11.0"), "torch 2.11.0, fbgemm-gpu 1.8.0, torchrec 1.8.0"),
        (replace(TESTED, fbgemm=None), "torch 2.13.0, fbgemm-gpu missing, torchrec 1.8.0"),
        (replace(TESTED, fbgemm=None, torchrec=None), "torch 2.13.0, fbgemm-gpu missing, torchrec missing"),
    ],
)
def test_any_other_triple_is_one_message(versions: Versions, found: str) -> None:
    problem = triple_problem(versions)
    assert problem is not None
    assert f"found {found}" in problem
    assert "2.13.0/1.8.0/1.8.0 or 2.11.0/1.6.0/1.6.1" in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ["fbgemm_gpu", "fbgemm-gpu", "fbgemm_gpu-cpu"])
def test_wheels_unpacked_on_the_path_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, version in (("torch", "2.11.0+cu130"), (name, "1.6.0"), ("torchrec", "1.6.1")):
        unpack(tmp_path, package, version)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert Versions.read() == Versions("2.11.0", "1.6.0", "1.6.1", numpy=None, pyarrow=None)
    assert triple_problem() is None


def test_describe_names_what_runs_here() -> None:
    entries = describe()
    assert entries["python"] == platform.python_version()
    assert entries["torch"] == torch.__version__.split("+")[0]
    assert entries["cuda"] == (torch.version.cuda or "none")
    assert all(isinstance(value, str) and value for value in entries.values())


def commit_all(folder: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_of_a_checkout_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "environment.py"
    module.write_text("", encoding="utf-8")
    commit = commit_all(tmp_path)
    monkeypatch.setattr(environment, "__file__", str(module))
    assert git_commit() == commit
    module.write_text("changed", encoding="utf-8")
    assert git_commit() == f"{commit}+changes"


def test_no_commit_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in no repository, nor as an installed copy inside another project's, nor without git."""
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    (tmp_path / "other.py").write_text("", encoding="utf-8")
    commit_all(tmp_path)
    (tmp_path / "environment.py").write_text("", encoding="utf-8")
    assert git_commit() is None
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
