"""``erase-rec audit`` and ``erase-rec timeline`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import warm_process
from in_process import call
from PIL import Image
from typer.testing import CliRunner

from erase_rec.cli import audit
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.program import Op
from erase_rec.schedule.step_state import StepState

SMALL = [
    "data.params={rows: 2000, eval_rows: 500}",
    "embedding.backend=torch",
    "train.local_batch_size=100",
    "train.threads=1",
    "train.device=cpu",
]
SIX = ("dense_mlp", "interaction", "cross", "deep", "mask", "attention")


def run_audit(*arguments: str) -> Any:
    """The command alone; whatever its exit code is."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(audit.command)
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False)


def test_six_towers_each_trained_by_its_own_loss_only(tmp_path: Path) -> None:
    result = call(tmp_path, "audit", "--config", "ctr_erase.yaml", "--steps", "2", "--json", "audit.json", *SMALL)
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["passed"] is True
    assert report["findings"] == []
    assert {name: list(report["norms"][name]) for name in SIX} == {name: [name] for name in SIX}
    assert [(launch["step"], launch["tower"]) for launch in report["launches"]] == [
        (step, name) for step in range(2) for name in SIX
    ]
    assert all(launch["norm"] > 0 and launch["before_over_arch"] for launch in report["launches"])
    assert "audit passed" in result.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "audit.json"]


@pytest.mark.parametrize(
    "changes",
    [
        ["schedule.preset=exact"],
        ["schedule.preset=exact_streams"],
        ["schedule.preset=detached"],
        ["schedule.dispatch=non_blocking", "schedule.workers=2"],
        ["schedule.optimizer=per_tower", "train.micro_batches=3"],
        ["distributed.reduction=bucket"],
        ["distributed.reduction=ddp", "distributed.find_unused_parameters=true"],
    ],
    ids=lambda changes: changes[-1],
)
def test_every_schedule_passes(changes: list[str]) -> None:
    result = run_audit("--config", "ctr_erase.yaml", "--steps", "1", *SMALL, *changes)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("config", ["chains/deep_mlp.yaml", "chains/transformer.yaml"])
def test_chains_pass(config: str) -> None:
    result = run_audit("--config", config, "--steps", "1", *SMALL)
    assert result.exit_code == 0, result.output


def test_ranks_audit_together_and_the_first_one_speaks(tmp_path: Path) -> None:
    arguments = ("--steps", "1", "--json", "audit.json", *SMALL, "schedule.dispatch=non_blocking")
    result = warm_process.run(tmp_path, "-m", "erase_rec", "audit", "--config", "ctr_erase.yaml", *arguments, ranks=2)
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["passed"] is True
    assert report["ranks"] == "2 ranks"
    assert result.stdout.count("audit passed") == 1


def test_a_configuration_with_one_loss_removed_is_refused(tmp_path: Path) -> None:
    result = call(tmp_path, "audit", "--config", "ctr_erase.yaml", *SMALL, "towers.cross.loss=null", expect=2)
    assert result.stderr.startswith("error: ")
    assert "cross" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_configuration_that_passes_by_the_check_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("erase_rec.config.load.RULES", ())
    out = tmp_path / "audit.json"
    result = run_audit("--config", "ctr_erase.yaml", "--json", str(out), *SMALL, "towers.cross.loss=null")
    assert result.exit_code == 1, result.output
    assert "tower cross is detached and gets no gradient from its own local loss" in result.output
    report = json.loads(out.read_text())
    assert report["untrained"] == ["cross"]
    assert all(name.startswith("towers.cross.") for name in report["never_trained"])
    assert report["never_trained"]


def test_code_that_never_launches_a_backward_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is honest; the schedule's code is not."""
    original = GradientProgram._early_backward

    def all_but_cross(self: GradientProgram, state: StepState, op: Op) -> None:
        if op.tower != "cross":
            original(self, state, op)

    monkeypatch.setattr(GradientProgram, "_early_backward", all_but_cross)
    result = run_audit("--config", "ctr_erase.yaml", "--steps", "1", *SMALL)
    assert result.exit_code == 1, result.output
    assert "tower cross: the schedule gives no gradient to towers.cross." in result.output


def test_timeline_writes_a_chart_and_a_trace(tmp_path: Path) -> None:
    result = call(
        tmp_path, "timeline", "--config", "ctr_erase.yaml", "--steps", "2", "--out", "step.png", "--trace", "step.json",
        *SMALL, "schedule.dispatch=non_blocking",
    )  # fmt: skip
    with Image.open(tmp_path / "step.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
    trace = json.loads((tmp_path / "step.json").read_text())
    drawn = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {f"{kind}:{name}" for kind in ("forward", "early_backward") for name in SIX} <= drawn
    assert {"lookup", "over_arch", "backward", "update", "table_update"} <= drawn
    threads = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"main", "tower:cross", "MainThread"} <= threads
    assert any(name.startswith("early-backward") for name in threads)
    assert "critical path" in result.stdout
    assert "may run beside" in result.stdout


def test_timeline_refuses_what_is_no_png_before_it_reads_data(tmp_path: Path) -> None:
    result = call(tmp_path, "timeline", "--config", "ctr_erase.yaml", "--out", "step.pdf", expect=2)
    assert result.stderr == "error: --out: expected the name of a PNG file, found step.pdf; write --out step.png"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "--json", "missing/audit.json"], "error: --json: cannot write missing/audit.json"),
        (["timeline", "--out", "missing/step.png"], "error: timeline: cannot write missing/step.png"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    command, *rest = arguments
    result = call(tmp_path, command, "--config", "ctr_erase.yaml", "--steps", "1", *rest, *SMALL, expect=2)
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr
