"""Training on DataFrames comes to what training on the same rows in a file comes to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from erase_rec import Config, Trainer, UserError

CONFIG = """
data: {{kind: {kind}, {paths} eval_fraction: 0.25, label: {{column: clicked}}}}
features:
  dense: [{{name: age, transform: standardize}}]
  sparse: [{{name: city, encoding: vocabulary}}, {{name: device, encoding: hash, num_embeddings: 50}}]
embedding: {{dim: 4}}
towers:
  - {{name: deep, kind: mlp, params: {{hidden: [8]}}}}
train: {{epochs: 2, local_batch_size: 64, device: cpu}}
"""


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(2)
    city = rng.choice(["Rome", "Oslo", "Bonn"], 600)
    return pd.DataFrame(
        {
            "clicked": (rng.random(600) < np.where(city == "Rome", 0.6, 0.2)).astype(int),
            "age": pd.array(np.where(rng.random(600) < 0.1, np.nan, rng.integers(18, 80, 600)), dtype="Float64"),
            "city": pd.Categorical(city),
            "device": rng.choice(np.array(["phone", "desk", None], dtype=object), 600),
        },
        index=rng.permutation(600),
    )


def test_a_frame_trains_as_its_rows_in_a_file_do(
    tmp_path: Path, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from erase_rec.cli.train import command

    monkeypatch.chdir(tmp_path)
    frame.to_parquet("rows.parquet", index=False)
    Path("frame.yaml").write_text(CONFIG.format(kind="pandas", paths=""))
    Path("file.yaml").write_text(CONFIG.format(kind="parquet", paths="train: rows.parquet,"))
    trainer = Trainer(Config.from_yaml("frame.yaml", ["run.name=frame"]), train=frame)
    trainer.fit()
    assert trainer.folder == Path("runs/frame")
    command(config="file.yaml", overrides=["run.name=file"], resume=None)
    assert "run folder" in capsys.readouterr().out
    of_frame, of_file = (json.loads(Path(f"runs/{name}/summary.json").read_text()) for name in ("frame", "file"))
    assert of_frame["status"] == "completed"
    assert of_frame["eval"] == of_file["eval"]
    assert of_frame["train"] == of_file["train"]
    assert of_frame["eval"]["rows"] > 100


def test_a_configuration_that_names_files_is_refused(tmp_path: Path, frame: pd.DataFrame) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(CONFIG.format(kind="parquet", paths="train: rows.parquet,"))
    with pytest.raises(UserError, match=r"data\.kind: found parquet, expected pandas"):
        Trainer(Config.from_yaml(path, [f"run.dir={tmp_path}"]), train=frame).fit()
