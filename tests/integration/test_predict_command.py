"""``erase-rec predict`` and ``Predictor``: the scores of the run's own evaluation, for rows with and without labels."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import call

from data.frames import FrameSource
from data.sources.source import Chunk
from erase_rec import Config, Trainer
from erase_rec.api.predictor import Predictor, Scoring
from erase_rec.cli.predict import _write
from erase_rec.errors import UserError

CONFIG = """
data: {{kind: csv, train: train.csv, eval: {held_out}, label: {{column: clicked}}}}
features:
  dense: [{{name: age, transform: standardize}}]
  sparse:
    - {{name: city, encoding: vocabulary}}
    - {{name: device, encoding: hash, num_embeddings: 50}}
    - {{name: tags, encoding: vocabulary, multi_valued: true, separator: "|"}}
embedding: {{dim: 4, backend: torch}}
towers:
  - {{name: deep, kind: mlp, params: {{hidden: [8]}}}}
train: {{epochs: 1, local_batch_size: 64, device: cpu, threads: 1}}
eval: {{scores: true, local_batch_size: 50}}
run: {{name: r}}
"""


def rows(seed: int, count: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "clicked": rng.integers(0, 2, count),
            "user": [f"u{number:07d}" for number in range(count)],
            "age": np.where(rng.random(count) < 0.1, np.nan, rng.integers(18, 80, count)),
            "city": rng.choice(["Rome", "Oslo", "Bonn"], count),
            "device": rng.choice(["phone", "desk", ""], count),
            "tags": ["|".join(rng.choice(["a", "b", "c"], rng.integers(0, 4))) for _ in range(count)],
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and its held-out rows with and without labels."""
    folder = tmp_path_factory.mktemp("trained")
    rows(1, 400).to_csv(folder / "train.csv", index=False)
    held_out = rows(2, 300)
    held_out.to_csv(folder / "held_out.csv", index=False)
    held_out.drop(columns="clicked").to_csv(folder / "unlabelled.csv", index=False)
    held_out.drop(columns="clicked").to_parquet(folder / "unlabelled.parquet", index=False, row_group_size=70)
    (folder / "small.yaml").write_text(CONFIG.format(held_out="held_out.csv"))
    call(folder, "train", "--config", "small.yaml")
    return folder


def scores(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "runs" / "r" / "scores.parquet")


def test_unlabelled_rows_get_the_scores_of_the_evaluation(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    out.symlink_to("elsewhere.parquet")  # a link stays one
    files = ["--input", "unlabelled.csv", "held_out.csv"]
    result = call(trained, "predict", "--checkpoint", "runs/r", *files, "--keep", "user", "--out", str(out))
    assert result.stdout == f"600 predictions: {out}\n"
    assert out.is_symlink()
    found, expected = pd.read_parquet(out), scores(trained)
    assert list(found) == ["row_id", "user", "prediction", "logit"]
    assert found["row_id"].tolist() == list(range(600))
    assert found["user"].tolist() == 2 * [f"u{number:07d}" for number in range(300)]
    for part in (found[:300], found[300:]):
        assert part["prediction"].to_numpy() == pytest.approx(expected["prediction"].to_numpy(), abs=1e-6)
        assert part["logit"].to_numpy() == pytest.approx(expected["logit"].to_numpy(), abs=1e-6)
    assert expected["prediction"].std() > 0.001, "equal because the model knows nothing"


def test_files_of_another_kind_and_another_batch(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    options = ["--kind", "parquet", "--batch", "7", "--device", "cpu", "--out", str(out)]
    call(
        trained,
        "predict",
        "--checkpoint",
        "runs/r/checkpoints/step_00000007",
        "--input",
        "unlabelled.parquet",
        *options,
    )
    assert pd.read_parquet(out)["logit"].to_numpy() == pytest.approx(scores(trained)["logit"].to_numpy(), abs=1e-6)
    rows(2, 300).to_csv(tmp_path / "tabs.tsv", sep="\t", index=False)
    tabs = ["--input", str(tmp_path / "tabs.tsv"), "--param", "delimiter=tab", "--out", str(out)]
    call(trained, "predict", "--checkpoint", "runs/r", *tabs)
    assert pd.read_parquet(out)["logit"].to_numpy() == pytest.approx(scores(trained)["logit"].to_numpy(), abs=1e-6)


@pytest.fixture
def broken(trained: Path, tmp_path: Path) -> Path:
    """The held-out rows with two that cannot be read: a word for a number, and a missing field."""
    lines = (trained / "unlabelled.csv").read_text().splitlines()
    lines[5] = "u,old,Rome,desk,a"
    lines[9] = "u,3"
    path = tmp_path / "broken.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_bad_rows_by_policy(trained: Path, tmp_path: Path, broken: Path) -> None:
    out = tmp_path / "s.parquet"
    start = ["predict", "--checkpoint", "runs/r", "--input", str(broken), "--out", str(out)]
    refused = call(trained, *start, expect=2)
    assert refused.stderr.startswith(f"error: {broken}, line 10: found 2 fields, expected 5")
    assert not list(tmp_path.glob("*.parquet")) + list(tmp_path.glob(".*"))
    result = call(trained, *start, "--bad-rows", "quarantine")
    assert "2 rows could not be read and have no prediction" in result.stderr
    found = pd.read_parquet(out)
    assert found["row_id"].tolist() == [row for row in range(300) if row not in (4, 8)]
    expected = scores(trained)["logit"][found["row_id"]].to_numpy()
    assert found["logit"].to_numpy() == pytest.approx(expected, abs=1e-6)
    aside = (tmp_path / "s.parquet.quarantine.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in aside) == [6, 10]


def test_row_ids_count_bad_rows_of_every_file(trained: Path, tmp_path: Path, broken: Path) -> None:
    lines = broken.read_text().splitlines()
    broken.write_text("\n".join([lines[0], "first", *lines[2:-1], "last"]) + "\n")
    out = tmp_path / "s.parquet"
    files = ["--input", str(broken), "unlabelled.csv", str(broken.with_name("other.csv"))]
    broken.with_name("other.csv").write_text("\n".join([lines[0], "no row", "none"]) + "\n")
    call(
        trained, "predict", "--checkpoint", "runs/r", *files, "--out", str(out), "--bad-rows", "skip", "--keep", "user"
    )
    found = pd.read_parquet(out)
    assert found["row_id"].tolist() == [row for row in range(600) if row not in (0, 4, 8, 299)]
    users = [f"u{number:07d}" for number in range(300)]
    assert found["user"].tolist() == [users[row % 300] for row in found["row_id"]]


def test_too_many_bad_rows_end_it(trained: Path, tmp_path: Path) -> None:
    lines = (trained / "unlabelled.csv").read_text().splitlines()
    (tmp_path / "much.csv").write_text("\n".join([lines[0], *lines[1:200], *(["broken"] * 101)]) + "\n")
    start = ["predict", "--checkpoint", "runs/r", "--input", str(tmp_path / "much.csv"), "--bad-rows", "skip"]
    out = ["--out", str(tmp_path / "s.parquet")]
    assert "101 of the first 300 rows are bad" in call(trained, *start, *out, expect=2).stderr
    assert not list(tmp_path.glob("*.parquet"))
    call(trained, *start, *out, "--max-bad-share", "0.5")
    assert len(pd.read_parquet(tmp_path / "s.parquet")) == 199


def test_a_run_on_a_prepared_folder(trained: Path, tmp_path: Path) -> None:
    config = ["--config", str(trained / "small.yaml")]
    call(trained, "prepare", *config, "--out", str(tmp_path / "prepared"), "--workers", "1")
    call(trained, "train", *config, f"data.prepared={tmp_path / 'prepared'}", "run.name=p")
    out = ["--out", str(tmp_path / "s.parquet")]
    call(trained, "predict", "--checkpoint", "runs/p", "--input", "unlabelled.csv", *out)
    found = pd.read_parquet(tmp_path / "s.parquet")["logit"].to_numpy()
    expected = pd.read_parquet(trained / "runs" / "p" / "scores.parquet")["logit"].to_numpy()
    assert found == pytest.approx(expected, abs=1e-6)


def test_memory_holds_one_chunk_at_a_time(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is handed out before the next chunk is read: 300 rows in row groups of 70."""
    from data.registry import open_source
    from data.sources import parquet

    monkeypatch.setattr(parquet, "MAX_CHUNK_ROWS", 70)
    source = open_source("parquet", [str(trained / "unlabelled.parquet")], {}, split="eval")
    given: list[int] = []
    chunks = source.chunks

    def counted() -> Iterator[Chunk]:
        for chunk in chunks():
            given.append(len(given))
            yield chunk

    monkeypatch.setattr(source, "chunks", counted)
    scoring = Scoring(Predictor.load(trained / "runs" / "r", device="cpu"), source)
    handed_out = [(table.num_rows, len(given)) for table in scoring.tables()]
    assert handed_out == [(70, 1), (70, 2), (70, 3), (70, 4), (20, 5)]


def test_unknown_values_are_remarked(trained: Path, tmp_path: Path) -> None:
    rows(2, 20).assign(city="Nome").to_csv(tmp_path / "far.csv", index=False)
    out = ["--out", str(tmp_path / "s.parquet")]
    result = call(trained, "predict", "--checkpoint", "runs/r", "--input", str(tmp_path / "far.csv"), *out)
    assert "of the categorical values are unseen in training: city 100.0%" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nothing.csv", "--out", "s.parquet"], "error: file 'nothing.csv' not found"),
        (["--input", "unlabelled.csv", "--out", "s.csv"], "error: --out: predictions are written as Parquet"),
        (["--input", "unlabelled.csv", "--out", "no/s.parquet"], "error: --out: there is no folder no"),
        (["--input", "unlabelled.csv", "--out", "unlabelled.csv.parquet", "--keep", "usr"], "did you mean 'user'?"),
        (["--input", "unlabelled.csv", "--out", "s.parquet", "--keep", "logit"], "error: --keep: 'logit' is a column"),
        (
            ["--input", "unlabelled.parquet", "--out", "unlabelled.parquet", "--kind", "parquet"],
            "one of the input files",
        ),
        (["--input", "unlabelled.csv", "--out", "."], "--out: . is there and is no file; name another"),
        (["--input", "unlabelled.csv", "--out", "fifo"], "--out: fifo is there and is no file; name another"),
        (["--input", "unlabelled.csv", "--out", "x" * 300], "File name too long"),
        (["--input", "unlabelled.csv", "--out", "s.parquet", "--kind", "cvs"], "did you mean 'csv'?"),
        (["--input", "unlabelled.csv", "--out", "s.parquet", "--param", "delimeter=,"], "error: --param: data.params"),
        (["--input", "unlabelled.csv", "--out", "s.parquet", "--param", "delimiter"], "expected key=value"),
        (["--input", "small.yaml", "--out", "s.parquet"], "line 1: the line is blank; expected a header line"),
    ],
)
def test_mistakes_are_one_message(trained: Path, arguments: list[str], message: str) -> None:
    if not (trained / "fifo").exists():
        os.mkfifo(trained / "fifo")
    result = call(trained, "predict", "--checkpoint", "runs/r", *arguments, expect=2)
    assert message in result.stderr
    assert not (trained / "s.parquet").exists()


def test_a_folder_without_a_run_is_refused(trained: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "s.parquet")]
    for checkpoint in ("runs", "x" * 300):
        result = call(trained, "predict", "--checkpoint", checkpoint, "--input", "unlabelled.csv", *out, expect=2)
        assert "neither a run folder nor a checkpoint" in result.stderr


def test_no_rows_make_an_empty_file(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("user,age,city,device,tags\n")
    out = ["--keep", "user", "--out", str(tmp_path / "s.parquet")]
    call(trained, "predict", "--checkpoint", "runs/r", "--input", str(tmp_path / "none.csv"), *out)
    assert pq.read_table(tmp_path / "s.parquet").column_names == ["row_id", "user", "prediction", "logit"]


def test_a_frame_gets_the_scores_of_its_file(trained: Path) -> None:
    predictor = Predictor.load(trained / "runs" / "r", device="cpu")
    frame = rows(2, 300).drop(columns="clicked").set_index("user", drop=False)
    found = predictor.predict(frame, keep=["user"], batch_size=11)
    assert list(found) == ["user", "prediction", "logit"]
    assert found.index.equals(frame.index)
    assert found["logit"].to_numpy() == pytest.approx(scores(trained)["logit"].to_numpy(), abs=1e-6)
    assert len(predictor.predict(frame[:0])) == 0
    with pytest.raises(UserError, match="DataFrame: column 'tags' not found"):
        predictor.predict(frame.drop(columns="tags"))
    odd = frame[:4].assign(age=["7", "old", "8", ""])
    with pytest.raises(UserError, match=r"eval DataFrame row 2: feature 'age': found 'old'"):
        predictor.predict(odd)
    assert predictor.predict(odd, bad_rows="skip").index.tolist() == ["u0000000", "u0000002", "u0000003"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: found 0, expected at least 1"),
        ({"bad_rows": "drop"}, "bad_rows: found 'drop', expected one of error, skip, quarantine"),
        ({"keep": "user"}, r"keep: found the text 'user', expected a list of columns"),
    ],
)
def test_options_from_python_are_checked(trained: Path, options: dict[str, Any], message: str) -> None:
    predictor = Predictor.load(trained / "runs" / "r", device="cpu")
    with pytest.raises(UserError, match=message):
        predictor.predict(rows(2, 10), **options)


def test_no_share_of_bad_rows_is_a_share(trained: Path) -> None:
    """The first 100 are always let through."""
    predictor = Predictor.load(trained / "runs" / "r", device="cpu")
    frame = rows(2, 10_300).assign(age="7")
    frame.loc[:100, "age"] = "old"
    scoring = Scoring(predictor, FrameSource(frame), bad_rows="skip", max_bad_share=0.0)
    with pytest.raises(UserError, match="101 of the first 10300 rows are bad"):
        list(scoring.tables())


def test_a_run_on_frames_predicts_files_once_it_knows_their_kind(trained: Path, tmp_path: Path) -> None:
    config = tmp_path / "frames.yaml"
    text = CONFIG.format(held_out="null").replace("kind: csv, train: train.csv", "kind: pandas")
    config.write_text(text.replace("run: {name: r}", ""))
    written = Config.from_yaml(config, [f"run.dir={tmp_path}", "run.name=f"])
    trainer = Trainer(written, train=rows(1, 400), eval=rows(2, 300))
    trainer.fit()
    folder = trainer.folder
    start = ["predict", "--checkpoint", str(folder), "--input", "unlabelled.csv", "--out", str(tmp_path / "s.parquet")]
    refused = call(trained, *start, expect=2)
    assert "--kind: the run trained on kind pandas, which reads no files" in refused.stderr
    call(trained, *start, "--kind", "csv")
    found, expected = pd.read_parquet(tmp_path / "s.parquet"), pd.read_parquet(folder / "scores.parquet")
    assert found["logit"].to_numpy() == pytest.approx(expected["logit"].to_numpy(), abs=1e-6)


def test_the_writer_keeps_no_half_file(tmp_path: Path) -> None:
    first, other = pa.table({"user": pa.array([1, 2])}), pa.table({"user": pa.array(["a"])})
    with pytest.raises(UserError, match="--keep: a column is of another type in a later file"):
        _write(tmp_path / "s.parquet", first[:0], iter([first, other]))
    assert not list(tmp_path.iterdir())


def test_a_real_log_without_labels(checkout: Path, real_data: Path, tmp_path: Path) -> None:
    """Criteo's own layout loses its first field where there is no label."""
    folder = real_data / "criteo_first8k"
    small = ["embedding.backend=torch", "train.threads=1", "train.steps=5", "eval.scores=true", "run.name=r"]
    files = [f"data.train={folder / 'train.csv'}", f"data.eval={folder / 'dev.csv'}"]
    call(tmp_path, "train", "--config", "ctr_criteo.yaml", *files, *small)
    lines = (folder / "dev.csv").read_text().splitlines()
    (tmp_path / "test.tsv").write_text("".join(line.partition("\t")[2] + "\n" for line in lines))
    start = ["predict", "--checkpoint", "runs/r", "--input", "test.tsv", "--out", "s.parquet"]
    refused = call(tmp_path, *start, expect=2)
    assert "if these rows have no label, set data.params.has_label: false" in refused.stderr
    call(tmp_path, *start, "--param", "has_label=false", "--keep", "C1")
    found, expected = (
        pd.read_parquet(tmp_path / "s.parquet"),
        pd.read_parquet(tmp_path / "runs" / "r" / "scores.parquet"),
    )
    assert len(found) == 409
    assert found["prediction"].to_numpy() == pytest.approx(expected["prediction"].to_numpy(), abs=1e-6)
    assert found["C1"].tolist() == [line.split("\t")[14] for line in lines]
