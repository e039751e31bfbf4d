"""Compiled towers give the losses of the plain ones, in captured steps too, and are compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from data.dataset import build_datasets
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.config.load import load_config
from erase_rec.distributed.world import World
from erase_rec.run_folder import RunFolder
from erase_rec.training_loop import Parts

pytestmark = pytest.mark.gpu
ROWS = 512


@pytest.mark.filterwarnings("ignore")  # Inductor warns of many things that are not ours
def test_losses_equal_the_plain_ones_and_nothing_is_compiled_again(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    counters.clear()
    config, plain_config = (
        load_config(
            "ctr_erase.yaml",
            [
                "data.params={rows: 8000, eval_rows: 600}",
                f"train.local_batch_size={ROWS}",
                "eval.local_batch_size=300",
                "train.device=cuda",
                "train.precision=bf16",
                "schedule.preset=erase",
                "schedule.cuda_graph=step",
                f"model.compile={compile}",
            ],
            catalog=ContentCatalog(),
        ).config
        for compile in ("true", "false")
    )
    datasets = build_datasets(config, pin=True)
    batches = [batch.to(torch.device("cuda")) for batch in datasets.train.batches(0)]
    assert datasets.eval is not None
    held_out = next(iter(datasets.eval.batches(0)))
    compiled, plain = (
        build_parts(each, datasets, RunFolder(Path()), Machine.prepare(each), World())
        for each in (config, plain_config)
    )

    def losses(parts: Parts, batch: Batch) -> torch.Tensor:
        output = parts.step(batch)
        return torch.stack([output.loss, *output.local_losses.values()])

    found = [losses(compiled, batch) for batch in batches[:2]]
    torch.cuda.synchronize()
    assert "compiled 7 blocks in" in capsys.readouterr().err
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 7
    found += [losses(compiled, batch) for batch in batches[2:]]
    compiled.model.train(False)
    with torch.no_grad():
        compiled.score(held_out)
    compiled.model.train(True)
    found.append(losses(compiled, batches[0]))
    assert batches[-1].size < ROWS
    assert counters["stats"]["unique_graphs"] == graphs
    expected = [losses(plain, batch) for batch in [*batches, batches[0]]]
    # bf16 keeps 8 bits; fused operations round less often. The losses are means over hundreds of rows.
    torch.testing.assert_close(torch.stack(found).cpu(), torch.stack(expected).cpu(), rtol=5e-3, atol=5e-3)
