"""Every YAML file under configs/ loads with the real components, and the documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erase_rec.cli.assembly import ContentCatalog
from erase_rec.config import dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
FILES = {"ctr_criteo.yaml": ["data.train=x"], "ctr_avazu.yaml": ["data.train=x"], "ctr_parquet.yaml": ["data.train=x"]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_loads_and_reloads_equal(path: Path, tmp_path: Path) -> None:
    loaded = load_config(str(path), FILES.get(path.name, []), catalog=ContentCatalog())
    again = tmp_path / "config.yaml"
    again.write_text(dump_config(loaded.config), encoding="utf-8")
    assert load_config(str(again), catalog=ContentCatalog()).config == loaded.config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_header_says_the_command(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert str(path.relative_to(ROOT / "configs")) in header


def test_main_configuration_has_six_detached_towers_with_losses() -> None:
    config = load_config("ctr_erase.yaml", catalog=ContentCatalog()).config
    assert len(config.towers) == 6
    assert len({tower.kind for tower in config.towers}) >= 5
    assert all(tower.detach and tower.loss and tower.loss.weight > 0 for tower in config.towers)
    assert config.schedule.early_backward


def test_exact_configuration_is_the_same_model_uncut() -> None:
    erase, exact = (load_config(name, catalog=ContentCatalog()).config for name in ("ctr_erase.yaml", "ctr_exact.yaml"))
    assert not any(tower.detach or tower.loss for tower in exact.towers)
    for mine, other in zip(exact.towers, erase.towers, strict=True):
        assert (mine.name, mine.kind, mine.params, mine.inputs) == (other.name, other.kind, other.params, other.inputs)
    assert exact.over_arch == erase.over_arch


@pytest.mark.parametrize(
    "document", sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *CONFIGS]), ids=lambda p: p.name
)
def test_documents_name_configurations_that_exist(document: Path) -> None:
    for name in re.findall(r"--config[= ](\S+\.yaml)", document.read_text()):
        assert (ROOT / "configs" / name).is_file(), name
