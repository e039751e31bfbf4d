"""``erase-rec export``: what it writes, what it compares it with, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import export_cases
import pytest
import torch
from in_process import call

from erase_rec.api.predictor import Predictor
from erase_rec.cli import exporter
from erase_rec.cli.export_folder import ExportFolder
from erase_rec.cli.export_inputs import ModelInputs
from erase_rec.cli.export_programs import load_program, save_program, trace
from erase_rec.cli.export_rows import generated, rows_to_check
from erase_rec.config.schema import Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run ``runs/r``."""
    folder = tmp_path_factory.mktemp("export")
    export_cases.train(folder)
    return folder


def manifest_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


def test_an_export_gives_the_predictions_of_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    result = call(folder, "export", "--checkpoint", "runs/r", "--out", str(out), "--onnx")
    rows = "300 held-out and 700 generated rows"
    assert f"model.pt2: {rows}, largest difference of probabilities " in result.stdout
    assert f"model.onnx: {rows}, largest difference of probabilities " in result.stdout
    assert f"export: {out}\nserve it: python " in result.stdout
    assert result.stdout.endswith(f"/serve.py {out}\n")
    manifest = manifest_of(out)
    assert [check["program"] for check in manifest["checks"]] == ["model.pt2", "model.onnx"]
    for check in manifest["checks"]:
        assert check["rows"] == 1000
        assert check["of"] == rows
        assert check["max_abs_difference"] <= check["tolerance"] == 1e-6
    assert manifest["origin"]["checkpoint"].startswith("r/step_")
    assert {file["name"] for file in manifest["files"]} | {"manifest.json"} == {file.name for file in out.iterdir()}

    export = ExportFolder.open(out)
    blocks, _ = rows_to_check(Predictor.load(folder / "runs/r").config, export.features, 300)
    (found, _) = load_program(out / "model.pt2")(ModelInputs.of(blocks[0]))
    held_out = export_cases.rows(2, 300)
    expected = Predictor.load(folder / "runs" / "r", device="cpu").predict(held_out)["prediction"]
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert expected.std() > 0.001, "equal because the model knows nothing"


def test_an_occupied_folder_needs_force(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    start = ["export", "--checkpoint", "runs/r", "--out", str(out)]
    out.mkdir()  # an empty one is none
    call(folder, *start)
    before = manifest_of(out)
    refused = call(folder, *start, expect=2)
    assert refused.stderr == f"error: --out: {out} holds an export; name another folder, or replace it with --force"
    (out / "left over").touch()
    call(folder, *start, "--force")
    assert not (out / "left over").exists()
    assert manifest_of(out)["checks"] == before["checks"]
    assert [path.name for path in tmp_path.iterdir()] == ["served"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    refused = call(folder, *start[:-1], str(other), "--force", expect=2)
    assert "is there and is no export; name another folder" in refused.stderr
    assert (other / "thesis.tex").exists()
    (other / "manifest.json").write_text('{"format": "erase-rec prepared"}')  # prepared rows have one, too
    refused = call(folder, *start[:-1], str(other), "--force", expect=2)
    assert "is there and is no export; name another folder" in refused.stderr
    assert (other / "thesis.tex").exists()
    link = tmp_path / "link"
    link.symlink_to("served")
    (out / "left over").touch()
    call(folder, *start[:-1], str(link), "--force")
    assert not (out / "left over").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"served", "other", "link"}


def test_other_probabilities_are_not_published(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older export stays as it is."""
    out = tmp_path / "served"
    start = ["export", "--checkpoint", "runs/r", "--out", str(out)]
    monkeypatch.setattr(exporter, "trace", lambda *arguments: None)
    monkeypatch.setattr(exporter, "save_program", lambda program, path: path.write_bytes(b"new"))
    shift = [0.0]

    def loaded(path: Path) -> Any:
        predictor = Predictor.load(folder / "runs" / "r", device="cpu")
        blocks, _ = rows_to_check(predictor.config, predictor.features, exporter.CHECKED_ROWS)
        original = load_program_of(folder, tmp_path)

        def score(inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor]:
            probability, logit = original(inputs)
            # The last row of the last batch is off.
            last = len(probability) == blocks[-1].num_rows - sum(exporter._FIRST_BATCHES)
            return probability + shift[0] * last * (torch.arange(len(probability)) == len(probability) - 1), logit

        return score

    monkeypatch.setattr(exporter, "load_program", loaded)
    call(folder, *start)
    before = manifest_of(out)
    for shift[0], message in ((3e-6, "by up to 3."), (float("nan"), "by up to inf")):
        refused = call(folder, *start, "--force", expect=2)
        assert "error: export: the probabilities of model.pt2 differ from the trainer's" in refused.stderr
        assert message in refused.stderr
        assert refused.stderr.endswith("nothing was exported")
        assert manifest_of(out) == before
        assert not list(tmp_path.glob(".*"))


def load_program_of(folder: Path, tmp_path: Path) -> Any:
    """The real program of the run, exported once."""
    path = tmp_path / "real.pt2"
    if not path.exists():
        predictor = Predictor.load(folder / "runs" / "r", device="cpu")
        example = ModelInputs.of(generated(predictor.features, 16, seed=1))
        save_program(trace(predictor.model, predictor.config.features, example), path)
    return load_program(path)


def with_data(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def test_rows_are_made_up_where_those_of_the_run_are_gone(folder: Path) -> None:
    predictor = Predictor.load(folder / "runs" / "r", device="cpu")
    gone = with_data(predictor.config, eval=("gone.parquet",))
    blocks, of = rows_to_check(gone, predictor.features, 50)
    assert of == "50 generated rows (the run's cannot be read: file 'gone.parquet' not found)"
    assert [block.num_rows for block in blocks] == [50]
    _, of = rows_to_check(with_data(predictor.config, eval=()), predictor.features, 50)
    assert of == "50 training rows"


def test_rows_of_a_prepared_folder(folder: Path, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    call(folder, "prepare", "--config", "small.yaml", "--out", str(prepared), "--workers", "1")
    predictor = Predictor.load(folder / "runs" / "r", device="cpu")
    blocks, of = rows_to_check(with_data(predictor.config, prepared=str(prepared)), predictor.features, 120)
    assert of == "120 held-out rows"
    read, _ = rows_to_check(predictor.config, predictor.features, 120)
    for found, expected in zip(ModelInputs.of(blocks[0]).flat(), ModelInputs.of(read[0]).flat(), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "runs", "--out", "x"], "neither a run folder nor a checkpoint"),
        (["--checkpoint", "runs/r", "--out", "small.yaml"], "--out: small.yaml is there and is no export"),
        (["--checkpoint", "runs/r", "--out", "."], "--out: found '.', expected the name of a new folder"),
        (["--checkpoint", "runs/r", "--out", "x" * 300], "cannot be looked at: File name too long"),
        (["--checkpoint", "runs/r", "--out", "small.yaml/x"], "--out: cannot write small.yaml/x: Not a directory"),
    ],
)
def test_mistakes_are_one_message(folder: Path, arguments: list[str], message: str) -> None:
    assert message in call(folder, "export", *arguments, expect=2).stderr
