"""Schedules on CUDA streams: gradients equal the aggregate, whatever runs beside what."""

from __future__ import annotations

import pytest
import torch

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.config.load import load_config
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from erase_rec.schedule.gradients import GradientProgram
from erase_rec.schedule.plan import Plan
from erase_rec.schedule.streams import NullStreams, make_streams
from models.ctr_model import build_local_losses

pytestmark = pytest.mark.gpu
SMALL = ["data.params={rows: 20000, eval_rows: 2000}", "train.local_batch_size=2048"]


def load(*overrides: str):  # type: ignore[no-untyped-def]
    return load_config("ctr_erase.yaml", [*SMALL, *overrides], catalog=ContentCatalog()).config


@pytest.mark.parametrize("preset", ["exact_streams", "erase"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_streams_change_no_gradient(tmp_path, preset: str, precision: str) -> None:  # type: ignore[no-untyped-def]
    """Twenty batches in a row without a host synchronisation: a missing wait shows as a difference."""
    eager = "schedule.cuda_graph=none"
    config = load(f"schedule.preset={preset}", eager, f"train.precision={precision}", "train.device=cuda")
    machine = Machine.prepare(config)
    datasets = build_datasets(config, pin=True)
    model = build_parts(config, datasets, RunFolder(tmp_path), machine, World()).model
    plan = Plan.from_config(config)
    losses = build_local_losses(config)

    def program(streams) -> GradientProgram:  # type: ignore[no-untyped-def]
        return GradientProgram(model, plan, losses, streams, device=machine.device)

    on_streams, in_place = program(make_streams(plan.streams(), machine.device)), program(NullStreams())
    batches: list[Batch] = [batch.to(machine.device) for batch in datasets.train.batches(0) if batch.size == 2048]
    found = [on_streams.gradients(batch) for _ in range(3) for batch in batches]
    expected = [in_place.gradients(batch) for batch in batches]
    torch.cuda.synchronize()
    assert len(found) >= 20
    for index, gradients in enumerate(found):
        reference = expected[index % len(batches)]
        assert gradients.pooled is not None
        torch.testing.assert_close(gradients.pooled, reference.pooled, rtol=1e-5, atol=1e-8)
        for name, gradient in gradients.parameters.items():
            torch.testing.assert_close(gradient, reference.parameters[name], rtol=1e-5, atol=1e-7, msg=name)


def test_early_equals_aggregate(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The same detached model with one backward at the end and with early backward on streams."""
    results = {}
    for preset in ("detached", "erase"):
        config = load(f"schedule.preset={preset}", "train.device=cuda")
        machine = Machine.prepare(config)
        datasets = build_datasets(config, pin=True)
        step = build_parts(config, datasets, RunFolder(tmp_path), machine, World()).step
        losses = [step(batch.to(machine.device)).loss.clone() for batch in datasets.train.batches(0)]
        results[preset] = torch.stack(losses).cpu()
    torch.testing.assert_close(results["detached"], results["erase"], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(results["erase"]).all()
