"""The report's numbers against hand-computed ones, and what it says of noise."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import GLOBAL_BATCH, STEP, Planted, make_run, make_sweep

from erase_rec.errors import UserError
from eval.report.analysis import ArmResult, Report, analyse
from eval.report.figures import band, pictures
from eval.report.page import html, markdown, plain
from eval.report.records import collect
from eval.report.sentences import sentences
from eval.report.tables import results, runs, steps
from eval.report.timelines import timelines
from eval.report.turns import read_turns

PNG_START = base64.b64encode(b"\x89PNG\r\n").decode()[:8]
T_2 = 4.302652729911275
"""Student's t with 2 degrees of freedom at 97.5 %, from a printed table (4.303)."""


def report_of(*paths: Path, baseline: str | None = None) -> Report:
    return analyse(collect(paths), baseline)


def arm_of(report: Report, name: str) -> ArmResult:
    return next(arm for arm in report.arms if arm.name == name)


def seeds(qps: tuple[float, ...], ne: tuple[float, ...] = (0.8, 0.81, 0.79), **more: Any) -> dict[int, Planted]:
    """Planted runs of seeds 1, 2, ..."""
    return {seed: Planted(qps_p90=speed, ne=ne[seed - 1], **more) for seed, speed in enumerate(qps, start=1)}


def said(report: Report, beginning: str) -> str:
    (found,) = [sentence for sentence in sentences(report) if sentence.startswith(beginning)]
    return found


BASE = seeds((1000.0, 1010.0, 990.0))
FASTER = seeds((1040.0, 1060.5, 1049.4), (0.808, 0.8262, 0.7979), preset="paper_row2")
"""Pairs: 4, 5 and 6 % faster, 1, 2 and 1 % worse."""


def test_numbers_are_those_computed_by_hand(tmp_path: Path) -> None:
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "paper_row2": FASTER}))
    base, arm = report.arms
    assert base.is_baseline
    assert base.gain is None
    assert base.qps_p90 is not None
    assert base.qps_p90.mid == pytest.approx(1000)
    assert base.qps_p90.high == pytest.approx(1000 + T_2 * 10 / math.sqrt(3))
    assert arm.gain is not None
    assert arm.gain.pct.mid == pytest.approx(5)
    assert arm.gain.pct.low == pytest.approx(5 - T_2 * 1 / math.sqrt(3))
    assert arm.gain.pairs == 3
    assert arm.ne_gap is not None
    assert arm.ne_gap.pct.mid == pytest.approx(4 / 3)
    assert arm.ne_gap.pct.high == pytest.approx(4 / 3 + T_2 * math.sqrt(1 / 3) / math.sqrt(3))
    assert arm.ne is not None
    assert arm.ne.mid == pytest.approx((0.808 + 0.8262 + 0.7979) / 3)
    assert arm.towers == pytest.approx({"deep": 0.9, "cross": 0.95})
    row = results(report).rows[1]
    assert row[2] == "1,050 [1,024, 1,075]"
    assert row[3:6] == ("+5.00 % [+2.52, +7.48]", "faster", "+5.26 %")


def test_a_planted_gain_is_told_from_noise_and_an_a_a_pair_is_not(tmp_path: Path) -> None:
    again = seeds((1002.0, 1007.0, 991.0), (0.8001, 0.8099, 0.79))
    report = report_of(make_sweep(tmp_path, {"baseline": BASE, "again": again, "paper_row2": FASTER}))
    faster, twin = arm_of(report, "paper_row2"), arm_of(report, "again")
    assert faster.gain is not None
    assert faster.gain.verdict == "higher"
    assert faster.gain.pct.excludes_zero
    assert said(report, "paper_row2: QPS").endswith("against baseline over 3 pairs: faster.")
    assert twin.is_twin
    assert twin.gain is not None
    assert twin.gain.verdict == "inside the noise"
    for sentence in sentences(report):
        if sentence.startswith("A/A pair"):
            assert sentence.endswith("inside the noise, as it must be.")
    assert said(report, "Differences in QPS") == "Differences in QPS p90 that are inside the noise: none."
    assert "which lies inside the interval of paper_row2 here" in said(report, "The paper's row 2")


def test_what_an_a_a_pair_shows_is_noise_for_the_other_arms(tmp_path: Path) -> None:
    again = seeds((1060.0, 1071.0, 1049.0))  # 6 % faster than itself, with hardly any spread
    report = report_of(make_sweep(tmp_path, {"baseline": BASE, "again": again, "paper_row2": FASTER}))
    assert "was not still, and differences up to 6.000 % are counted as noise" in "\n".join(sentences(report))
    arm = arm_of(report, "paper_row2")
    assert arm.gain is not None
    assert arm.gain.pct.excludes_zero
    assert arm.gain.verdict == "inside the noise"


def bench_row(arm: str, speeds: tuple[float, ...], repeats: str | None = None, **more: Any) -> dict[str, Any]:
    """A row of a file of ``erase-rec bench``, as far as a report reads it."""
    row = {"arm": arm, "repeats": repeats, "batch": GLOBAL_BATCH, "ranks": 1, "refused": None}
    return row | {"turns_qps_p90": speeds} | more


def bench_file(path: Path, *rows: dict[str, Any]) -> Path:
    about = {"device": "a GPU", "commit": "def", "date": "2026-01-02", "command": "erase-rec bench --config x.yaml"}
    path.write_text(json.dumps(about | {"rows": rows}))
    return path


def test_qps_is_taken_from_turns_and_ne_from_runs(tmp_path: Path) -> None:
    arms = {
        "baseline": BASE,
        "again": seeds((1.0, 2.0, 3.0)),
        "paper_row2": FASTER,
        "other": seeds((7.0,), preset="detached"),
    }
    bench = bench_file(
        tmp_path / "bench.json",
        bench_row("baseline", (100.0, 110.0)),
        bench_row("baseline (A/A)", (100.0, 110.1), repeats="baseline"),
        bench_row("paper_row2", (120.0, 132.0)),
        bench_row("other", (), refused="no CUDA graphs here"),
        bench_row("baseline", (5.0, 5.0), batch=2 * GLOBAL_BATCH),
    )
    report = analyse(collect([make_sweep(tmp_path, arms)]), None, bench)
    base, twin, faster, other = report.arms
    assert base.qps_p90 is not None
    assert base.qps_p90.mid == pytest.approx(105)
    assert faster.gain is not None
    assert (faster.gain.pct.mid, faster.gain.pairs) == (pytest.approx(20), 2)
    assert twin.gain is not None
    assert twin.gain.pct.mid == pytest.approx(100 * (0.1 / 110) / 2)
    assert faster.ne_gap is not None
    assert faster.ne_gap.pct.mid == pytest.approx(4 / 3)
    assert other.gain is None
    assert said(report, "other has no QPS") == f"other has no QPS: no CUDA graphs here ({bench})."
    assert said(report, "QPS is not from these runs but from 2 turns an arm")
    assert {row[2] for row in runs(report).rows} == {"-"}
    assert report.environment["QPS measured on"] == ("a GPU",)
    assert "erase-rec bench --config x.yaml" in report.commands
    page = plain(report, "t", "c")
    assert page["turns"] == {
        "file": str(bench),
        "qps_p90": {"baseline": (100.0, 110.0), "again": (100.0, 110.1)} | {"paper_row2": (120.0, 132.0), "other": ()},
    }
    assert "boxes of the means" not in html(report, pictures(report), "t", "c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*bench.json: No such file"),
        ("[", "is not what erase-rec bench --out writes"),
        ('{"rows": []}', r"is not what erase-rec bench --out writes \(device: Field required\)"),
        ("rows", r"no rows of the runs' global batch size, 100 \(there are: 7\); time it with .* --batch 100"),
    ],
)
def test_a_file_of_turns_that_says_nothing_of_the_runs_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "bench.json"
    if text == "rows":
        bench_file(path, bench_row("baseline", (1.0,), batch=7))
    elif text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"--bench: .*{message}"):
        read_turns(path, GLOBAL_BATCH)


def test_one_run_an_arm_gets_no_verdict(tmp_path: Path) -> None:
    report = report_of(
        make_sweep(tmp_path, {"exact": seeds((1000.0,)), "detached": seeds((1500.0,), preset="detached")})
    )
    assert said(report, "One run only of").startswith("One run only of exact, detached: no interval")
    assert said(report, "detached: QPS") == "detached: QPS p90 +50.00 % against exact, of one pair: no verdict."
    assert results(report).rows[1][4] == "one pair: no verdict"
    assert html(report, pictures(report), "t", "c")


def test_undefined_results_are_said(tmp_path: Path) -> None:
    unknown = seeds((math.nan,) * 3, (math.nan,) * 3, preset="detached", towers={"deep": math.nan}, audit=None)
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "detached": unknown}))
    assert said(report, "detached has no QPS")
    assert said(report, "detached has no held-out NE")
    row = results(report).rows[1]
    assert row[2:] == ("-",) * 9 + ("not recorded",)
    assert json.loads(json.dumps(plain(report, "t", "c"), allow_nan=False))["arms"][1]["ne"] is None
    assert html(report, pictures(report), "t", "c")


def test_runs_that_did_not_end_are_left_out_with_their_reasons(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s", {"exact": BASE}, failed=[("detached", 2, "RuntimeError: out of memory")])
    stopped = make_run(tmp_path / "stopped", 1, Planted(status="interrupted"))
    killed = make_run(tmp_path / "killed", 1, Planted())
    (killed / "summary.json").unlink()
    report = report_of(sweep, stopped, killed)
    reasons = {entry.reason for entry in report.missing}
    assert reasons == {
        "RuntimeError: out of memory",
        "it was interrupted after 4 steps",
        "it has no summary.json: still running, or killed",
    }
    assert report.arms[0].runs == 3
    assert "RuntimeError: out of memory" in markdown(report, "t", "c")
    assert said(report, "3 runs did not come to an end and are left out")


def test_ne_is_compared_on_the_same_data_alone(tmp_path: Path) -> None:
    other = seeds((1000.0, 1000.0, 1000.0), preset="detached") | {3: Planted(preset="detached", fingerprint="0" * 64)}
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "detached": other}))
    gap = arm_of(report, "detached").ne_gap
    assert gap is not None
    assert gap.pairs == 2
    assert said(report, "detached: the data of seed 3 are not the baseline's")


def test_a_seed_on_one_side_is_left_out_aloud(tmp_path: Path) -> None:
    few = seeds((1100.0, 1111.0), preset="detached")
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "detached": few}))
    gain = arm_of(report, "detached").gain
    assert gain is not None
    assert gain.pairs == 2
    assert said(report, "detached: seed 3 is on one side only")


def test_without_a_sweep_arms_are_presets_and_what_else_differs(tmp_path: Path) -> None:
    lr: Mapping[str, Any] = {"optimizer": {"dense": {"lr": 0.5}}}
    make_run(tmp_path / "a", 1, Planted())
    make_run(tmp_path / "b", 2, Planted())
    make_run(tmp_path / "c", 2, Planted(qps_p90=900.0))
    make_run(tmp_path / "d", 1, Planted(config=lr))
    make_run(tmp_path / "e", 1, Planted(preset="erase"))
    report = report_of(tmp_path)
    assert {arm.name: arm.runs for arm in report.arms} == {"exact": 3, "exact (optimizer.dense.lr=0.5)": 1, "erase": 1}
    assert report.arms[0].seeds == (1, 2)
    assert [arm.is_twin for arm in report.arms] == [False, False, False]
    assert report_of(tmp_path, baseline="erase").baseline.name == "erase"
    assert "train.py run.name=a" in report.commands


def test_audits_and_memory_come_from_the_events(tmp_path: Path) -> None:
    arm = {
        1: Planted(peak_memory_gib=2.5),
        2: Planted(peak_memory_gib=3.5),
        3: Planted(audit="audit failed: 2 findings\n- one\n- two"),
    }
    report = report_of(make_sweep(tmp_path, {"exact": arm}))
    assert report.arms[0].audit == "passed (2 of 3), failed: 2 findings (1 of 3)"
    assert report.arms[0].peak_memory_gib == 3.5


@pytest.mark.parametrize(
    ("arm", "preset", "row"),
    [
        ("baseline", "exact", "baseline"),
        ("paper_row3", "paper_row3", "row 3"),
        ("x", "paper_row1", "row 1"),
        ("row0_blocking", "erase", "row 0"),
        ("detached", "detached", None),
    ],
)
def test_arms_stand_beside_the_papers_rows(tmp_path: Path, arm: str, preset: str, row: str | None) -> None:
    arms = {"baseline": seeds((1000.0,))} | {arm: seeds((1100.0,), preset=preset)}
    found = arm_of(report_of(make_sweep(tmp_path, arms)), arm).paper
    assert (None if found is None else found.name) == row


def test_bands_hold_the_steps_that_all_runs_logged(tmp_path: Path) -> None:
    report = report_of(make_sweep(tmp_path, {"exact": BASE}))
    rows, values = band(report.by_arm["exact"], "train/ne")
    assert rows.tolist() == [GLOBAL_BATCH * step for step in (1, 2, 3, 4)]
    assert values[1].tolist() == pytest.approx([0.85, 0.86, 0.84])
    assert band(report.by_arm["exact"], "no/tag")[0].size == 0


def test_backwards_and_accuracy_stand_beside_each_other(tmp_path: Path) -> None:
    exact = seeds((1000.0,) * 3, backward_ms=10.0, accuracy=0.5)
    detached = seeds((1000.0,) * 3, preset="detached", accuracy=0.625)
    detached = {seed: replace(run, backward_ms=3.0 + seed) for seed, run in detached.items()}
    report = report_of(make_sweep(tmp_path, {"exact": exact, "detached": detached}))
    first, second = steps(report).rows
    assert first[:2] == ("exact", "0.5000 [0.5000, 0.5000]")
    assert first[4:] == ("10.000 [10.000, 10.000]", "-")
    assert second[1] == "0.6250 [0.6250, 0.6250]"
    assert second[4].startswith("5.000 [")
    assert second[5].startswith("-50.0 % [")


def test_a_timeline_of_each_arm_is_drawn_from_a_run_that_kept_one(tmp_path: Path) -> None:
    kept = {1: Planted(preset="erase"), 2: Planted(preset="erase", timeline=STEP)}
    report = report_of(make_sweep(tmp_path / "s", {"exact": BASE, "erase": kept}))
    (picture,) = timelines(report, {})
    assert "one step of erase" in picture.caption
    assert picture.caption.endswith("Audit: passed.")
    assert f'src="data:image/png;base64,{PNG_START}' in html(report, [picture], "t", "c")
    chart = tmp_path / "erase.png"
    chart.write_bytes(b"\x89PNG of one's own")
    (given,) = timelines(report, {"erase": chart})
    assert base64.b64encode(chart.read_bytes()).decode() in given.markup


def test_a_broken_timeline_is_named(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"exact": {1: Planted(timeline=STEP)}})
    file = sweep / "points/exact1/timeline.json"
    assert collect([sweep]).runs[0].timeline == STEP
    file.write_text(file.read_text().replace('"forward"', '"foreword"'))
    with pytest.raises(UserError, match=r"timeline\.json: intervals\.0\.op\.kind: Input should be"):
        collect([sweep])


def test_the_page_refers_to_nothing_outside_it(tmp_path: Path) -> None:
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "paper_row2": FASTER}))
    figures = pictures(report)
    page = html(report, figures, "a <title>", "erase-rec report x")
    assert len(figures) == page.count("<svg") == 4
    assert "http" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert set(re.findall(r'(?:href|src)="(.)', page)) == {"#"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert "a &lt;title&gt;" in page
    assert page == html(report, pictures(report), "a <title>", "erase-rec report x")


def test_markdown_and_json_agree(tmp_path: Path) -> None:
    report = report_of(make_sweep(tmp_path, {"exact": BASE, "paper_row2": FASTER}))
    record = plain(report, "t", "c")
    text = markdown(report, "t", "c")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    for arm in record["arms"]:
        (line,) = [row for row in table if len(row) == 12 and row[0].split(" (")[0] == arm["name"]]
        assert line[1] == str(arm["runs"])
        assert float(line[2].split(" [")[0].replace(",", "")) == pytest.approx(arm["qps_p90"]["mid"], abs=0.5)
        assert float(line[6].split(" [")[0]) == pytest.approx(arm["ne"]["mid"], abs=5e-6)
        if arm["gain"] is not None:
            low, high = re.findall(r"[+-][\d.]+", line[3])[1:]
            assert float(low) == pytest.approx(arm["gain"]["pct"]["low"], abs=5e-3)
            assert float(high) == pytest.approx(arm["gain"]["pct"]["high"], abs=5e-3)
    assert all(f"- {sentence}" in text for sentence in record["sentences"])
    assert record["baseline"] == "exact"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("nowhere", "is not a folder"),
        ("empty", "holds no run"),
        ("no baseline", "there is no arm exakt; did you mean 'exact'"),
        ("broken", r"config\.yaml: is not as a run leaves it \(.*Error: "),
        ("none ended", "no run came to its end"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, mistake: str, message: str) -> None:
    run, baseline = make_run(tmp_path / "run", 1, Planted()), None
    match mistake:
        case "nowhere":
            run = tmp_path / "none"
        case "empty":
            run = tmp_path / "empty"
            run.mkdir()
        case "no baseline":
            baseline = "exakt"
        case "broken":
            (run / "config.yaml").write_text("a: [")
        case "none ended":
            (run / "summary.json").unlink()
    with pytest.raises(UserError, match=message):
        report_of(run, baseline=baseline)


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read"), (b"GIF89a", "is no PNG file")])
def test_a_timeline_that_cannot_be_shown_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "step.png"
    if content is not None:
        path.write_bytes(content)
    report = report_of(make_run(tmp_path / "run", 1, Planted()))
    with pytest.raises(UserError, match=message):
        list(timelines(report, {"erase": path}))


def test_two_sweeps_do_not_mix_arms_of_one_name(tmp_path: Path) -> None:
    small: dict[str, Any] = {"config": {"train": {"local_batch_size": 64}}}
    one = make_sweep(tmp_path / "one", {"exact": BASE})
    two = make_sweep(tmp_path / "two", {"exact": seeds((500.0, 505.0, 495.0), **small)})
    report = report_of(tmp_path)
    assert [arm.name for arm in report.arms] == ["exact", "exact (train.local_batch_size=64)"]
    assert report_of(one, two, one).arms[0].runs == 3
