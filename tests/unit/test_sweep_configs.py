"""Every shipped sweep: all of its points are valid, and its arms are what the file says of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from erase_rec.api.assembly import ContentCatalog
from erase_rec.bench.arms import plan_arms, read_arms
from erase_rec.config import load_config
from erase_rec.config.schema import Config
from erase_rec.sweep.file import ReadSweep, read_sweep
from erase_rec.sweep.points import plan_points
from erase_rec.sweep.search import check_search

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
POINTS = {
    "blocking_vs_nonblocking": 35,
    "fup": 35,
    "mnist_mlp": 24,
    "objectives_adult": 168,
    "objectives_criteo": 168,
    "objectives_frappe": 168,
    "objectives_kuaishou": 168,
    "objectives_movielens": 168,
    "objectives_sparrow": 168,
    "objectives_synthetic": 33,
    "saturation": 81,
    "streams": 25,
    "table1": 65,
    "table1_cpu": 39,
}


def arms(name: str) -> dict[str, Config]:
    """The configuration of each arm, with the first seed."""
    sweep = read_sweep(f"sweeps/{name}.yaml")
    points = plan_points(sweep, [], catalog=ContentCatalog())
    return {
        point.arm: load_config(sweep.base, point.overrides, catalog=ContentCatalog()).config
        for point in points
        if point.seed == sweep.file.seeds[0]
    }


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_point_is_valid_and_the_header_says_how_many(path: Path) -> None:
    sweep = read_sweep(path)
    if "objectives" in path.stem:  # points that are the same for every arm: one of them each
        sweep, combinations = with_one_of_its_points(sweep)
    else:
        combinations = 1
    points = len(plan_points(sweep, [], catalog=ContentCatalog())) * combinations
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert points == POINTS[path.stem]
    assert f"# {points} runs" in header
    assert f"erase-rec sweep --config sweeps/{path.name}\n" in header


def with_one_of_its_points(sweep: ReadSweep) -> tuple[ReadSweep, int]:
    """The sweep with the first of its list of points, and how many there are."""
    points = sweep.file.list
    return replace(sweep, file=sweep.file.model_copy(update={"list": points[:1]})), len(points)


def test_objectives_are_compared_on_one_model_and_exact_arms_cut_nothing() -> None:
    sweep, _ = with_one_of_its_points(read_sweep("sweeps/objectives_movielens.yaml"))
    found = {
        point.arm.partition(" ")[0]: load_config(sweep.base, point.overrides, catalog=ContentCatalog()).config
        for point in plan_points(sweep, [], catalog=ContentCatalog())
    }
    kinds = {arm: [(tower.kind, tower.params) for tower in config.towers] for arm, config in found.items()}
    assert all(each == kinds["exact"] for each in kinds.values())
    for arm, config in found.items():
        assert any(tower.detach for tower in config.towers) != arm.startswith("exact")
        targets = {tower.loss.target for tower in config.towers if tower.loss}
        assert targets == (
            {"joint"} if arm.startswith("joint") else set() if arm in {"exact", "exact_additive"} else {"own"}
        )
    assert {arm for arm, config in found.items() if config.schedule.exact_every} == {"joint_exact_16"}
    assert [tower.cut_at for tower in found["joint_cut"].towers] == [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("name", ["table1", "table1_cpu"])
def test_table1_holds_the_paper_s_rows_their_rivals_and_an_a_a_pair(name: str) -> None:
    found = arms(name)
    presets = {arm: config.schedule.preset for arm, config in found.items()}
    assert presets == {
        "baseline": "exact",
        "baseline_again": "exact",
        "row3": "paper_row3",
        "row2": "paper_row2",
        "row1": "paper_row1",
        "row0_blocking": "paper_row0",
        "row0_nonblocking": "paper_row0",
        "detached": "detached",
        "exact_streams": "exact_streams",
        "exact_graph": "exact",
        "exact_streams_graph": "exact_streams",
        "erase_joint": "erase",
        "erase_own": "erase",
    }
    assert found["baseline"] == found["baseline_again"]
    assert (found["row0_blocking"].schedule.dispatch, found["row2"].schedule.dispatch) == ("blocking", "blocking")
    assert found["row0_nonblocking"].schedule.dispatch == "non_blocking"
    assert {found[arm].schedule.cuda_graph for arm in ("exact_graph", "exact_streams_graph")} == {"step"}
    targets = {arm: {tower.loss.target for tower in found[arm].towers if tower.loss} for arm in found}
    for arm, config in found.items():
        exact = config.schedule.preset.startswith("exact")
        assert targets[arm] == (set() if exact else {"own"} if arm == "erase_own" else {"joint"})
        assert any(tower.detach for tower in config.towers) != exact


@pytest.mark.parametrize("row", ["baseline", "row3", "row2", "row1", "row0_blocking", "row0_nonblocking"])
def test_table1_trains_what_the_files_of_the_rows_do(row: str) -> None:
    alone = load_config(f"table1/{row}.yaml", catalog=ContentCatalog()).config
    assert arms("table1")[row] == alone


@pytest.mark.parametrize(
    ("name", "workload", "again"),
    [
        ("table1", "ctr_erase.yaml", {"baseline_again"}),
        ("mnist_mlp", "proxies/mnist_mlp.yaml", {"exact_again"}),
        ("saturation", "bench/h200.yaml", set()),
    ],
)
def test_turns_time_what_the_sweep_trains(name: str, workload: str, again: set[str]) -> None:
    """The arms of a file for ``erase-rec bench`` are the sweep's, but that they must be captured where they say so."""
    trained = {arm.partition(" ")[0]: config for arm, config in arms(name).items()}
    timed = read_arms(ROOT / f"configs/bench/arms_{name.removesuffix('_mlp')}.yaml")
    assert {arm.name for arm in timed} == set(trained) - again
    overrides = ["schedule.optimizer=per_tower"] if name == "saturation" else []
    for each in plan_arms(workload, overrides, timed, [], catalog=ContentCatalog()):
        assert each.config is not None, each.refusal
        assert each.config.schedule.strict or each.config.schedule.cuda_graph == "none"
        schedule = each.config.schedule.model_copy(update={"strict": False})
        sections = {"schedule": schedule, "data": trained[each.arm.name].data, "train": trained[each.arm.name].train}
        assert each.config.model_copy(update=sections) == trained[each.arm.name], each.arm.name


def test_attention_is_timed_with_the_fused_kernel_and_without() -> None:
    timed = read_arms(ROOT / "configs/bench/arms_transformer.yaml")
    for each in plan_arms("proxies/transformer.yaml", [], timed, [], catalog=ContentCatalog()):
        assert each.config is not None, each.refusal
        assert {tower.params["fused"] for tower in each.config.towers} == {each.arm.name.endswith("fused")}
        assert (each.config.schedule.cuda_graph == "step") == ("graph" in each.arm.name)
        assert each.family == {"exact": "exact", "detached": "detached", "early": "early"}[each.arm.name.split("_")[0]]


def test_streams_shares_as_many_as_it_says() -> None:
    shared = {arm: {tower.stream for tower in config.towers} for arm, config in arms("streams").items()}
    assert {arm: len(names) for arm, names in shared.items()} == {
        "one": 1,
        "one_again": 1,
        "two": 2,
        "four": 4,
        "six": 6,
    }


def test_saturation_varies_batch_and_width_alone_within_a_method() -> None:
    found = arms("saturation")
    methods = {"exact": "exact_streams", "aggregate": "detached", "early": "erase"}
    widths = {"narrow": [128, 64], "medium": [512, 256], "wide": [2048, 1024]}
    sizes = (512, 4096, 32768)
    assert list(found) == [
        f"{method}_{width} local_batch_size={size}" for method in methods for width in widths for size in sizes
    ]
    for arm, config in found.items():
        method, width = arm.split()[0].split("_")
        assert config.schedule.preset == methods[method]
        assert config.towers[3].params["hidden"] == widths[width]
        assert config.train.local_batch_size == int(arm.rpartition("=")[2])
        assert (config.schedule.cuda_graph, config.schedule.optimizer) == ("step", "per_tower")


def test_the_examples_of_the_page_are_valid(tmp_path: Path) -> None:
    grid, search = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/sweeps.md").read_text(), flags=re.DOTALL)
    path = tmp_path / "sweep.yaml"
    path.write_text(grid)
    assert len(plan_points(read_sweep(path), [], catalog=ContentCatalog())) == 2 * 2 * 3
    path.write_text(search)
    sweep = read_sweep(path)
    assert sweep.file.search is not None
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    check_search(sweep, [], catalog=ContentCatalog())
