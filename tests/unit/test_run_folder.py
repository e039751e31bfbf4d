"""The run folder: names that are refused, and a configuration that a kill does not cut short."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder


@pytest.mark.parametrize("name", ["../up", "a/b", "/somewhere", "..", "."])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"run\.name.*run\.dir"):
        RunFolder.choose(tmp_path / "runs", name, config_name="c", config_hash="0" * 16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "why"), [("x" * 300, "File name too long"), ("a\0b", "embedded null byte")])
def test_a_name_that_no_folder_can_have(tmp_path: Path, name: str, why: str) -> None:
    folder = RunFolder.choose(tmp_path, name, config_name="c", config_hash="0" * 16)
    with pytest.raises(UserError, match=rf"cannot make .*: {why}; choose another run\.dir or run\.name"), folder.made():
        pass


def test_an_existing_name_is_refused_and_kept(tmp_path: Path) -> None:
    first = choose(tmp_path)
    assert not first.path.exists(), "a mistake in between leaves nothing behind"
    with first.made() as beginning:
        beginning.write_config("a: 1")
    with pytest.raises(UserError, match="--resume"), first.made() as beginning:
        beginning.write_config("a: 2")
    with pytest.raises(UserError, match="--resume"):
        choose(tmp_path)
    assert first.config.read_text() == "a: 1"
    assert list(tmp_path.iterdir()) == [first.path]


def test_a_folder_appears_with_all_that_a_resumed_run_needs(tmp_path: Path) -> None:
    """What is interrupted before leaves no folder that could neither be resumed nor begun again."""
    folder = choose(tmp_path)
    with pytest.raises(FileNotFoundError), folder.made() as beginning:
        (beginning.path / "none" / "none").touch()
    assert list(tmp_path.iterdir()) == []

    script = (
        "import os, pathlib, signal, sys\n"
        "from erase_rec.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).made() as beginning:\n"
        "    beginning.write_config('a: 1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(folder.path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with choose(tmp_path).made() as beginning:
        assert not folder.path.exists()
        beginning.write_config("a: 2")
    assert folder.config.read_text() == "a: 2"


def choose(parent: Path) -> RunFolder:
    return RunFolder.choose(parent, "r", config_name="c", config_hash="0" * 16)


def test_writing_the_configuration_replaces_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before the new text is complete, the old one is still there."""
    folder = RunFolder(tmp_path)
    folder.write_config("a: 1")

    def cut(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text.encode()[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        folder.write_config("a: 2")
    assert folder.config.read_text() == "a: 1"


def test_a_checkpoint_that_is_not_there_is_told_those_that_are(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (20, 10):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    assert folder.checkpoint(folder.checkpoints / "step_00000010").name == "step_00000010"
    with pytest.raises(UserError, match=r"step_00000099: the run has no such .* are: step_00000010, step_00000020$"):
        folder.checkpoint(folder.checkpoints / "step_00000099")
