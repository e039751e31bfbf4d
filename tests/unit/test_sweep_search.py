"""The search of a sweep: what it draws, and that it draws the same again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from erase_rec.api.assembly import ContentCatalog
from erase_rec.errors import ConfigError, UserError
from erase_rec.sweep import search
from erase_rec.sweep.file import ReadSweep, read_sweep
from erase_rec.sweep.points import Point
from erase_rec.sweep.search import best_arm, check_search, draw_points

BASE = """
data: {kind: synthetic, params: {rows: 600, eval_rows: 200}}
features: {dense: [I1], sparse: [{name: C1, num_embeddings: 50}]}
towers: [{name: deep, kind: mlp, loss: {kind: bce}, params: {hidden: [8], out_dim: 4}}]
train: {steps: 10, local_batch_size: 50}
"""
SEARCH = """
base: base.yaml
overrides: {schedule.preset: erase, optimizer.dense.lr: 0.5}
search:
  trials: 12
  space:
    optimizer.dense.lr: {low: 1e-4, high: 1e-1, log: true}
    embedding.dim: {low: 2, high: 9, whole: true}
    over_arch.hidden: {choices: [[8], [16, 8]]}
seeds: [1, 2]
"""


def sweep(folder: Path, text: str = SEARCH) -> ReadSweep:
    (folder / "base.yaml").write_text(BASE)
    (folder / "sweep.yaml").write_text(text)
    return read_sweep(folder / "sweep.yaml")


def values(point: Point) -> dict[str, str]:
    return dict(text.split("=", 1) for text in point.overrides)


def off(point: Point) -> float:
    """Lowest at lr 0.01."""
    return abs(math.log10(float(values(point)["optimizer.dense.lr"])) + 2)


def draw(read: ReadSweep, cost: Callable[[Point], float] = off, *overrides: str) -> list[list[Point]]:
    return list(draw_points(read, overrides, catalog=ContentCatalog(), cost=cost))


@pytest.fixture
def _optuna() -> None:
    pytest.importorskip("optuna", reason="the extra `search` is not installed")


@pytest.mark.usefixtures("_optuna")
class TestDrawing:
    def test_every_trial_is_a_point_a_seed_inside_the_space(self, tmp_path: Path) -> None:
        lists = draw(sweep(tmp_path))
        assert [len(points) for points in lists] == [2 * trials for trials in range(1, 13)]
        for point in lists[-1]:
            drawn = values(point)
            assert 1e-4 <= float(drawn["optimizer.dense.lr"]) <= 1e-1
            assert int(drawn["embedding.dim"]) in range(2, 10)
            assert drawn["over_arch.hidden"] in {"[8]", "[16, 8]"}
            assert drawn["schedule.preset"] == "erase"
        assert [point.seed for point in lists[-1]] == [1, 2] * 12
        first = lists[-1][0]
        assert first.arm == f"trial 0 lr={values(first)['optimizer.dense.lr']} " + " ".join(
            f"{key.rpartition('.')[2]}={values(first)[key]}" for key in ("embedding.dim", "over_arch.hidden")
        )

    def test_the_same_is_drawn_again_and_what_trials_came_to_matters(self, tmp_path: Path) -> None:
        read = sweep(tmp_path)
        once = draw(read)
        assert draw(read) == once
        assert draw(read, lambda point: -off(point))[-1] != once[-1]
        assert draw(sweep(tmp_path, SEARCH.replace("trials: 12", "trials: 12\n  seed: 2")))[-1] != once[-1]

    def test_trials_at_once_are_drawn_before_any_of_them_is_known(self, tmp_path: Path) -> None:
        read = sweep(tmp_path, SEARCH.replace("trials: 12", "trials: 7\n  at_once: 3"))
        assert [len(points) for points in draw(read)] == [6, 12, 14]

    def test_failed_trials_do_not_stop_it(self, tmp_path: Path) -> None:
        lists = draw(sweep(tmp_path), lambda point: math.nan if point.seed == 2 else off(point))
        assert len(lists[-1]) == 24

    def test_what_is_drawn_twice_runs_once(self, tmp_path: Path) -> None:
        text = "base: base.yaml\nsearch: {trials: 20, sampler: random, space: {embedding.dim: {choices: [4, 8]}}}\n"
        last = draw(sweep(tmp_path, text), lambda point: 1.0)[-1]
        assert sorted(values(point)["embedding.dim"] for point in last) == ["4", "8"]

    def test_the_command_line_goes_before_what_is_drawn(self, tmp_path: Path) -> None:
        last = draw(sweep(tmp_path), lambda point: 1.0, "embedding.dim=4")[-1]
        assert {values(point)["embedding.dim"] for point in last} == {"4"}

    def test_ends_of_the_space_are_checked_first(self, tmp_path: Path) -> None:
        text = SEARCH.replace("low: 2", "low: 0").replace("[16, 8]]", "[16, 8], [0], [x]]")
        with pytest.raises(ConfigError) as caught:
            check_search(sweep(tmp_path, text), [], catalog=ContentCatalog())
        found = "\n".join(caught.value.problems)
        for text in ("embedding.dim=0", "over_arch.hidden=[0]", "over_arch.hidden=[x]"):
            assert f"override {text!r}" in found
        assert "sweep.yaml:8: override 'embedding.dim=0'" in found


def test_without_optuna_the_way_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'erase-rec\[search\]'"):
        check_search(sweep(tmp_path), [], catalog=ContentCatalog())


def test_the_best_arm_has_the_lowest_mean_and_no_failed_point() -> None:
    costs = {("a", 1): 0.1, ("a", 2): math.nan, ("b", 1): 0.2, ("b", 2): 0.6, ("c", 1): 0.3, ("c", 2): 0.4}
    points = [Point(f"{arm}{seed}", arm, seed, ()) for arm, seed in costs]
    assert best_arm(points, lambda point: costs[point.arm, point.seed]) == "c"
    assert best_arm(points[:2], lambda point: math.nan) is None
