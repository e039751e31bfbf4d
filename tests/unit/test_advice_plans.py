"""The ways that `erase-rec advise` compares, the sweep that it names, and what runs say of NE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from report_cases import Planted, make_run

from erase_rec.advice.candidates import CANDIDATES, Plans, plan_candidates, promise_of
from erase_rec.advice.ne_sweep import SWEEP_FILE, sweep_commands, sweep_text
from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.advise_ne import known_ne
from erase_rec.config.load import dump_config, load_config
from erase_rec.errors import UserError
from erase_rec.sweep.file import read_sweep
from erase_rec.sweep.points import plan_points

CATALOG = ContentCatalog()
ROWS = 2000


def plans(config: str, *overrides: str, on_cuda: bool = True) -> Plans:
    return plan_candidates(config, overrides, on_cuda=on_cuda, catalog=CATALOG)


def test_ways_keep_their_promise_and_the_configurations_own_is_among_them() -> None:
    found = plans("ctr_erase.yaml")
    assert found.reference == "erase_graph"
    assert found.arms[0].arm.name == "erase_graph"  # measured twice
    assert sorted(arm.arm.name for arm in found.arms) == sorted(candidate.name for candidate in CANDIDATES)
    by_name = {arm.arm.name: arm for arm in found.arms}
    for candidate in CANDIDATES:
        config = by_name[candidate.name].config
        assert config is not None, by_name[candidate.name].refusal
        assert promise_of(by_name[candidate.name]) == candidate.promise
        assert {tower.loss is not None for tower in config.towers} == {candidate.promise == "cut"}
        assert config.schedule.strict == candidate.name.endswith("_graph")
        assert (config.schedule.cuda_graph == "step") == candidate.name.endswith("_graph")
    assert plans("ctr_erase.yaml", on_cuda=False).reference == "erase"


def test_an_exact_configuration_keeps_its_losses_or_gets_joint_ones_where_towers_are_cut() -> None:
    bare = plans("ctr_exact.yaml")
    assert bare.reference == "exact"
    with_losses = plans("ctr_erase.yaml", "schedule.preset=exact", "towers.deep.loss.target=own")
    for found, exact_has, cut_targets in ((bare, False, {"joint"}), (with_losses, True, {"joint", "own"})):
        by_name = {arm.arm.name: arm.config for arm in found.arms}
        exact, erase = by_name["exact"], by_name["erase"]
        assert exact is not None
        assert erase is not None
        assert {tower.loss is not None for tower in exact.towers} == {exact_has}
        assert {tower.loss.target for tower in erase.towers if tower.loss} == cut_targets


def test_a_configuration_that_no_way_is_like_is_one_of_its_own() -> None:
    found = plans("ctr_erase.yaml", "schedule.preset=paper_row3", on_cuda=False)
    assert found.reference == "configured"
    assert found.arms[0].arm.overrides == ()
    assert len(found.arms) == len(CANDIDATES) + 1


@pytest.mark.parametrize(
    ("override", "refused", "reason"),
    [
        ("towers.deep.detach=true", "exact", "'deep' is detached and has no loss"),
        ("schedule.early_backward=false", "erase", "which makes it detached"),
    ],
)
def test_a_way_that_the_configuration_makes_another_is_refused(override: str, refused: str, reason: str) -> None:
    (arm,) = (arm for arm in plans("ctr_erase.yaml", override).arms if arm.arm.name == refused)
    assert arm.config is None
    assert reason in arm.refusal


def test_the_cpu_has_no_streams_to_compare() -> None:
    (arm,) = (arm for arm in plans("ctr_erase.yaml", on_cuda=False).arms if arm.arm.name == "exact_streams")
    assert "the CPU has no streams" in arm.refusal


def test_a_norm_over_all_towers_goes_with_an_update_at_the_end() -> None:
    found = plans("ctr_erase.yaml", "optimizer.dense.max_grad_norm=1.0", "optimizer.dense.clip=global")
    by_name = {arm.arm.name: arm.config for arm in found.arms}
    for name in ("exact_streams_graph", "erase_graph"):
        config = by_name[name]
        assert config is not None
        assert config.schedule.optimizer == "end"


def test_the_sweep_that_is_named_can_be_read_and_is_of_both_ways(tmp_path: Path) -> None:
    overrides = ["data.params={rows: 300, eval_rows: 100}", "seed=7", "schedule.preset=paper_row3", "data.train=[]"]
    arms = {planned.arm.name: planned.arm for planned in plans("ctr_erase.yaml", *overrides[:3]).arms}
    path = tmp_path / SWEEP_FILE
    path.write_text(sweep_text("ctr_erase.yaml", overrides[:3], arms["exact"], arms["erase"]), encoding="utf-8")
    points = plan_points(read_sweep(path), [], catalog=CATALOG)
    assert {(point.arm, point.seed) for point in points} == {(a, s) for a in ("exact", "cut") for s in range(1, 6)}
    for point in points:
        config = load_config("ctr_erase.yaml", point.overrides, catalog=CATALOG).config
        assert config.eval.scores
        assert config.data.params["rows"] == 300
        assert any(tower.detach for tower in config.towers) == (point.arm == "cut")
    commands = sweep_commands("ctr_erase.yaml", overrides[:2], arms["exact"], arms["erase"])
    assert commands.startswith(f"cat > {SWEEP_FILE} <<'END'\nbase: ctr_erase.yaml\n")
    assert f"\nerase-rec sweep --config {SWEEP_FILE} --out runs/ne_of_cut_towers\nerase-rec advise " in commands


# NE


def scored(folder: Path, seed: int, preset: str, *overrides: str, stretch: float = 1.0, rows: int = ROWS) -> Path:
    """A run whose model sees the truth through noise; ``stretch`` makes it worse."""
    make_run(folder, seed, Planted(preset=preset))
    losses = [] if preset == "erase" else [f"towers.{name}.loss=null" for name in ("deep", "cross")]
    texts = [f"seed={seed}", f"schedule.preset={preset}", *losses, *overrides]
    (folder / "config.yaml").write_text(dump_config(load_config("ctr_erase.yaml", texts, catalog=CATALOG).config))
    truth = np.random.default_rng(11).standard_normal(rows)
    label = np.random.default_rng(12).random(rows) < 1 / (1 + np.exp(-truth))
    logit = stretch * (truth + 0.1 * np.random.default_rng([seed, int(100 * stretch)]).standard_normal(rows))
    columns = {"row_id": np.arange(rows), "label": label.astype(np.int8), "logit": logit.astype(np.float32)}
    pq.write_table(pa.table(columns), folder / "scores.parquet")
    return folder


def test_ne_is_that_of_the_cut_runs_against_the_exact_ones(tmp_path: Path) -> None:
    config = load_config("ctr_erase.yaml", catalog=CATALOG).config
    for seed in (1, 2, 3):
        scored(tmp_path / f"exact{seed}", seed, "exact")
        scored(tmp_path / f"cut{seed}", seed, "erase", stretch=1.5)
    found = known_ne([tmp_path], config)  # a folder of runs
    assert (found.verdict, found.seeds, len(found.runs)) == ("worse", (1, 2, 3), 6)
    assert found.low is not None
    assert found.low > 0
    one = known_ne([tmp_path / "exact1", tmp_path / "cut1"], config)
    assert (one.verdict, one.low, one.high) == ("one seed: no verdict", None, None)

    scored(tmp_path / "odd", 1, "erase", "optimizer.dense.lr=0.5")
    for folders, words in (
        (["exact1"], "found no run that cuts towers"),
        (["exact1", "cut1", "odd"], r"found 2 arms of which each cuts towers .*optimizer.dense.lr=0.5"),
    ):
        with pytest.raises(UserError, match=words):
            known_ne([tmp_path / folder for folder in folders], config)
    other = load_config("ctr_erase.yaml", ["towers.deep.params.out_dim=8"], catalog=CATALOG).config
    with pytest.raises(UserError, match=r"exact1 is of another model: there towers.deep.params.out_dim=32"):
        known_ne([tmp_path / "exact1", tmp_path / "cut1"], other)
