"""The loader as a whole: all problems at once, defaults, round trip, look-up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from erase_rec.config import load
from erase_rec.config.catalog import Group
from erase_rec.config.load import config_hash, dump_config, find_config, load_config
from erase_rec.config.schema import Config, PositiveInt
from erase_rec.config.types import Boolean, Number, Params, ProjectedTowerParams
from erase_rec.errors import ConfigError, UserError


class MLPParams(ProjectedTowerParams):
    hidden: tuple[PositiveInt, ...] = (8,)
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    pair: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = (1, 1)


class CrossParams(ProjectedTowerParams):
    rank: PositiveInt | None = 4

    def problems(self, dense_dim: int, embedding_dims: Sequence[int]) -> list[str]:
        return [f"cross needs equal dims, found {embedding_dims}"] if len(set(embedding_dims)) > 1 else []


class CSVParams(Params):
    header: Boolean = True


class NoParams(Params):
    pass


class FakeCatalog:
    MODELS: dict[str, dict[str, type[Params]]] = {  # noqa: RUF012, a constant
        "tower": {"cross": CrossParams, "mlp": MLPParams},
        "head": {"linear": NoParams},
        "local_loss": {"bce": NoParams},
        "source": {"csv": CSVParams, "synthetic": NoParams},
    }

    def kinds(self, group: Group) -> Sequence[str]:
        return sorted(self.MODELS[group])

    def params_model(self, group: Group, kind: str) -> type[Params]:
        return self.MODELS[group][kind]


GOOD = """\
data: {kind: csv, train: train.csv, label: {column: 101}}
features:
  sparse_defaults: {num_embeddings: 100}
  dense: [I1, {name: I2, fill: 1e-3}]
  sparse: [on, C2]
towers:
  - {name: deep, kind: mlp, params: {hidden: [4, 1e1]}, loss: {kind: bce}}
  - {name: cross, kind: cross, loss: {weight: 0.5}}
schedule: {preset: erase}
train: {epochs: 1}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(text: str, *overrides: str) -> Config:
    Path("a.yaml").write_text(text, encoding="utf-8")
    return load_config("a.yaml", overrides, catalog=FakeCatalog()).config


def problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, *overrides)
    return caught.value.problems


def the_problem(text: str, *overrides: str) -> str:
    (problem,) = problems(text, *overrides)
    return problem


def test_a_good_file_is_complete() -> None:
    config = loaded(GOOD)
    assert config.data.label.column == "101"
    assert [feature.name for feature in config.features.sparse] == ["on", "C2"]
    assert config.features.dense[1].fill == 1e-3
    assert config.towers[0].params == {"out_dim": 64, "hidden": [4, 10], "dropout": 0.0, "pair": [1, 1]}
    assert config.towers[1].params == {"out_dim": 64, "rank": 4}
    assert config.data.params == {"header": True}
    assert (config.towers[0].detach, config.towers[0].stream) == (True, "own")
    assert config.schedule.early_backward is True
    assert config.schedule.dispatch == "blocking"


@pytest.mark.parametrize("spelling", ["1e-3", "0.001", '"0.001"', "1.0e-3", "'1e-3'"])
def test_spellings_of_a_number(spelling: str) -> None:
    assert loaded(GOOD + f"optimizer: {{dense: {{lr: {spelling}}}}}\n").optimizer.dense.lr == 0.001


@pytest.mark.parametrize("spelling", ["1e3", '"1000"', "1000.0", "1_000"])
def test_spellings_of_a_whole_number(spelling: str) -> None:
    assert loaded(GOOD, f"train.local_batch_size={spelling}").train.local_batch_size == 1000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epochs=yes", "train.epochs: expected a whole number, found 'yes'"),
        ("train.epochs=true", "expected a whole number, found 'true'"),
        ("train.epochs=1.5", "expected a whole number, found '1.5'"),
        ("train.epochs=0", "expected a number above 0, found '0'"),
        ("train.epochs=[1]", "expected a whole number"),
        ("optimizer.dense.lr=true", "expected a number, found 'true'"),
        ("optimizer.dense.lr=nan", "expected a finite number"),
        ("optimizer.dense.lr=1e400", "expected a finite number"),
        ("optimizer.dense.beta1=1", "expected a number below 1, found '1'"),
        ("eval.scores=1", "expected true or false, found '1'"),
        ("eval.scores=yes", "expected true or false, found 'yes'"),
        ("embedding.backend=torchrek", "found 'torchrek'; did you mean 'torchrec'?"),
        ("embedding=null", "embedding: expected a section of keys, found null"),
        ("towers.deep.name=a b", "expected a letter, then letters, digits and underscores, found 'a b'"),
        ("towers={a: 1}", "no item of that name"),
        ("towers=x", "towers: expected a list, found 'x'"),
        ("towers=[]", "towers: expected a list of 1 or more, found 0"),
        ("towers.deep.inputs.dense=maybe", "expected true, false or a list of names"),
        ("towers.deep.kind=mpl", "no tower is called 'mpl'; did you mean 'mlp'? (there are: cross, mlp)"),
        ("towers.deep.head.kind=liner", "no local head is called 'liner'; did you mean 'linear'?"),
        ("towers.deep.loss.kind=bse", "no local loss is called 'bse'; did you mean 'bce'?"),
        ("data.kind=tsv", "no data source is called 'tsv'"),
        ("towers.deep.params.hiden=[3]", "towers.deep.params.hiden: unknown key; did you mean 'hidden'?"),
        ("towers.deep.params.hidden=[3, x]", "towers.deep.params.hidden.1: expected a whole number, found 'x'"),
        ("towers.deep.params.pair=[3]", "towers.deep.params.pair: expected a list of 2 or more, found 1"),
        ("towers.deep.params.pair=[x, 3]", "towers.deep.params.pair.0: expected a whole number"),
        ("towers.deep.params=x", "towers.deep.params: expected a section of keys, found 'x'"),
        ("data.params.header=1", "data.params.header: expected true or false"),
        ("trian.steps=3", "trian: unknown key; did you mean 'train'?"),
        ("train.step=3", "train.step: unknown key; did you mean 'steps'?"),
        ("features.sparse.C2.min_cuont=3", "features.sparse.C2.min_cuont: unknown key; did you mean 'min_count'?"),
        ("_base_=x.yaml", "_base_: unknown key"),
    ],
)
def test_a_wrong_value_is_one_message_with_the_key_what_was_found_and_the_way_out(override: str, words: str) -> None:
    problem = the_problem(GOOD, override)
    assert words in problem
    assert problem.startswith(f"override {override!r}: ")


def test_missing_keys() -> None:
    found = problems("towers:\n  - {kind: mlp}\n")
    assert [problem.partition(": a required")[0] for problem in found] == [
        "a.yaml:1: data",
        "a.yaml:1: features",
        "a.yaml:2: towers.0.name",
        "a.yaml:1: train",
    ]


def test_an_empty_file_lists_what_is_required() -> None:
    assert [problem.split(": ")[1] for problem in problems("")] == ["data", "features", "towers", "train"]


def test_all_problems_of_a_file_at_once() -> None:
    text = """\
data: {kind: csv, train: a, train: b}
features:
  dense: [I1, I1]
  sparse: [{name: C1, encoding: hassh}, {name: C2, encoding: vocabulary}]
towers:
  - {name: deep, kind: mpl, lss: {kind: bce}}
  - {name: cross, kind: cross, loss: null}
  - {kind: mlp, params: {dropout: 1}, loss: {weight: x}}
over_arch: {hidden: [a, b]}
schedule: {preset: erase, cuda_graph: step, dispatch: non_blocking}
train: {steps: 5, epochs: 1, lr: 3}
"""
    found = problems(text)
    expected = [
        ("a.yaml:1", "train", "given twice"),
        ("a.yaml:3", "features.dense.I1.name", "listed 2 times"),
        ("a.yaml:4", "features.sparse.C1.encoding", "did you mean 'hash'?"),
        ("a.yaml:6", "towers.deep.kind", "did you mean 'mlp'?"),
        ("a.yaml:6", "towers.deep.lss", "did you mean 'loss'?"),
        ("a.yaml:7", "towers.cross.loss", "detached and has no loss"),
        ("a.yaml:8", "towers.2.name", "required"),
        ("a.yaml:8", "towers.2.params.dropout", "below 1"),
        ("a.yaml:8", "towers.2.loss.weight", "expected a number"),
        ("a.yaml:9", "over_arch.hidden.0", "whole number"),
        ("a.yaml:9", "over_arch.hidden.1", "whole number"),
        ("a.yaml:10", "schedule.dispatch", "use dispatch: blocking"),
        ("a.yaml:11", "train.epochs", "given beside steps"),
        ("a.yaml:11", "train.lr", "unknown key"),
    ]
    unmatched = [
        (place, key, words)
        for place, key, words in expected
        if sum(problem.startswith(f"{place}: {key}: ") and words in problem for problem in found) != 1
    ]
    assert unmatched == []
    assert len(found) == len(expected), "a misspelt or wrong value must not be reported a second time as a consequence"


def test_withdrawn_keys_are_to_be_left_out() -> None:
    """And are no misspelt neighbours, as `weight_floor` of `weight`."""
    withdrawn = ("towers.deep.loss.weight_floor", "towers.deep.loss.teacher", "over_arch.teacher_decay")
    with pytest.raises(ConfigError) as caught:
        loaded(GOOD, *(f"{key}=0.5" for key in withdrawn), "towers.deep.params.teacher=1")
    *found, of_params = caught.value.problems
    assert [problem.split(": ")[1] for problem in found] == [*withdrawn]
    assert all(problem.endswith("(docs/objectives.md); leave it out") for problem in found)
    assert "valid keys here" in of_params


def test_the_message_shows_all_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(GOOD, "seed=x", "train.lr=1")
    text = str(caught.value)
    assert text.startswith("2 problems in the configuration:\n")
    assert all(problem in text for problem in caught.value.problems)


def test_defaults_fill_what_entries_leave_out_and_are_then_empty() -> None:
    text = GOOD.replace(
        "  sparse_defaults: {num_embeddings: 100}\n",
        "  dense_defaults: {transform: none, fill: 2}\n"
        "  sparse_defaults: {encoding: vocabulary, min_count: 5, separator: '^', num_embeddings: 9}\n",
    ).replace(
        "[on, C2]",
        "[on, {name: h, encoding: hash}, {name: bag, multi_valued: true, num_embeddings: null, min_count: 1}]",
    )
    features = loaded(text).features
    assert [(f.transform, f.fill) for f in features.dense] == [("none", 2.0), ("none", 1e-3)]
    assert [(f.name, f.encoding, f.min_count, f.separator, f.num_embeddings) for f in features.sparse] == [
        ("on", "vocabulary", 5, None, 9),
        ("h", "hash", 1, None, 9),
        ("bag", "vocabulary", 1, "^", None),
    ]
    assert not any(value for _, value in features.sparse_defaults)
    assert not any(value for _, value in features.dense_defaults)


def test_a_default_that_no_feature_reads_is_refused() -> None:
    text = GOOD.replace("{num_embeddings: 100}", "{num_embeddings: 100, separator: ','}")
    assert "features.sparse_defaults.separator: no feature" in the_problem(text)


def test_a_towers_own_rules_are_asked_with_its_inputs() -> None:
    mixed = GOOD.replace("[on, C2]", "[on, {name: C2, embedding_dim: 3}]")
    assert the_problem(mixed).endswith("towers.cross: cross needs equal dims, found [16, 3]")
    assert loaded(mixed, "towers.cross.inputs.sparse=[C2]").towers[1].inputs.sparse == ("C2",)


def test_null_takes_an_optional_section_back() -> None:
    config = loaded(GOOD, "schedule.preset=exact", "towers.deep.loss=null", "towers.deep.params=null", "data.eval=null")
    assert config.towers[0].loss is None
    assert config.towers[0].params["hidden"] == [8]
    assert config.data.eval == ()


def test_a_duration_and_held_out_files_given_as_overrides_replace_the_files() -> None:
    text = GOOD.replace("train: train.csv", "train: train.csv, eval_fraction: 0.1")
    config = loaded(text, "train.steps=5", "data.eval=dev.csv")
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert (config.data.eval, config.data.eval_fraction) == (("dev.csv",), None)


def test_a_resolved_configuration_reads_back_equal() -> None:
    config = loaded(GOOD.replace("[on, C2]", "['null', '~', '853', a.b, '性别', ' a b ', true, '<<', '#x']"))
    again = loaded(dump_config(config))
    assert again == config
    assert [feature.name for feature in again.features.sparse][:2] == ["null", "~"]
    assert config_hash(again) == config_hash(config)


@example(name="\x85 \u2028\n\t", lr=1e-5)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
        lambda text: text not in {"I1", "I2", "on", "101"}
    ),
    lr=st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_text_and_number_survives_the_round_trip(name: str, lr: float) -> None:
    config = loaded(GOOD)
    feature = config.features.sparse[1].model_copy(update={"name": name})
    features = config.features.model_copy(update={"sparse": (config.features.sparse[0], feature)})
    dense = config.optimizer.dense.model_copy(update={"lr": lr})
    optimizer = config.optimizer.model_copy(update={"dense": dense})
    changed = config.model_copy(update={"features": features, "optimizer": optimizer})
    assert loaded(dump_config(changed)) == changed


def test_the_preset_of_a_resolved_file_cannot_be_overridden_without_effect() -> None:
    resolved = dump_config(loaded(GOOD))
    problem = the_problem(resolved, "schedule.preset=exact")
    assert "schedule.preset: has no effect" in problem


def test_the_hash_is_of_what_a_run_computes() -> None:
    base = loaded(GOOD)
    assert config_hash(loaded(GOOD, "run.dir=elsewhere")) == config_hash(base)
    assert config_hash(loaded(GOOD, "optimizer.dense.lr=0.001")) == config_hash(base), "a default written out"
    assert config_hash(loaded(GOOD, "seed=2")) != config_hash(base)
    assert config_hash(loaded(GOOD, "features.sparse=[C2, on]")) != config_hash(base)
    assert len(config_hash(base)) == 16


def test_a_name_is_looked_up_here_then_among_the_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "configs"
    shipped.mkdir()
    monkeypatch.setattr(load, "SHIPPED", shipped)
    for name in ("one", "two"):
        (shipped / f"{name}.yaml").write_text(GOOD)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "two.yaml").write_text(GOOD)

    assert find_config("one") == find_config("one.yaml") == shipped / "one.yaml"
    assert find_config("two") == elsewhere / "two.yaml"
    assert find_config(shipped / "two") == shipped / "two.yaml"
    result = load_config("one", catalog=FakeCatalog())
    assert (result.name, result.path) == ("one", shipped / "one.yaml")
    assert result.hash == config_hash(result.config)

    with pytest.raises(UserError) as caught:
        find_config("ones")
    assert "'ones' not found" in str(caught.value)
    assert str(shipped / "ones.yaml") in str(caught.value)
    assert "did you mean 'one.yaml'?" in str(caught.value)
    with pytest.raises(UserError, match="not found"):
        find_config("")


def test_configurations_are_located_from_the_package(checkout: Path) -> None:
    assert checkout / "configs" == load.SHIPPED


def test_reading_a_configuration_imports_no_torch() -> None:
    code = "import sys, erase_rec.config, erase_rec.config.rules_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_python_built_configurations_pass_the_same_checks() -> None:
    plain: dict[str, Any] = {
        "data": {"kind": "csv"},
        "features": {"dense": ["I1"]},
        "towers": [{"name": "a", "kind": "mlp"}],
        "train": {"steps": 5},
    }
    assert Config.model_validate(plain).features.dense[0].name == "I1"
    with pytest.raises(ValueError, match="found a boolean"):
        Config.model_validate(plain | {"optimizer": {"dense": {"lr": True}}})
    with pytest.raises(ValueError, match="found a boolean"):
        Config.model_validate(plain | {"train": {"steps": True}})
    with pytest.raises(ValueError, match="expected true or false, found 1"):
        Config.model_validate(plain | {"eval": {"scores": 1}})
