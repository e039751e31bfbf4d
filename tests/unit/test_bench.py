"""The parts of `erase-rec bench`: arms, random batches, turns, device work, floor, and the TorchRec rival."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.bench.arms import SHIPPED_ARMS, PlannedArm, choose_arms, loss_overrides, plan_arms, read_arms
from erase_rec.bench.batches import LONGEST_BAG, RandomRows, full, rotated, rows_touched, told
from erase_rec.bench.device_work import Work, report, work_of
from erase_rec.bench.floor import COUNTED_ROWS, Ceilings, floor
from erase_rec.bench.result import DeviceUse, Row, kernel_table, strongest_early, strongest_exact, tables
from erase_rec.bench.session import _staggered
from erase_rec.bench.torchrec_user import TorchRecTable, build_torchrec_step
from erase_rec.bench.turns import Turn, take_turns, verdict
from erase_rec.cli import bench_workshop
from erase_rec.cli.bench import command
from erase_rec.cli.bench_workshop import ContentWorkshop, Source
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config, SparseFeatureConfig
from erase_rec.distributed.world import World
from erase_rec.environment import triple_problem
from erase_rec.errors import ConfigError, UserError
from erase_rec.protocols import Embeddings
from erase_rec.run_folder import RunFolder
from models.ctr_model import build_model

CPU = torch.device("cpu")
SMALL = [
    "data.params={rows: 300, eval_rows: 0}",
    "train.device=cpu",
    "train.local_batch_size=64",
    "optimizer.lr_schedule={kind: constant, warmup_steps: 0, min_factor: 0}",
]
QUICK: dict[str, Any] = {
    "arms": "",
    "batch": "",
    "repeats": 5,
    "steps": 1,
    "warmup": 1,
    "data": "resident",
    "zipf": 0.0,
}
DENSE, DIM = 13, 16
EMB = 26 * DIM


def small(*overrides: str) -> Config:
    return load_config("ctr_erase.yaml", [*SMALL, *overrides], catalog=ContentCatalog()).config


def planned(name: str, *overrides: str) -> PlannedArm:
    (arm,) = choose_arms(read_arms(), [name])
    (found,) = plan_arms("ctr_erase.yaml", [*SMALL, *overrides], [arm], [], catalog=ContentCatalog())
    return found


# Arms


def test_the_arms_of_spread_tables_differ_in_tables_and_graph_alone() -> None:
    arms = read_arms(SHIPPED_ARMS.with_name("arms_spread.yaml"))
    found = []
    for each in plan_arms("bench/h200.yaml", [], arms, [1024], catalog=ContentCatalog()):
        assert each.config is not None, each.refusal
        assert each.config.distributed.reduction == "bucket"
        assert each.config.schedule.strict == (each.config.schedule.cuda_graph != "none")
        found.append((each.config.embedding.sharding, each.config.schedule.cuda_graph))
    whole, spread = "replicated", "table_wise"
    assert found == [(whole, "step"), (whole, "dense"), (spread, "dense"), (spread, "tower"), (spread, "none")]


def test_who_wants_to_know_is_told_of_each_batch_a_step_ahead() -> None:
    """Of one turn's batches: the next turn begins without."""
    batches = rotated(RandomRows((SparseFeatureConfig(name="a"),), {"a": 5}, 2, 0, 1).batches(4, 3, CPU))
    ahead: list[Batch] = []
    for _ in range(2):
        seen = [(batch, len(ahead)) for batch in told(batches, 3, ahead.append)]
        assert [count for _, count in seen] == [1, 2, 2]
        assert all(batch.sparse is following.sparse for (batch, _), following in zip(seen[1:], ahead, strict=True))
        ahead.clear()
    assert len(list(told(batches, 3, None))) == 3


def test_the_shipped_arms_are_exact_detached_and_early_and_each_resolves() -> None:
    every = plan_arms("bench/h200.yaml", [], read_arms(), [512, 1024], catalog=ContentCatalog())
    assert [each.refusal for each in every] == [""] * len(every)
    assert [each.batch for each in every] == [512] * len(read_arms()) + [1024] * len(read_arms())
    for each in every:
        assert each.config is not None
        assert each.config.train.local_batch_size == each.batch
        has_losses = {tower.loss is not None for tower in each.config.towers}
        assert has_losses == {each.family != "exact"}, each.arm.name
        assert each.family == ("exact" if each.arm.name == "torchrec" else each.arm.name.split("_")[0])
        if "graph" in each.arm.name:
            assert each.config.schedule.cuda_graph == "step"
            assert each.config.schedule.strict


def test_arms_get_the_losses_that_they_ask_for() -> None:
    none, own = choose_arms(read_arms(), ["exact_eager", "early_graph_own"])
    config = small(
        "schedule.preset=exact", "towers.deep.loss=null", "towers.cross.frozen=true", "towers.cross.loss=null"
    )
    assert "towers.deep.loss={target: own}" in loss_overrides(own, config)
    assert "towers.mask.loss.target=own" in loss_overrides(own, config)
    assert "towers.mask.loss=null" in loss_overrides(none, config)
    assert not [each for each in loss_overrides(none, config) if "deep" in each or "cross" in each]
    assert not [each for each in loss_overrides(own, config) if "cross" in each]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arms: []", "arms"),
        ("arms: [{name: a, about: x, colour: red}]", "arms.0.colour"),
        ("arms: [{name: a, about: x}, {name: a, about: y}]", "two arms are named 'a'"),
        ("arms: [", "not YAML"),
    ],
)
def test_a_wrong_file_of_arms_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "arms.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s){path.name}.*{words}"):
        read_arms(path)
    with pytest.raises(UserError, match="not found"):
        read_arms(tmp_path / "none.yaml")


def test_an_arm_whose_configuration_is_illegal_keeps_its_reason() -> None:
    found = planned("early_blocking", "schedule.cuda_graph=tower")
    assert found.config is None
    assert found.family is None
    assert "schedule.cuda_graph" in found.refusal


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"arms": "exact_eager,exact_eager"}, "'exact_eager' is given twice"),
        ({"batch": "16,0"}, "--batch: expected different positive whole numbers"),
        ({"batch": "16,16"}, "--batch: expected different positive whole numbers"),
        ({"out": Path("r.txt")}, "write --out r.json"),
        ({"overrides": ["towers.deep.params.hiden=[8]"]}, "did you mean 'hidden'"),
        ({"arms": "early_tower"}, "no arm could be run here"),
        ({"arms": "early_tower", "overrides": ["schedule.early_backward=false"]}, "no arm goes with"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], words: str) -> None:
    overrides = [*SMALL[:2], *arguments.pop("overrides", [])]
    with pytest.raises(UserError, match=words):
        command("ctr_erase.yaml", overrides=overrides, **{**QUICK, **arguments})


# Batches


def test_random_rows_come_from_whole_tables_and_are_the_same_again() -> None:
    rows = RandomRows.of(small(), {f"C{i}": 50 + i for i in range(1, 27)}, exponent=0, seed=3)
    first, second = rows.batches(200, 2, CPU)
    again, _ = rows.batches(200, 2, CPU)
    assert torch.equal(first.sparse.values, again.sparse.values)
    assert not torch.equal(first.sparse.values, second.sparse.values)
    assert first.dense.shape == (200, DENSE)
    assert set(first.label.tolist()) == {0.0, 1.0}
    assert first.sparse.single_valued
    ids = first.sparse.values.reshape(26, 200)
    for position in range(26):
        assert int(ids[position].min()) >= 0
        assert 40 + position < int(ids[position].max()) < 51 + position
    assert rows_touched(first) == [len(set(feature.tolist())) for feature in ids]


def test_bags_have_their_lengths_and_zipf_makes_few_ids_popular() -> None:
    features = [
        SparseFeatureConfig(name="bag", encoding="hash", num_embeddings=998, multi_valued=True, separator="|"),
        SparseFeatureConfig(name="one", encoding="hash", num_embeddings=998),
    ]
    zipf, flat = (RandomRows(features, {"bag": 1000, "one": 1000}, 0, each, 1) for each in (1.2, 0.0))
    (popular,), (even,) = zipf.batches(500, 1, CPU), flat.batches(500, 1, CPU)
    lengths = popular.sparse.lengths.reshape(2, 500)
    assert (int(lengths[0].min()), int(lengths[0].max())) == (1, LONGEST_BAG)
    assert bool((lengths[1] == 1).all())
    assert not popular.sparse.single_valued
    assert popular.sparse.values.numel() == int(lengths.sum())
    assert rows_touched(popular)[0] < 0.7 * rows_touched(even)[0]
    # The most popular of 1,000 ids at exponent 1.2 has a share of 1 / sum(r ** -1.2) = 0.25.
    share = popular.sparse.values.bincount().max() / popular.sparse.values.numel()
    assert 0.2 < float(share) < 0.3


def test_only_full_batches_pass_and_the_loader_is_closed() -> None:
    closed = []
    (whole,), (short,) = (RandomRows((), {}, 2, 0, 1).batches(size, 1, CPU) for size in (4, 3))

    def loader():  # type: ignore[no-untyped-def]
        try:
            while True:
                yield whole
                yield short
        finally:
            closed.append(True)

    batches = full(loader(), 4)
    assert [next(batches).size for _ in range(3)] == [4, 4, 4]
    batches.close()  # type: ignore[attr-defined]
    assert closed == [True]


# Turns


def test_turns_go_there_and_back() -> None:
    order: list[str] = []

    def turn(name: str) -> Turn:
        order.append(name)
        return Turn(np.array([float(len(order))]), np.zeros(1))

    taken = take_turns([lambda: turn("a"), lambda: turn("b"), lambda: turn("c")], 3)
    assert order == list("abccbaabc")
    assert [[float(each.step_ms[0]) for each in arm] for arm in taken] == [[1, 6, 7], [2, 5, 8], [3, 4, 9]]


def test_verdicts() -> None:
    assert verdict(step_ms=1.0, host_ms=0.95, wait_ms=0.01, idle_share=0.5) == "host-bound"
    assert (
        verdict(step_ms=1.0, host_ms=0.95, wait_ms=0.01, idle_share=0.01) == "device-bound"
    )  # one waits for the other
    assert verdict(step_ms=1.0, host_ms=0.1, wait_ms=0.01, idle_share=0.5) == "device-bound"  # gaps inside a graph
    assert verdict(step_ms=1.0, host_ms=0.95, wait_ms=0.3, idle_share=0.5) == "data-bound"


def test_rows_count_all_steps_and_the_strongest_is_no_pair() -> None:
    exact, early = planned("exact_eager"), planned("early_blocking")
    turns = [Turn(np.array([1.0, 2.0]), np.array([0.5, 0.5])), Turn(np.array([3.0, 6.0]), np.array([0.5, 0.5]))]
    row = Row.of("w", exact, 2).timed(turns)
    assert row.turns_qps_p90 == pytest.approx([2e3 * row.batch / 1.1, 2e3 * row.batch / 3.3])
    assert (row.step_ms_p50, row.step_ms_mean, row.data_wait_ms) == (2.5, 3.0, 0.5)
    assert row.qps_mean == pytest.approx(2 * 64 / 3e-3)
    fast = replace(Row.of("w", exact, 2), repeats=row.arm, step_ms_p50=0.1)
    refused = Row.of("w", early, 1, "there is no device")
    assert strongest_exact([fast, row]) == row
    assert strongest_early([row, refused]) is None


def test_what_a_row_says_of_the_device() -> None:
    row = Row.of("w", planned("exact_eager"), 1).timed([Turn(np.array([2.0, 2.0]), np.zeros(2))])
    work = report([Work("a", "kernel", 1, 0.0, 500.0), Work("a", "kernel", 2, 0.0, 500.0)], 1)
    row = row.using(DeviceUse(host_ms=1.9, peak_gib=3.0, tables_gib=2.0, work=work))
    assert (row.kernels, row.kernel_ms_sum, row.kernel_ms_union, row.overlap_share) == (2, 1.0, 0.5, 0.5)
    assert (row.idle_share, row.verdict) == (0.75, "host-bound")
    shown = [table.title for table in tables([row, Row.of("w", planned("exact_graph"), 1, "no graphs")])]
    assert shown == ["w, 64 rows a step and rank", "on the device, a step of 64 rows", "not run at 64 rows"]
    assert kernel_table(row).rows == (("a", "2.0", "1000.0"),)
    of_two = [table.header for table in tables([replace(row, ranks=2)])][1]
    assert [name for name in of_two if name not in list(tables([row]))[1].header] == [
        "collectives ms",
        "exposed ms",
        "staggering ms",
    ]


# Device work


def test_kernels_of_a_trace_by_stream_and_their_overlap() -> None:
    def event(category: str, name: str, start: float, duration: float, stream: int) -> dict[str, object]:
        return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}

    work = work_of(
        {
            "traceEvents": [
                event("kernel", "gemm", 100.0, 10.0, 7),
                event("kernel", "gemm", 104.0, 2.0, 13),  # inside the first
                event("kernel", "norm", 108.0, 6.0, 13),  # overlaps by 2
                event("gpu_memcpy", "copy", 120.0, 4.0, 7),  # after a gap
                event("cuda_runtime", "cudaGraphLaunch", 90.0, 50.0, 0),
                {"name": "process_name", "ph": "M"},
            ]
        }
    )
    assert [each.name for each in work] == ["gemm", "gemm", "norm", "copy"]
    found = report(work, 2)
    assert (found.kernels, found.copies, found.streams) == (1.5, 0.5, 2)
    assert found.sum_ms == pytest.approx(22e-3 / 2)
    assert found.union_ms == pytest.approx(18e-3 / 2)
    assert found.overlap_share == pytest.approx(1 - 18 / 22)
    assert [(kernel.name, kernel.a_step, kernel.us_a_step) for kernel in found.top][:2] == [
        ("gemm", 1.0, 6.0),
        ("norm", 0.5, 3.0),
    ]
    assert report([], 2).overlap_share == 0
    assert report([Work("a", "kernel", 1, 0.0, 5.0)], 1).overlap_share == 0


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    work = [
        Work("gemm", "kernel", 1, 0.0, 10.0),
        Work("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 2, 6.0, 14.0),
        Work("ncclDevKernel_AllGather_RING_LL", "kernel", 3, 12.0, 16.0),
        Work("copy", "copy", 1, 15.0, 20.0),
    ]
    found = report(work, 2)
    assert found.collective_ms == pytest.approx((16 - 6) * 1e-3 / 2)
    assert found.exposed_ms == pytest.approx((15 - 10) * 1e-3 / 2)
    assert report(work[:1], 1).exposed_ms == 0


def test_the_rank_that_comes_first_waits_in_its_collectives() -> None:
    class Others(World):
        def gather_objects(self, group: str, value: Any) -> list[Any]:
            return [value, [0.75, None]]

    ran = Row.of("w", planned("exact_eager"), 2)
    measured, refused = _staggered([replace(ran, collective_ms=0.5), ran], Others())
    assert (measured.stagger_ms, refused.stagger_ms) == (0.25, None)


def test_what_was_measured_is_written_after_each_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(planned: Any, *rest: Any) -> list[Row]:
        if planned[0].batch == 32:
            raise RuntimeError("the device is gone")
        return [Row.of("w", planned[0], 1).timed([Turn(np.array([2.0, 2.0]), np.zeros(2))])]

    monkeypatch.setattr(bench_workshop, "measure", measured)
    out = tmp_path / "r.json"
    with pytest.raises(RuntimeError, match="the device is gone"):
        command("ctr_erase.yaml", overrides=SMALL[:2], **{**QUICK, "arms": "exact_eager", "batch": "16,32", "out": out})
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [16]


# Floor


@pytest.fixture(scope="module")
def workshop() -> ContentWorkshop:
    config = small()
    datasets = build_datasets(config)
    rows = RandomRows.of(config, datasets.table_rows, exponent=0, seed=1)
    return ContentWorkshop(datasets, rows, Machine(CPU, torch.float32), World(), Source(True, 0))


def test_arithmetic_is_counted_for_the_configuration_at_hand(workshop: ContentWorkshop) -> None:
    """A wider tower costs what its matrices cost: forward, and both gradients of each product."""
    narrow, wide = (planned("exact_eager", f"towers.deep.params.hidden=[{width}, 64]") for width in (128, 256))
    before = workshop.counted(narrow).flops
    workshop._counted.clear()
    after = workshop.counted(wide).flops
    workshop._counted.clear()
    columns = 8 * ((EMB + DENSE + 7) // 8)  # padded to a multiple of 8
    assert after - before == 2 * 3 * COUNTED_ROWS * 128 * (columns + 64)


def test_a_cut_tower_saves_its_input_gradient_of_the_over_arch(workshop: ContentWorkshop) -> None:
    exact, early = (workshop.counted(planned(name)) for name in ("exact_eager", "early_blocking"))
    # The over-arch's first product needs no gradient of its 6 * 32 inputs.
    assert exact.flops - early.flops == 2 * COUNTED_ROWS * 6 * 32 * 64
    assert exact.parameters == early.parameters


def test_bytes_follow_from_batch_rows_and_optimizer(workshop: ContentWorkshop) -> None:
    config = planned("exact_eager").config
    assert config is not None
    counted = workshop.counted(planned("exact_eager"))
    batch = next(workshop.batches(64))
    found = floor(config, counted, batch, [DIM] * 26, Ceilings(bytes_per_s=1e9, flops_per_s=1e12))
    assert found.parts["inputs"] == 26 * 64 * (8 + 4) + 4 * 64 * (DENSE + 1)
    assert found.parts["pooled"] == 4 * 4 * 64 * EMB
    assert found.parts["table rows"] == 4 * sum(rows_touched(batch)) * (3 * DIM + 2)
    assert found.parts["gradients"] == 2 * 4 * counted.parameters
    assert found.parts["optimizer state"] == 2 * 2 * 4 * counted.parameters  # Adam's two values
    assert found.bytes_ms == pytest.approx(1e3 * sum(found.parts.values()) / 1e9)
    assert found.flops == counted.flops * 64 / COUNTED_ROWS
    assert found.floor_ms == max(found.bytes_ms, found.flops_ms)
    half = floor(
        config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})}),
        counted,
        batch,
        [DIM] * 26,
        Ceilings(1e9, 1e12),
    )
    assert half.parts["activations"] == found.parts["activations"] / 2
    assert half.parts["weights"] == (2 * 2 + 2 * 4) * counted.parameters


def test_tables_are_shared_by_arms_that_configure_them_alike(workshop: ContentWorkshop) -> None:
    first, second = workshop.build(planned("exact_eager")), workshop.build(planned("early_blocking"))
    other = workshop.build(planned("exact_eager", "optimizer.sparse.lr=0.5"))
    assert (first.tables_shared, second.tables_shared, other.tables_shared) == (False, True, False)
    rows = sum(workshop.datasets.table_rows.values())
    assert first.tables_bytes == second.tables_bytes == 4 * rows * (DIM + 1)
    with pytest.raises(UserError, match="no CUDA graphs"):
        workshop.build(planned("exact_graph"))


# The TorchRec rival


@pytest.mark.skipif(triple_problem() is not None, reason=str(triple_problem()))
def test_the_rival_trains_the_same_model() -> None:
    """From the same weights: the same losses, step by step, as this project's exact step; float32 both."""
    config = planned("torchrec", "embedding.backend=torch").config
    assert config is not None
    datasets = build_datasets(config)
    parts = build_parts(config, datasets, RunFolder(Path()), Machine(CPU, torch.float32), World())
    embeddings: Embeddings = parts.model.embeddings
    tables = {name: TorchRecTable(*weight.shape, "sum") for name, weight in embeddings.tables().items()}
    rival = build_torchrec_step(config, build_model(config, embeddings, CPU), tables, CPU)
    rival.load_tables(list(embeddings.tables().values()))
    batches = rotated(RandomRows.of(config, datasets.table_rows, exponent=0, seed=1).batches(64, 2, CPU))
    for _ in range(5):
        batch: Batch = next(batches)
        expected, found = parts.step(batch), rival(batch)
        # Two orders of summation in float32; a wrong learning rate or a missed gradient is off by 1e-3 in step 2.
        torch.testing.assert_close(found.loss, expected.loss, rtol=2e-5, atol=0)
        torch.testing.assert_close(found.logit, expected.logit, rtol=1e-3, atol=2e-4)


def test_the_rival_says_what_it_does_not_have() -> None:
    config = planned("torchrec", "optimizer.dense.kind=sgd").config
    assert config is not None
    with pytest.raises(UserError, match=r"optimizer\.dense\.kind=adam"):
        build_torchrec_step(config, None, {}, CPU)  # type: ignore[arg-type]
