"""The program that measures on several GPUs, and what the engine does for captured collectives; tried on CPU ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erase_rec.api.assembly import ContentCatalog
from erase_rec.bench.arms import SHIPPED_ARMS, plan_arms, read_arms
from erase_rec.config.legality import REDUCTION_TABLE
from erase_rec.distributed.launch import join_world
from erase_rec.distributed.shards import Shard, Shards

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


class Graphs:
    """Captures whose end is noted."""

    def __init__(self) -> None:
        self.there_was_a_group: list[bool] = []

    def release(self) -> None:
        self.there_was_a_group.append(dist.is_initialized())


def test_captures_are_released_before_the_group_is_destroyed() -> None:
    """NCCL would wait for ever for a graph that holds its collectives; also where the block ends by an error."""
    graphs = Graphs()
    with pytest.raises(KeyError):
        end_by_an_error(graphs)
    assert graphs.there_was_a_group == [True]
    assert not dist.is_initialized()


def end_by_an_error(graphs: Graphs) -> None:
    with join_world(on_cuda=False, timeout_s=30, grouped=True) as world:
        world.captures.add(graphs)
        raise KeyError


def test_a_distance_is_relative_to_how_far_a_block_moved() -> None:
    """Of a table that is spread over the ranks, on this rank's parts."""
    check = loaded("ranks/check")
    initial = {"deep": [torch.zeros(4)], "table a": [torch.zeros(3, 2)]}
    expected = {"deep": [torch.full((4,), 2.0)], "table a": [torch.ones(3, 2)]}
    part = Shard((1, 0), torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-4]]))
    found = {"deep": [torch.full((4,), 1.0)], "table a": [Shards((3, 2), torch.float32, [part])]}
    assert check.distances(found, expected, initial) == {"deep": 0.5, "table a": 2**-4 / 2}
    assert check.distances(expected, expected, expected) == {"deep": 0.0, "table a": 0.0}
    assert check.distances(initial, expected, expected)["deep"] == math.inf


def check_a_way(out: Path) -> None:
    tiny = ["features.sparse=[C1, C2]", "data.params={rows: 100, eval_rows: 0}", "train.device=cpu"]
    plain = [*tiny, "embedding.backend=torch"]
    loaded("ranks/check").main(out, steps=3, rows=16, only="detached, blocking, bucket", overrides=plain)


def test_ranks_are_held_to_one_process(run_ranks: Any, tmp_path: Path) -> None:
    """And a rank that trains alone would be found."""
    check = loaded("ranks/check")
    run_ranks(2, check_a_way, tmp_path / "check.json", timeout_s=200)
    record = json.loads((tmp_path / "check.json").read_text())
    (way,) = record["ways"]
    assert (record["ranks"], record["planned"], way["way"], way["steps"]) == (2, 1, "detached, blocking, bucket", 3)
    assert way["problem"] is None
    assert way["error"] < 0.1 * check.TOLERANCE < check.TOLERANCE < 0.1 * record["control"]
    assert way["collectives"] > 3 * 4, "a reduction of each block in each step"


def test_every_legal_way_is_tried_and_captured_ones_are_strict() -> None:
    check = loaded("ranks/check")
    legal = [f"detached, {launch}, {reduction}" for (launch, reduction), cell in REDUCTION_TABLE.items() if cell.legal]
    ways = check.ways(strict=True)
    assert set(legal) <= {arm.about for arm in ways}
    assert len({arm.about for arm in ways}) == len({arm.name for arm in ways}) == len(ways)
    planned = plan_arms(check.CONFIG, [], ways, [32], catalog=ContentCatalog())
    assert [each.refusal for each in planned] == [""] * len(ways)
    for each in planned:
        assert each.config is not None
        assert each.config.schedule.strict == (each.config.schedule.cuda_graph != "none")


SHIPPED = ["exact_ddp", "exact_graph", "exact_streams_graph", "detached_streams_graph", "early_graph_joint"]


def test_arms_on_several_ranks_run_or_say_why_not() -> None:
    """The step graph takes all-reduces of buckets, and neither spread tables nor a reducer of DDP."""
    program = loaded("several_gpus")
    arms = read_arms(SHIPPED_ARMS.parent / "arms_several_gpus.yaml")
    assert {*program.SCALED_ARMS, *program.QUICK_ARMS} <= {arm.name for arm in arms}
    planned = plan_arms("bench/several_gpus.yaml", [], arms, [512], catalog=ContentCatalog())
    refused = {each.arm.name: each.refusal for each in planned if each.config is None}
    assert [each.arm.name for each in planned if each.config][:5] == SHIPPED
    assert list(refused) == ["early_graph_spread", "early_graph_ddp"]
    assert "through their hosts how many ids" in refused["early_graph_spread"]
    assert "where no replay reaches it" in refused["early_graph_ddp"]


def row(arm: str, ranks: int, batch: int, step_ms: float | None, **more: Any) -> dict[str, Any]:
    plain = {"repeats": None, "refused": None, "ratio_to": {}}
    return {"arm": arm, "ranks": ranks, "batch": batch, "step_ms_p50": step_ms} | plain | more


def test_scaling_and_the_page() -> None:
    program = loaded("several_gpus")
    one = [row("early", 1, 512, 1.0), row("early", 1, 1024, 1.6), row("early (A/A)", 1, 512, 9.0, repeats="early")]
    two = [row("early", 2, 512, 1.25, ratio_to={"exact_streams_graph": [1.0, 1.1, 1.2]}), row("ddp", 2, 512, None)]
    two[1]["refused"] = "not captured"
    ended = program.Part("speed x1", found={"rows": one}), program.Part("speed x2", found={"rows": two})
    assert program.scaling(ended) == [
        {"arm": "early", "ranks": 2, "batch": 512, "step_ms": 1.25, "weak": 0.8, "strong": 1.6 / 2.5}
    ]
    checked = {"way": "detached, blocking, ddp", "error": None, "collectives": 0, "seconds": 1.0, "problem": "no\nwhy"}
    check = program.Part("check", found={"ways": [checked], "passed": 0, "failed": 1, "control": 0.5})
    killed = program.Part("kill", found={"others_ended": True, "others_lived_s": 2.5, "named": True})
    plan = program.Plan.of(2, on_cpu=False, quick=True)
    text = "\n".join(program.page(plan, [check, killed, *ended]))
    assert "| detached, blocking, ddp |  | 0 | 1.0 | why |" in text
    assert "the others ended after 2.5 s (time-out 20 s); it is named" in text
    assert "1.100 [1.000, 1.200]" in text
    assert "| ddp | 512 | not captured |" in text
    assert "| early | 2 | 512 | 1.250 | 0.80 | 0.64 |" in text
    assert "| early | 512 | 1.000 |" in text
    lost = program.Part("check", found={"passed": 0, "failed": 1}), program.Part("kill", found={"named": False})
    assert "0 ways passed, 1 did not" in "\n".join(program.page(plan, lost))


def test_a_part_that_hangs_is_ended_and_keeps_what_it_found(tmp_path: Path) -> None:
    program = loaded("several_gpus")
    script = "import sys, time; open(sys.argv[1], 'w').write('{\"rows\": [1]}'); print('so far', flush=True)"
    command = [sys.executable, "-c", f"{script}; time.sleep(600)", str(tmp_path / "out.json")]
    part, started = program.Part("speed x2"), program.Started(command, tmp_path / "log")
    assert program._wait(lambda: "so far" in started.tail(), 60)
    program._finish(part, started, 0.0, tmp_path / "out.json")
    assert not started.runs()
    assert (part.exit_code, part.found) == (None, {"rows": [1]})
    assert part.problem == "so far\n\nended at its limit of 0 s"


def test_earlier_results_get_what_is_expected(tmp_path: Path) -> None:
    """Of the steps of the scaled arms that were measured; a file of results is read and nothing is run."""
    program = loaded("several_gpus")
    tiny = ["schedule.preset=erase", "features.sparse=[C1, C2]", "train.precision=fp32"]
    measured = row(program.SCALED_ARMS[1], 2, 64, 0.5, overrides=tiny, exposed_ms=0.25)
    others = [row("exact_ddp", 2, 64, 9.0), measured | {"repeats": "early"}, measured | {"step_ms_p50": None}]
    record = {"parts": [{"name": "speed x2", "found": {"rows": [measured, *others]}}]}
    (tmp_path / "earlier.json").write_text(json.dumps(record))
    program.main(tmp_path / "out", again=tmp_path / "earlier.json")
    (found,) = json.loads((tmp_path / "out" / "several_gpus.json").read_text())["expected"]
    assert (found["arm"], found["ranks"], found["batch"], found["measured_ms"]) == (measured["arm"], 2, 64, 0.5)
    assert 0 < found["expected_exposed_ms"] < found["expected_ms"] < found["nothing_hidden_ms"]
    off = f"{100 * (found['expected_ms'] / 0.5 - 1):+.0f} %"
    line = f"| early_graph_joint | 2 | 64 | 0.500 | {found['expected_ms']:.3f} | {off} "
    assert line in (tmp_path / "out" / "expected.md").read_text()
