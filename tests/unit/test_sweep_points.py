"""A sweep's file and its points: strict, named by content, in turns, all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from erase_rec.api.assembly import ContentCatalog
from erase_rec.config import load_config
from erase_rec.config.document import Node, parse_value
from erase_rec.errors import ConfigError, UserError
from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import Override, Point, interleaved, layered, plan_points, value_text

BASE = """
data: {kind: synthetic, params: {rows: 600, eval_rows: 200}}
features: {dense: [I1], sparse: [{name: C1, num_embeddings: 50}]}
towers: [{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [8], out_dim: 4}}]
train: {steps: 10, local_batch_size: 50}
"""
ARMS = """
base: base.yaml
arms:
  exact: {schedule.preset: exact, towers.deep.loss: null}
  erase: {schedule.preset: erase}
seeds: [1, 2]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def plan(folder: Path, text: str, *overrides: str) -> list[Point]:
    (folder / "sweep.yaml").write_text(text)
    return plan_points(read_sweep(folder / "sweep.yaml"), overrides, catalog=ContentCatalog())


def problems(folder: Path, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        plan(folder, text, *overrides)
    return caught.value.problems


def test_points_are_arms_by_seeds_in_turns(folder: Path) -> None:
    points = plan(folder, ARMS)
    assert [(point.arm, point.seed) for point in points] == [("exact", 1), ("erase", 1), ("erase", 2), ("exact", 2)]
    assert points[0].overrides == ("schedule.preset=exact", "towers.deep.loss=null", "seed=1")
    given = plan(folder, ARMS + "order: given\n")
    assert [(point.arm, point.seed) for point in given] == [("exact", 1), ("exact", 2), ("erase", 1), ("erase", 2)]


def test_interleaved_goes_there_and_back() -> None:
    order = list(interleaved(["A", "B", "C"], [1, 2, 3]))
    assert order == [(arm, seed) for seed, arms in ((1, "ABC"), (2, "CBA"), (3, "ABC")) for arm in arms]


def test_an_id_says_the_content_and_nothing_else(folder: Path) -> None:
    ids = {(point.arm, point.seed): point.id for point in plan(folder, ARMS)}
    assert len(set(ids.values())) == 4
    # Other names, another way to say the same, another order, where runs write: the same points.
    renamed = """
base: base.yaml
overrides: {schedule: {preset: erase}}
arms: {b: {}, a: {schedule.preset: exact, towers.deep.loss: null}}
seeds: [2, 1]
"""
    again = {(point.arm, point.seed): point.id for point in plan(folder, renamed)}
    assert {again["a", seed] for seed in (1, 2)} == {ids["exact", seed] for seed in (1, 2)}
    assert again["b", 2] == ids["erase", 2]
    for changed in (ARMS + "overrides: {train.steps: 11}\n", ARMS + "ranks: 2\n"):
        assert {point.id for point in plan(folder, changed)}.isdisjoint(ids.values())
    (folder / "base.yaml").write_text(BASE.replace("steps: 10", "steps: 12"))
    assert {point.id for point in plan(folder, ARMS)}.isdisjoint(ids.values())


def test_an_id_hashes_the_resolved_configuration(folder: Path) -> None:
    """What a preset or default says already changes nothing when it is written out."""
    plain = plan(folder, "base: base.yaml\narms: {erase: {schedule.preset: erase}}\n")
    config = load_config(folder / "base.yaml", ["schedule.preset=erase"], catalog=ContentCatalog()).config
    written = f"{{schedule.preset: erase, schedule.dispatch: {config.schedule.dispatch}, embedding.dim: 16}}"
    assert plan(folder, f"base: base.yaml\narms: {{erase: {written}}}\n")[0].id == plain[0].id


def test_an_arm_that_is_there_twice_has_runs_of_its_own(folder: Path) -> None:
    points = plan(folder, "base: base.yaml\narms: {a: {}, again: {}}\n")
    assert [point.id for point in points] == [points[0].id, f"{points[0].id}-2"]


def test_a_grid_is_every_combination_and_a_list_is_its_entries(folder: Path) -> None:
    grid = (
        "base: base.yaml\narms: {erase: {schedule.preset: erase}}\ngrid: {train.steps: [5, 6], embedding.dim: [4, 8]}\n"
    )
    names = [point.arm for point in plan(folder, grid)]
    assert names == [f"erase steps={steps} dim={dim}" for steps in (5, 6) for dim in (4, 8)]
    listed = "base: base.yaml\nlist: [{train.steps: 5, embedding.dim: 8}, {train.steps: 6}]\n"
    points = plan(folder, listed)
    assert [point.arm for point in points] == ["steps=5 dim=8", "steps=6"]
    assert points[0].overrides == ("train.steps=5", "embedding.dim=8", "seed=1")
    assert [point.arm for point in plan(folder, "base: base.yaml\n")] == ["base"]


def test_later_layers_replace_earlier_ones() -> None:
    def layer(*texts: str) -> list[Override]:
        return [Override(*text.split("=", 1), place="") for text in texts]

    def texts(*layers: list[Override]) -> list[str]:
        return [override.text for override in layered(*layers)]

    assert texts(layer("a.b=1", "c=2"), layer("a.b=3")) == ["c=2", "a.b=3"]
    assert texts(layer("a.b=1", "ab=1"), layer("a={}")) == ["ab=1", "a={}"]
    assert texts(layer("train.epochs=1"), layer("train.steps=5")) == ["train.steps=5"]
    assert texts(layer("train.epochs=1"), layer("train.steps=null")) == ["train.epochs=1", "train.steps=null"]


def test_the_command_line_goes_before_the_file(folder: Path) -> None:
    point = plan(folder, ARMS + "overrides: {train.steps: 7}\n", "train.epochs=1", "schedule.preset=exact_streams")[0]
    assert point.overrides == ("towers.deep.loss=null", "train.epochs=1", "schedule.preset=exact_streams", "seed=1")


@pytest.mark.parametrize("value", ["a", "", "null", "~", "[x", "'q'", '"', " a ", "a: b", "-", "*x", "é", None, [], {}])
def test_a_value_is_read_back_as_it_was(value: object) -> None:
    def back(text: str) -> object:
        node = parse_value(text, "") if not text or text in {"~", "null"} or text[0] in "[{\"'" else Node(text, "")
        return node.plain()

    assert back(value_text(value)) == value
    for nested in ([value, value], {"k": value, "a b": [value]}):
        assert back(value_text(nested)) == nested


def test_all_problems_of_all_points_are_reported_at_once(folder: Path) -> None:
    arms = """
base: base.yaml
arms:
  good: {schedule.preset: erase}
  typo: {train.stepz: 5}
  late: {schedule.preset: erase, schedule.cuda_graph: step, schedule.dispatch: non_blocking}
"""
    typo, late = problems(folder, arms)
    assert typo.startswith("arm 'typo': ")
    assert "sweep.yaml:5: override 'train.stepz=5': train.stepz: unknown key; did you mean 'steps'?" in typo
    assert late.startswith("arm 'late': ")
    assert "sweep.yaml:6: override 'schedule.dispatch=non_blocking'" in late
    grid = "base: base.yaml\ngrid: {train.steps: [5, 0], embedding.dim: [4, 8]}\n"
    (zero,) = problems(folder, grid)
    assert zero.startswith("arms 'steps=0 dim=4', 'steps=0 dim=8': ")
    assert "sweep.yaml:2: override 'train.steps=0'" in zero


def test_a_problem_of_the_base_is_said_once(folder: Path) -> None:
    (folder / "base.yaml").write_text(BASE.replace("steps: 10", "steps: 0"))
    (found,) = problems(folder, ARMS)
    assert found.startswith("every point: ")
    assert "base.yaml:5: train.steps" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: base.yaml\nsedes: [1]\n", "sweep.yaml:2: sedes: unknown key; did you mean 'seeds'?"),
        ("seeds: [1]\n", "base: a required key is missing"),
        ("base: base.yaml\nseeds: [1, x]\n", "sweep.yaml:2: seeds.1: expected a whole number, found 'x'"),
        ("base: base.yaml\nseeds: [1, 1]\n", "sweep.yaml:2: seeds.1: 1 is there twice"),
        ("base: base.yaml\nseeds: []\n", "sweep.yaml:2: seeds: expected a list of 1 or more, found 0"),
        ("base: base.yaml\narms: {a: 3}\n", "sweep.yaml:2: arms.a: expected a section of keys, found '3'"),
        ("base: base.yaml\ngrid: {a: [1]}\nlist: [{b: 1}]\n", "sweep.yaml:3: list: grid is given too"),
        ("base: base.yaml\narms:\n  a: {seed: 3}\n", "sweep.yaml:3: arms.a.seed: cannot be set here: give seeds"),
        ("base: base.yaml\ngrid:\n  run.dir: [a]\n", "sweep.yaml:3: grid.run.dir: cannot be set here"),
        (
            "base: base.yaml\narms: {a: {}}\nsearch: {trials: 1, space: {a: {choices: [1]}}}\n",
            "arms: search is given too",
        ),
        ("base: base.yaml\nsearch: {trials: 1, space: {}}\n", "sweep.yaml:2: search.space: "),
        ("base: base.yaml\nsearch: {trials: 1, space: {a: {low: 1}}}\n", "search.space.a: expected low and high, or"),
        ("base: base.yaml\nsearch: {trials: 1, space: {a: {low: 2, high: 1}}}\n", "low (2) is not below high (1)"),
        ("base: base.yaml\nsearch: {trials: 1, space: {a: {low: 0, high: 1, log: true}}}\n", "log needs a low above 0"),
        ("base: base.yaml\nsearch: {trials: 1, space: {a: {choices: [1], low: 1}}}\n", "choices leave no room for"),
        ("base: base.yaml\nsearch: {trials: 1, space: {seed: {choices: [1]}}}\n", "search.space.seed: cannot be set"),
        ("base: base.yaml\ngrid: {train.steps: [5, 5]}\n", "two points are the same: steps=5"),
    ],
)
def test_a_wrong_file_says_where_and_what(folder: Path, text: str, said: str) -> None:
    (found,) = problems(folder, text)
    assert said in found


@pytest.mark.parametrize("override", ["seed=3", "run.name=x", "train.steps"])
def test_a_wrong_override_of_the_command_line_is_refused(folder: Path, override: str) -> None:
    (found,) = problems(folder, ARMS, override)
    assert found.startswith(f"override {override!r}: ")


def test_a_base_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"'nowhere\.yaml' not found"):
        plan(folder, "base: nowhere.yaml\n")
