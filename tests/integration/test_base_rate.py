"""``eval.base_rate`` as a user sets it: in training, evaluation, and what they show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from in_process import call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

KEPT = 0.5


@pytest.mark.parametrize("kind", ["train", "window"])
def test_ne_of_a_run_and_of_its_checkpoint_compare_with_the_training_rows(kind: str, tmp_path: Path) -> None:
    """With sampled negatives: their share of the rows is put right in the constant, as it is in the logits."""
    small = ("data.params.rows=2000", "data.params.eval_rows=500", "train.local_batch_size=200", "train.device=cpu")
    run = (f"eval.base_rate={kind}", f"data.negative_sampling_rate={KEPT}", "train.log_every_steps=2", "run.name=run")
    shown = call(tmp_path, "train", "--config", "ctr_erase.yaml", *small, *run).stdout
    rows = "all training rows" if kind == "train" else "the training rows of the last window"
    assert f"NE compares with the share of clicks in {rows}" in " ".join(shown.split())
    summary = json.loads((tmp_path / "runs/run/summary.json").read_text())["eval"]
    constant, own = summary["ne_base_rate"], summary["base_rate"]
    assert f"NE against {constant:.5f}" in shown
    entropy = -own * math.log(constant) - (1 - own) * math.log(1 - constant)
    assert summary["ne"] == pytest.approx(summary["logloss"] / entropy, rel=1e-9)
    logged = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    sampled = [line["train/base_rate"] for line in logged if "train/base_rate" in line][-1]
    expected = sampled * KEPT / (sampled * KEPT + 1 - sampled)
    assert constant == (pytest.approx(expected) if kind == "window" else pytest.approx(expected, abs=0.1))
    assert constant != own
    events = EventAccumulator(str(tmp_path / "runs/run"))
    events.Reload()
    assert "NE compares with" in events.Tensors("ne")[0].tensor_proto.string_val[0].decode()

    again = call(tmp_path, "eval", "--checkpoint", "runs/run", "--json").stdout
    assert json.loads(again)["eval"]["ne"] == pytest.approx(summary["ne"], rel=1e-6)
    other = "window" if kind == "train" else "train"
    refused = call(tmp_path, "eval", "--checkpoint", "runs/run", f"eval.base_rate={other}", expect=2).stderr
    assert f"use eval.base_rate={kind} or eval.base_rate=eval" in " ".join(refused.split())


def test_a_run_that_evaluated_nothing_kept_no_base_rate(tmp_path: Path) -> None:
    call(tmp_path, "synth", "--rows", "400", "--eval-rows", "100", "--out", "raw")
    small = ("data.train=raw/train-00000.tsv", "data.eval=null", "train.epochs=null", "train.steps=1", "run.name=run")
    call(tmp_path, "train", "--config", "ctr_criteo.yaml", *small, "eval.base_rate=train")
    asked = ("eval", "--checkpoint", "runs/run", "data.eval=raw/eval.tsv")
    refused = " ".join(call(tmp_path, *asked, expect=2).stderr.split())
    assert "evaluated no rows, so that it kept no base rate; use eval.base_rate=eval" in refused
    call(tmp_path, *asked, "eval.base_rate=eval")
