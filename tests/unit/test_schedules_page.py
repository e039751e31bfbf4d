"""The page on schedules: its generated parts are the code's, and a step really runs as its pictures say."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from schedule_cases import CPU, KINDS, make_batch, make_config, make_model, make_step, refusals

from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.schedule.gradients import GradientProgram, trained_blocks
from erase_rec.schedule.pictures import PICTURES, is_captured, picture_edges, picture_plan, with_parts
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.program import Op, guaranteed_order, program
from erase_rec.schedule.reduction.bucket import BucketReduction
from erase_rec.schedule.streams import RecordingStreams
from erase_rec.schedule.tower_graphs import NoGraphs, Outputs
from models.ctr_model import build_local_losses

NAMES = pytest.mark.parametrize("name", PICTURES)


@pytest.fixture
def page(checkout: Path) -> str:
    return (checkout / "docs" / "schedules.md").read_text(encoding="utf-8")


def test_the_generated_parts_are_the_codes(page: str) -> None:
    """Write them again with `python -m erase_rec.schedule.pictures docs/schedules.md`."""
    assert with_parts(page) == page
    assert re.findall(r"<!-- generated: (\w+) -->", page).count("reductions") == 1
    assert {*PICTURES} == {*re.findall(r"<!-- generated: (\w+) -->", page)} - {"reductions"}


def test_a_part_that_is_out_of_date_is_written_again() -> None:
    written = with_parts("before\n<!-- generated: exact -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    assert written.startswith("before\n<!-- generated: exact -->\n```yaml\n")
    assert written.endswith("```\n<!-- end -->\nafter <!-- end -->\n")
    assert "old" not in written


def test_the_tests_and_files_that_the_page_names_exist(page: str, checkout: Path) -> None:
    named = re.findall(r"`((?:tests|configs|erase_rec)/[\w/]+(?:\.\w+)?)(?:::(\w+))?`", page)
    assert len(named) > 10
    for path, test in named:
        assert (checkout / path).exists(), path
        assert not test or f"def {test}(" in (checkout / path).read_text(encoding="utf-8"), test
    for link in re.findall(r"\]\(([\w./-]+)\)", page):
        assert (checkout / "docs" / link).is_file(), link


@NAMES
def test_arrows_are_the_fewest_that_give_the_whole_order(name: str) -> None:
    ops = program(picture_plan(name))
    edges = {(first.key, then.key) for first, then in picture_edges(ops)}

    def order(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
        before: dict[str, set[str]] = {}
        for op in ops:
            direct = {first for first, then in arrows if then == op.key}
            before[op.key] = direct.union(*(before[key] for key in direct))
        return {(first, then) for then, found in before.items() for first in found}

    guaranteed = {(first, then) for then, found in guaranteed_order(ops).items() for first in found}
    assert order(edges) == guaranteed
    for edge in edges:
        assert order(edges - {edge}) != guaranteed


class LoggedGraphs(NoGraphs):
    """Notes what would be captured of the early towers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.captured: set[str] = set()

    def run(self, op: Op, compute: Callable[[], Outputs]) -> Outputs:
        if op.tower is not None and self._plan.tower(op.tower).early:
            self.captured.add(op.key)
        return compute()


def small_model_config(name: str) -> Config:
    """The picture's settings on a model that can be run; its chain's blocks are small MLPs."""
    settings: dict[str, Any] = yaml.safe_load(PICTURES[name])
    towers = [
        entry | {"params": KINDS.get(entry["name"], KINDS["deep"])[1]}  # the blocks of the chain are MLPs like `deep`
        for entry in settings.pop("towers")
    ]
    return make_config(towers, **settings)


@NAMES
def test_a_step_launches_what_the_picture_shows_from_the_threads_that_it_shows(name: str) -> None:
    config = small_model_config(name)
    plan = Plan.from_config(config)
    assert refusals(config) == []
    assert plan == picture_plan(name)
    model, ops = make_model(config), program(plan)
    streams, graphs = RecordingStreams(ops), LoggedGraphs(plan)
    blocks = trained_blocks(model, plan)
    reduction = BucketReduction(blocks, World(), chunk_mib=1.0) if plan.reduction == "bucket" else None
    gradients = GradientProgram(
        model, plan, build_local_losses(config), streams, device=CPU, reduction=reduction, graphs=graphs
    )
    make_step(config, gradients)(make_batch())
    launched = {launch.op: launch.thread for launch in streams.launched}
    assert {*launched} == {*ops}
    by_main = [launch.op for launch in streams.launched if not launch.op.worker]
    assert by_main == [op for op in ops if not op.worker]
    for op, thread in launched.items():
        assert thread.startswith(f"early-backward-{op.worker - 1}" if op.worker else "MainThread"), op.key
    would_be_captured = {op.key for op in ops if is_captured(replace(plan, cuda_graph="tower"), op)}
    assert would_be_captured == graphs.captured
