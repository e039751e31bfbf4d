"""Local objectives and tower health as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from in_process import call
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SMALL = [
    "data.params={rows: 1000, eval_rows: 300}",
    "embedding.backend=torch",
    "train.local_batch_size=100",
    "train.threads=1",
    "train.device=cpu",
    "schedule.exact_every=4",
    "over_arch.logits=gated",
    "towers.deep.loss.kind=bce_pairwise",
    "towers.mask.cut_at=1",
    "towers.attention.head.kind=goodness",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    arguments = ["train.checkpoint_every_steps=5", "train.keep_checkpoints=5", "run.name=whole"]
    call(folder, "train", "--config", "ctr_erase.yaml", *SMALL, *arguments)
    return folder / "runs" / "whole"


def test_a_resumed_run_has_the_same_exact_steps(trained: Path, tmp_path: Path) -> None:
    """From step 5 of 10, bit for bit; step 8 is the one of those left that cuts nothing."""
    cut = tmp_path / "cut"
    shutil.copytree(trained, cut)
    checkpoints = cut / "checkpoints"
    for link in ("best", "last"):
        (checkpoints / link).unlink()
    shutil.rmtree(checkpoints / "step_00000010")
    call(tmp_path, "train", "--resume", str(cut))
    found, expected = (newest(folder, tmp_path / "state.pt") for folder in (cut, trained))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole, resumed = (json.loads((folder / "summary.json").read_text()) for folder in (trained, cut))
    assert resumed["towers"] == whole["towers"]


def newest(folder: Path, plain: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "checkpoints" / "step_00000010", plain)
    tensors: dict[str, torch.Tensor] = torch.load(plain)
    return tensors


def test_every_run_says_a_towers_part_and_ablation_the_ne_without_it(trained: Path) -> None:
    towers = json.loads((trained / "summary.json").read_text())["towers"]
    assert 0 < sum(tower["share"] for tower in towers.values()) < 1
    assert all(tower["grad_norm"] > 0 and tower["most_like"] in towers for tower in towers.values())
    assert all(tower["ne_without"] is None for tower in towers.values())
    ended = call(trained, "eval", "--checkpoint", str(trained), "--ablate", "--json")
    ablated = json.loads(ended.stdout)["towers"]
    assert all(tower["ne_without"] > 0 and tower["grad_norm"] is None for tower in ablated.values())
    assert "without" in call(trained, "eval", "--checkpoint", str(trained), "--ablate").stdout


def test_the_audit_of_objectives_passes(tmp_path: Path) -> None:
    ended = call(tmp_path, "audit", "--config", "ctr_erase.yaml", "--steps", "4", *SMALL)
    assert "audit passed" in ended.stdout
    assert "where nothing is cut, one step in 4" in " ".join(ended.stdout.split())
