"""Every YAML file under configs/ loads with the real components, and the headers name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config import dump_config, load_config
from erase_rec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ARMS = set(ROOT.glob("configs/bench/arms*.yaml"))  # what `erase-rec bench` compares: no configurations
SWEEPS = set(ROOT.glob("configs/sweeps/*.yaml"))  # many runs each: test_sweep_configs.py
CONFIGS = sorted(set(ROOT.glob("configs/**/*.yaml")) - ARMS - SWEEPS)
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
    ("name", "blocks"),
    [
        ("chains/deep_mlp.yaml", 6),
        ("chains/transformer.yaml", 3),
        ("proxies/mnist_mlp.yaml", 30),
        ("proxies/mnist_mlp_blocks.yaml", 6),
        ("proxies/transformer.yaml", 3),
    ],
)
def test_chains_are_blocks_that_read_the_one_before_each_with_its_own_loss(name: str, blocks: int) -> None:
    towers = load_config(name, catalog=ContentCatalog()).config.towers
    assert all(tower.detach and tower.loss and tower.loss.target == "own" for tower in towers)
    assert [tower.inputs.towers for tower in towers[1:]] == [(tower.name,) for tower in towers[:-1]]
    assert sum(tower.name.startswith(("block", "layer")) for tower in towers) == blocks


@pytest.mark.parametrize(
    ("name", "override", "key", "words"),
    [
        ("transformer", "towers.dense_token.params.out_dim=12", "towers.block1", "whole tokens of dim 16, found 12"),
        ("transformer", "towers.block3.params.dim=15", "towers.block3", "whole tokens of dim 15, found 432 columns"),
        ("deep_mlp", "towers.block2.detach=false", "towers.block3.inputs.towers", "reads 'block2', which is not"),
        ("deep_mlp", "towers.block2.inputs.towers=[block3]", "towers.block2.inputs.towers", "'block3' comes after"),
        ("deep_mlp", "towers.block2.frozen=true", "towers.block2.loss", "frozen and has a loss"),
    ],
)
def test_a_chain_that_cannot_be_is_refused_with_its_place(name: str, override: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(f"chains/{name}.yaml", [override], catalog=ContentCatalog())
    place = rf"(\S*configs/chains/{name}\.yaml:\d+|override '{re.escape(override)}'): {re.escape(key)}: .*{words}"
    assert any(re.match(place, problem) for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("path", sorted([*CONFIGS, *SWEEPS]), ids=lambda p: p.name)
def test_headers_name_configurations_that_exist(path: Path) -> None:
    """Those of the pages are run, or checked, by test_documentation.py."""
    for name in re.findall(r"--config[= ](\S+\.yaml)", path.read_text()):
        assert (ROOT / "configs" / name).is_file(), name
