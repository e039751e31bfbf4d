"""The run folder: names that are refused, and a configuration that a kill does not cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from erase_rec.errors import UserError
from erase_rec.run_folder import RunFolder


@pytest.mark.parametrize("name", ["../up", "a/b", "/somewhere", "..", "."])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"run\.name.*run\.dir"):
        RunFolder.choose(tmp_path / "runs", name, config_name="c", config_hash="0" * 16)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_name_is_refused_and_kept(tmp_path: Path) -> None:
    first = RunFolder.choose(tmp_path, "r", config_name="c", config_hash="0" * 16)
    assert not first.path.exists(), "a mistake in between leaves nothing behind"
    first.make()
    first.write_config("a: 1")
    with pytest.raises(UserError, match="--resume"):
        first.make()
    with pytest.raises(UserError, match="--resume"):
        RunFolder.choose(tmp_path, "r", config_name="c", config_hash="0" * 16)
    assert first.config.read_text() == "a: 1"


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
