"""``train.precision: bf16`` in the parts of a run: bf16 in the model, float32 in what is saved, bitwise resume."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from data.dataset import Datasets, build_datasets
from erase_rec import checkpoint
from erase_rec.api.assembly import ContentCatalog, Machine, build_parts
from erase_rec.batch import Batch
from erase_rec.checkpoint import CheckpointManager
from erase_rec.config.load import load_config
from erase_rec.config.schema import Config
from erase_rec.distributed.world import World
from erase_rec.precision import cast_parameters
from erase_rec.run_folder import RunFolder
from erase_rec.training_loop import Parts, checkpoint_tensors, served_tensors
from models.ctr_model import CTRModel, build_model
from models.embeddings.build import build_embeddings

ROWS = 64


def load(precision: str = "bf16") -> Config:
    overrides = [
        "data.params={rows: 640, eval_rows: 100}",
        f"train.local_batch_size={ROWS}",
        "train.device=cpu",
        f"train.precision={precision}",
        "schedule.cuda_graph=none",
        "towers.deep.params={hidden: [16], out_dim: 8, batch_norm: true}",
        "towers.mask.frozen=true",
        "towers.mask.loss=null",
        "towers.mask.detach=false",
    ]
    return load_config("ctr_erase.yaml", overrides, catalog=ContentCatalog()).config


def build(config: Config, datasets: Datasets) -> Parts:
    return build_parts(config, datasets, RunFolder(Path()), Machine.prepare(config), World())


def run(parts: Parts, batches: list[Batch]) -> None:
    for batch in batches:
        parts.step(batch)


def copies(parts: Parts) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in checkpoint_tensors(parts).items()}


def test_the_model_computes_in_bf16_and_checkpoints_are_float32(tmp_path: Path) -> None:
    config = load()
    datasets = build_datasets(config)
    batches = [*datasets.train.batches(0)]
    parts, plain = build(config, datasets), build(load("fp32"), datasets)
    assert isinstance(parts.model, CTRModel)
    norms = {
        id(value) for part in parts.model.modules() if isinstance(part, nn.BatchNorm1d) for value in part.parameters()
    }
    assert norms
    for name, parameter in parts.model.named_parameters():
        if not name.startswith("embeddings."):
            assert parameter.dtype == (torch.float32 if id(parameter) in norms else torch.bfloat16), name
    start, expected = copies(parts), copies(plain)
    assert start.keys() == expected.keys()
    for name, value in expected.items():
        assert start[name].dtype == value.dtype, name
        assert torch.equal(start[name], value), name

    run(parts, batches[:4])
    run(plain, batches[:4])
    trained, expected = copies(parts), copies(plain)
    weights = [name for name in plain.optimizer.masters() if not name.startswith("towers.mask.")]
    moved, apart = (
        torch.cat([(expected[f"model/{name}"] - other[f"model/{name}"]).flatten() for name in weights]).norm()
        for other in (start, trained)
    )
    assert 0 < apart < 0.5 * moved  # gradients in bf16, updates far smaller than a bf16 weight can show
    for name in trained:
        if name.startswith("model/towers.mask."):
            assert torch.equal(trained[name], start[name]), name  # frozen, and not rounded

    path = CheckpointManager(tmp_path, keep=1).save(4, checkpoint_tensors(parts), {}, is_best=False)
    served = build_model(
        config, build_embeddings(config, datasets.table_rows, torch.device("cpu"), torch.bfloat16), torch.device("cpu")
    )
    checkpoint.load(path, served_tensors(served), subset=True)
    cast_parameters(served, torch.bfloat16)
    for model in (served, parts.model):
        model.train(False)
    with torch.no_grad():
        assert torch.equal(served.score(batches[5]).logit, parts.score(batches[5]).logit)


def test_resume_is_bitwise(tmp_path: Path) -> None:
    config = load()
    datasets = build_datasets(config)
    batches = [*datasets.train.batches(0)]
    whole, stopped, resumed = (build(config, datasets) for _ in range(3))
    run(whole, batches[:8])
    run(stopped, batches[:4])
    path = CheckpointManager(tmp_path, keep=1).save(4, checkpoint_tensors(stopped), {}, is_best=False)
    run(resumed, batches[7:9])  # other values, to be overwritten
    checkpoint.load(path, checkpoint_tensors(resumed))
    resumed.optimizer.refresh()
    run(resumed, batches[4:8])
    expected = copies(whole)
    for name, value in copies(resumed).items():
        assert torch.equal(value, expected[name]), name
    for name, parameter in resumed.model.named_parameters():  # type: ignore[attr-defined]
        assert torch.equal(parameter, dict(whole.model.named_parameters())[name]), name  # type: ignore[attr-defined]
