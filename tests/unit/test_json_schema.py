"""The JSON Schema for editors: every shipped file fits it, as written and complete; what people get wrong does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from erase_rec import Config, ConfigError
from erase_rec.api.assembly import ContentCatalog
from erase_rec.config.json_schema import json_schema
from erase_rec.config.load import dump_config

ROOT = Path(__file__).resolve().parents[2]
APART = {*ROOT.glob("configs/bench/arms*.yaml"), *ROOT.glob("configs/sweeps/*.yaml")}  # files of another kind
CONFIGS = sorted(set(ROOT.glob("configs/**/*.yaml")) - APART)
FILES = {"ctr_criteo.yaml": ["data.train=x"], "ctr_avazu.yaml": ["data.train=x"], "ctr_parquet.yaml": ["data.train=x"]}


class Yaml12(yaml.SafeLoader):
    """Scalars as editors read them: the core schema of YAML 1.2, where ``1e-3`` is a number and ``on`` is text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, the attribute PyYAML reads


Yaml12.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|)\Z"), ["~", "n", ""])
Yaml12.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<\Z"), ["<"])
Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)\Z"), ["t", "f"])
Yaml12.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+\Z"), list("-+0123456789"))
Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)
Yaml12.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    schema = json.loads(json.dumps(json_schema(ContentCatalog())))
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def problems(validator: Draft7Validator, text: str) -> list[str]:
    document = yaml.load(text, Loader=Yaml12)
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_file_fits_as_it_is_written(validator: Draft7Validator, path: Path) -> None:
    assert problems(validator, path.read_text()) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_file_fits_with_its_bases_and_complete(validator: Draft7Validator, path: Path) -> None:
    config = Config.from_yaml(path, FILES.get(path.name, []))
    assert problems(validator, config.to_yaml()) == []
    assert problems(validator, dump_config(config.resolved())) == []


WHOLE = """
data: {kind: criteo, train: a.tsv}
features: {dense: [I1, {name: I2, transform: log}], sparse: [{name: C1, num_embeddings: 1e3}]}
towers:
  - {name: deep, kind: mlp, params: {hidden: [8]}, loss: {kind: focal, params: {gamma: 2}}}
  - {name: cross, kind: dcn_v2, params: null}
train: {steps: 200_000}
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("train: {steps: 200_000}", "train: {step: 200}"),
        ("train: {steps: 200_000}", "train: {steps: many}"),
        ("train: {steps: 200_000}", "train: {steps: 0}"),
        ("train: {steps: 200_000}", "train: {steps: 2, tf32: 1}"),
        ("train: {steps: 200_000}", ""),
        ("train: {steps: 200_000}", "train: {steps: 2}\nschema_version: 2"),
        ("train: {steps: 200_000}", "train: {steps: 2}\nschedule: {preset: eras}"),
        ("kind: criteo", "kind: crito"),
        ("train: a.tsv", "train: {path: a.tsv}"),
        ("train: a.tsv", "train: a.tsv, eval_fraction: 1"),
        ("kind: mlp", "kind: mpl"),
        ("hidden: [8]", "hiden: [8]"),
        ("hidden: [8]", "hidden: [eight]"),
        ("gamma: 2", "gama: 2"),
        ("kind: dcn_v2, params: null", "kind: dcn_v2, params: {hidden: [8]}"),
        ("name: cross, ", ""),
        ("transform: log", "transform: sqrt"),
        ("dense: [I1,", "dense: [[I1],"),
    ],
)
def test_a_mistake_is_marked(validator: Draft7Validator, right: str, wrong: str) -> None:
    assert problems(validator, WHOLE) == []
    assert right in WHOLE
    assert problems(validator, WHOLE.replace(right, wrong)) != []


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ("towers: {cross: {loss: {weight: 0.5}}}", True),
        ("towers: {cross: {kind: mlp, params: {hidden: [8]}}}", True),
        ("features: {sparse: {C1: {num_embeddings: 10}}}", True),
        ("train: {epochs: 1}", True),
        ("towers: {cross: {loss: {wieght: 0.5}}}", False),
        ("towers: {cross: {kind: mlp, params: {rank: 8}}}", False),
        ("train: {epoch: 1}", False),
    ],
)
def test_a_file_with_a_base_says_only_what_it_changes(validator: Draft7Validator, change: str, fits: bool) -> None:
    assert (problems(validator, f"_base_: ctr_erase.yaml\n{change}") == []) == fits


def test_every_key_that_has_a_description_in_the_schema_brings_it(validator: Draft7Validator) -> None:
    definitions = validator.schema["$defs"]
    assert "hash of (seed, row)" in definitions["SplitConfig"]["properties"]["by"]["description"]
    assert "Where rows come from" in definitions["DataConfig"]["description"]
    assert validator.schema["$id"] == "urn:erase-rec:config:1"


@pytest.mark.parametrize("version", ["2", "0", "one"])
def test_a_file_of_another_version_is_refused_with_one_message(tmp_path: Path, version: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"schema_version: {version}\nnews: {{of: the future}}\n{WHOLE}")
    with pytest.raises(ConfigError, match=r"config\.yaml:1: schema_version: found '\w+', expected 1, which") as caught:
        Config.from_yaml(path)
    assert len(caught.value.problems) == 1


def test_the_version_says_nothing_of_what_a_run_learns() -> None:
    from erase_rec.config.load import config_hash

    configs = [Config.from_yaml("ctr_erase.yaml", each).resolved() for each in ([], ["schema_version=1"])]
    assert config_hash(configs[0]) == config_hash(configs[1])
    assert configs[0].schema_version == 1
