"""The audit: what it says of honest plans, and that it names each way in which a model can be trained otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from erase_rec.batch import Batch, SparseBatch
from erase_rec.config.schema import OverArchConfig, SparseOptimizerConfig
from erase_rec.errors import UserError
from erase_rec.protocols import LocalLoss
from erase_rec.run_log import RunLog
from erase_rec.schedule.audit import audit, startup_audit
from erase_rec.schedule.audit_report import AuditReport, merge
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.loss_gradients import EMBEDDINGS
from erase_rec.schedule.plan import MAIN_LOSS, OVER_ARCH, LossPlan, Plan, TowerPlan
from erase_rec.schedule.program import Op
from erase_rec.schedule.step_state import StepState
from models.ctr_model import ColumnSelection, CTRModel, TowerBlock
from models.embeddings.layout import Table
from models.embeddings.torch_backend import TorchEmbeddings
from models.local_losses import BCELoss
from models.over_arch import OverArch
from models.registry import component

CPU = torch.device("cpu")
TABLES = [Table(name, 9, 4, mean=False) for name in "ab"]
DENSE, WIDTH, OUT = 3, 8, 5
TOWERS = ("first", "second", "third")


def make_model(
    inputs: Mapping[str, tuple[str, ...]] | None = None, logits: str = "additive", dropout: float = 0.0
) -> CTRModel:
    torch.manual_seed(0)
    embeddings = TorchEmbeddings(TABLES, SparseOptimizerConfig(), seed=1, device=CPU, dtype=torch.float64)
    mlp = component("tower", "mlp")
    towers = {}
    for name in TOWERS:
        reads = (inputs or {}).get(name, ())
        tower = mlp(
            mlp.Config(hidden=(7,), out_dim=OUT, dropout=dropout, batch_norm=dropout > 0),
            DENSE + OUT * len(reads),
            [4, 4],
        )
        towers[name] = TowerBlock(tower, ColumnSelection(range(DENSE), DENSE), ColumnSelection(range(8), 8), reads)
    over_arch = OverArch(OverArchConfig(hidden=(6,), logits=logits), [OUT] * len(TOWERS))  # type: ignore[arg-type]
    return CTRModel(embeddings, towers, over_arch).double()


def make_batch(size: int = 10) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return Batch(
        torch.randn(size, DENSE, generator=generator, dtype=torch.float64),
        SparseBatch(
            torch.randint(0, 9, (2 * size,), generator=generator),
            torch.ones(2 * size, dtype=torch.int32),
            None,
            2,
            True,
        ),
        torch.randint(0, 2, (size,), generator=generator).double(),
        torch.arange(size),
    )


def make_plan(*, early: bool = True, target: str = "own", **changes: object) -> Plan:
    towers = tuple(
        TowerPlan(name, f"tower:{name}", True, early, LossPlan(0.5, target))  # type: ignore[arg-type]
        for name in TOWERS
    )
    return replace(Plan(towers, "both"), **changes)  # type: ignore[arg-type]


def with_tower(plan: Plan, name: str, **changes: object) -> Plan:
    return replace(plan, towers=tuple(replace(t, **changes) if t.name == name else t for t in plan.towers))  # type: ignore[arg-type]


def losses_of(plan: Plan) -> dict[str, LocalLoss]:
    return {tower.name: BCELoss(BCELoss.Config()) for tower in plan.towers if tower.loss}


def audited(model: CTRModel, plan: Plan, batch: Batch | None = None) -> AuditReport:
    return audit(model, plan, losses_of(plan), batch or make_batch())


@pytest.mark.parametrize("target", ["own", "joint"])
@pytest.mark.parametrize("dispatch", ["blocking", "non_blocking"])
@pytest.mark.parametrize("reduction", [None, "bucket", "ddp"])
def test_each_detached_tower_is_trained_by_its_own_loss_only(target: str, dispatch: str, reduction: str | None) -> None:
    report = audited(make_model(), make_plan(target=target, dispatch=dispatch, reduction=reduction))
    assert report.findings == ()
    assert report.passed
    assert {block: set(by_loss) for block, by_loss in report.norms.items()} == {
        **{name: {name} for name in TOWERS},
        OVER_ARCH: {MAIN_LOSS},
        EMBEDDINGS: set(TOWERS),
    }
    assert all(norm > 0 for by_loss in report.norms.values() for norm in by_loss.values())


@pytest.mark.parametrize("dispatch", ["blocking", "non_blocking"])
def test_each_launch_has_its_norm_place_and_thread(dispatch: str) -> None:
    report = audited(make_model(), make_plan(dispatch=dispatch))
    assert [launch.tower for launch in report.launches] == list(TOWERS)
    for launch in report.launches:
        assert launch.norm == pytest.approx(report.norms[launch.tower][launch.tower])
        assert 0 <= launch.forward_ms <= launch.launch_ms <= launch.end_ms
        assert 1 < launch.position <= launch.operations
        assert (launch.thread == "MainThread") == (dispatch == "blocking")
    if dispatch == "blocking":
        assert all(launch.before_over_arch for launch in report.launches)


def test_an_aggregate_backward_launches_nothing_early() -> None:
    report = audited(make_model(), make_plan(early=False))
    assert report.passed
    assert report.launches == ()
    assert len(report.tables()) == 1


def test_micro_batches_have_a_launch_each() -> None:
    report = audited(make_model(), make_plan(micro_batches=3))
    assert report.findings == ()
    assert sorted((launch.tower, launch.micro) for launch in report.launches) == [
        (name, micro) for name in TOWERS for micro in range(3)
    ]
    assert all(launch.norm > 0 for launch in report.launches)
    assert "first @2" in report.as_markdown()


@pytest.mark.parametrize("mode", ["main", "local", "both", "none"])
def test_embeddings_are_reached_as_the_plan_says(mode: str) -> None:
    plan = with_tower(make_plan(embedding_gradient=mode), "second", detach=False, early=False)
    report = audited(make_model(), plan)
    assert report.findings == ()
    expected = {"main": {MAIN_LOSS}, "local": set(TOWERS), "both": {MAIN_LOSS, *TOWERS}, "none": set()}[mode]
    assert set(report.norms[EMBEDDINGS]) == expected


def test_in_a_cut_chain_no_later_loss_reaches_an_earlier_tower() -> None:
    inputs = {"second": ("first",), "third": ("first", "second")}
    plan = make_plan()
    for name, reads in inputs.items():
        plan = with_tower(plan, name, inputs=reads)
    report = audited(make_model(inputs), plan)
    assert report.findings == ()
    assert {name: set(report.norms[name]) for name in TOWERS} == {name: {name} for name in TOWERS}


def test_in_an_uncut_chain_a_later_loss_may_reach_an_earlier_tower() -> None:
    inputs = {"second": ("first",)}
    plan = with_tower(
        with_tower(make_plan(early=False), "first", detach=False), "second", detach=False, inputs=("first",)
    )
    report = audited(make_model(inputs), plan)
    assert report.findings == ()
    assert set(report.norms["first"]) == {"first", "second", MAIN_LOSS}


def test_a_frozen_tower_is_listed_as_frozen() -> None:
    model = make_model()
    model.tower("second").requires_grad_(False)
    report = audited(model, with_tower(make_plan(), "second", loss=None, early=False, frozen=True))
    assert report.findings == ()
    assert report.frozen == ("second",)
    assert report.norms["second"] == {}
    assert report.kept == ()
    assert ("second", "frozen") in report.tables()[0].rows


def test_a_head_that_nothing_uses_is_listed_as_kept() -> None:
    model = make_model(logits="none")
    model.tower("second").head.requires_grad_(False)
    report = audited(model, with_tower(make_plan(early=False), "second", loss=None, detach=False))
    assert report.findings == ()
    assert set(report.kept) == {
        f"towers.second.head.{name}" for name, _ in model.tower("second").head.named_parameters()
    }


def test_dropout_and_running_statistics_neither_disturb_nor_change() -> None:
    model = make_model(dropout=0.5)
    before = {name: value.clone() for name, value in model.dense_state().items()}
    random = torch.get_rng_state()
    report = audited(model, make_plan(dispatch="non_blocking", micro_batches=2))
    assert report.findings == ()
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.dense_state().items())
    assert any("running_mean" in name for name in before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_detached_tower_without_a_loss_is_named() -> None:
    """What no configuration may hold, made behind its back."""
    report = audited(make_model(), with_tower(make_plan(), "second", loss=None, early=False))
    assert report.untrained == ("second",)
    assert "tower second is detached and gets no gradient from its own local loss" in report.findings
    assert report.never_trained
    assert all(name.startswith("towers.second.") for name in report.never_trained)
    assert not report.passed


def test_a_loss_that_the_program_lacks_is_named() -> None:
    plan = make_plan()
    losses = losses_of(plan)
    del losses["third"]
    report = audit(make_model(), plan, losses, make_batch())
    assert report.untrained == ("third",)
    assert "tower third has a local loss in the plan and none in the program" in report.findings


def test_a_frozen_tower_that_is_trained_is_named() -> None:
    report = audited(make_model(), with_tower(make_plan(), "first", frozen=True, early=False))
    assert "tower first is frozen and its local loss trains it" in report.findings


def test_an_over_arch_that_uses_no_output_is_named() -> None:
    model = make_model(logits="none")
    with torch.no_grad():
        for parameter in model.over_arch.parameters():
            parameter.zero_()
    plan = with_tower(make_plan(), "second", detach=False, early=False)
    assert "tower second gets no gradient from the main loss" in audited(model, plan).findings


def test_a_loss_that_reads_another_tower_is_named() -> None:
    """A block that keeps its neighbour's output under the cut."""
    model = make_model()
    held: dict[str, Tensor] = {}
    first, second = model.tower("first"), model.tower("second")

    def remember(module: object, arguments: object, result: tuple[Tensor, Tensor]) -> None:
        held["output"] = result[0]

    def add(module: object, arguments: object, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return result[0], result[1] + held["output"].sum(1)

    first.register_forward_hook(remember)
    second.register_forward_hook(add)
    # Without early backward, since an early one would have freed the neighbour's graph.
    report = audited(model, make_plan(early=False))
    assert "the local loss of second leaks into tower first" in report.findings


def skip(state: StepState, op: Op) -> None:
    """An operation that is not done."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("early_backward", "tower second: the schedule gives no gradient to towers.second."),
        ("backward", "the over-arch: "),
    ],
)
def test_a_schedule_that_skips_a_backward_is_named(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(GradientProgram, f"_{kind}")

    def sometimes(self: GradientProgram, state: StepState, op: Op) -> None:
        if op.tower in {"second", None}:
            return skip(state, op)
        original(self, state, op)
        return None

    monkeypatch.setattr(GradientProgram, f"_{kind}", sometimes)
    findings = audited(make_model(), make_plan()).findings
    assert len([finding for finding in findings if finding.startswith(expected)]) == 1


def test_a_schedule_that_drops_a_micro_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GradientProgram._early_backward

    def only_the_first(self: GradientProgram, state: StepState, op: Op) -> None:
        if not (op.micro == 1 and op.tower == "first"):
            original(self, state, op)

    monkeypatch.setattr(GradientProgram, "_early_backward", only_the_first)
    monkeypatch.setattr(GradientProgram, "pooled_gradient", lambda self, state: None)
    findings = audited(make_model(), make_plan(micro_batches=2)).findings
    assert any(finding.startswith("tower first: the schedule's gradient differs") for finding in findings)
    assert not any(finding.startswith("tower second") for finding in findings)
    assert "the embeddings: the schedule gives no gradient to pooled embeddings" in findings


def test_a_schedule_with_another_weight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GradientProgram._local_loss

    def doubled(self: GradientProgram, state: StepState, op: Op) -> None:
        original(self, state, op)
        if op.tower == "third":
            weighted = state.micros[op.micro].weighted_losses
            weighted["third"] = 2 * weighted["third"]

    monkeypatch.setattr(GradientProgram, "_local_loss", doubled)
    findings = audited(make_model(), make_plan()).findings
    assert "tower third: the schedule's gradient differs from that of the losses by 100 % of its norm" in findings


class TextLog(RunLog):
    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def text(self, tag: str, text: str) -> None:
        self.texts[tag] = text


def test_the_startup_audit_logs_its_text() -> None:
    log, plan = TextLog(), make_plan()
    assert startup_audit(make_model(), plan, losses_of(plan), make_batch(), log).passed
    assert "| first | own loss " in log.texts["audit"]
    assert "audit passed" in log.texts["audit"]


def test_the_startup_audit_refuses_a_tower_that_is_never_trained() -> None:
    log, plan = TextLog(), with_tower(make_plan(), "second", loss=None, early=False)
    with pytest.raises(UserError, match="no gradient from their own local loss: second;"):
        startup_audit(make_model(), plan, losses_of(plan), make_batch(), log)
    assert "audit failed" in log.texts["audit"]


def test_reports_of_several_batches_keep_the_worst() -> None:
    plan = make_plan()
    reports = [
        audit(make_model(), plan, losses_of(plan), make_batch(size), step=step) for step, size in enumerate((8, 12))
    ]
    worst = merge(reports)
    for block, by_loss in worst.norms.items():
        for loss, norm in by_loss.items():
            assert norm == min(report.norms[block][loss] for report in reports)
    assert worst.steps == 2
    assert [launch.step for launch in worst.launches] == [0, 0, 0, 1, 1, 1]
    bad = replace(reports[1], findings=("something",))
    assert merge([reports[0], bad, bad]).findings == ("something",)


def test_json_holds_plain_types() -> None:
    fields = audited(make_model(), make_plan(dispatch="non_blocking")).as_json()
    read = json.loads(json.dumps(fields))
    assert read["norms"] == fields["norms"]
    assert read["launches"] == fields["launches"]
    assert read["passed"] is True
    assert fields["launches"][0]["tower"] == "first"
    assert isinstance(fields["launches"][0]["before_over_arch"], bool)
