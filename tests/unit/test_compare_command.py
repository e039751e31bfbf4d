"""``erase-rec compare`` on run folders with planted scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq
from typer.testing import CliRunner

from erase_rec.api.assembly import ContentCatalog
from erase_rec.cli.compare import command
from erase_rec.config.load import dump_config, load_config
from erase_rec.errors import UserError

ROWS = 4000


def make_run(folder: Path, seed: int, overrides: list[str], stretch: float = 1.0, rows: int = ROWS) -> Path:
    """A run folder whose model sees the truth through noise, stretched: only ``stretch`` makes it worse."""
    config = load_config("ctr_erase.yaml", [f"seed={seed}", *overrides], catalog=ContentCatalog()).config
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    rng = np.random.default_rng(11)
    truth = rng.standard_normal(rows)
    label = rng.random(rows) < 1 / (1 + np.exp(-truth))
    logit = stretch * (truth + 0.1 * np.random.default_rng([seed, int(100 * stretch)]).standard_normal(rows))
    columns = {"row_id": np.arange(rows)[::-1], "label": label.astype(np.int8), "logit": logit.astype(np.float32)}
    pq.write_table(pa.table(columns | {"tower_cross": columns["logit"]}), folder / "scores.parquet")
    return folder


def compare(runs: list[Path], reference: list[Path], *more: str) -> str:
    import typer

    app = typer.Typer()
    app.command()(command)
    given = [str(run) for run in runs] + [part for run in reference for part in ("--reference", str(run))]
    result = CliRunner().invoke(app, [*given, *more])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_arms_are_named_by_what_sets_them_apart_and_judged(tmp_path: Path) -> None:
    reference = [make_run(tmp_path / f"r{seed}", seed, []) for seed in (1, 2, 3)]
    worse = [make_run(tmp_path / f"w{seed}", seed, ["optimizer.dense.lr=0.5"], 1.5) for seed in (1, 2, 3)]
    equal = [make_run(tmp_path / f"e{seed}", seed, ["optimizer.dense.lr=0.25"], 1.0001) for seed in (1, 2, 3)]
    out, plot = tmp_path / "out.json", tmp_path / "gaps.png"
    shown = compare([*worse, *equal], reference, "--out", str(out), "--plot", str(plot))
    assert "worse" in shown
    assert "inside the noise" in shown
    record = json.loads(out.read_text())
    assert set(record["gaps_pct"]) == {"optimizer.dense.lr=0.5", "optimizer.dense.lr=0.25"}
    gap = record["gaps_pct"]["optimizer.dense.lr=0.5"]
    assert gap["seeds"] == [1, 2, 3]
    assert gap["total"]["low"] > 0
    assert record["arms"]["optimizer.dense.lr=0.5"]["ne"]["mid"] > record["arms"]["reference"]["ne"]["mid"]
    assert record["runs"]["reference"] == [str(run) for run in reference]
    assert plot.stat().st_size > 1000


def test_one_seed_gets_no_verdict(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    reference, run = make_run(tmp_path / "r", 1, []), make_run(tmp_path / "w", 1, ["optimizer.dense.lr=0.5"], 1.5)
    assert "no verdict" in compare([run], [reference], "--out", str(out))
    (gap,) = json.loads(out.read_text())["gaps_pct"].values()
    assert gap["over_seeds"]["low"] is None


def test_seeds_on_one_side_are_left_out_aloud(tmp_path: Path) -> None:
    reference = [make_run(tmp_path / f"r{seed}", seed, []) for seed in (1, 2)]
    runs = [make_run(tmp_path / f"w{seed}", seed, ["optimizer.dense.lr=0.5"]) for seed in (1, 2, 3)]
    assert "seed 3 is on one side only" in compare(runs, reference)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("no scores", "eval.scores=true"),
        ("broken scores", "not readable"),
        ("other rows", "not scored on the same held-out rows"),
        ("no shared seed", "no seed is shared"),
        ("twice", "one arm and one seed"),
        ("two references", "several arms"),
        ("no run", "is not a run folder"),
        ("one class", "both classes"),
        ("nowhere", "cannot write the comparison"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, mistake: str, message: str) -> None:
    references = [make_run(tmp_path / "r", 1, [])]
    run = make_run(tmp_path / "w", 2 if mistake == "no shared seed" else 1, ["optimizer.dense.lr=0.5"])
    runs, more = [run], []
    match mistake:
        case "no scores":
            (run / "scores.parquet").unlink()
        case "broken scores":
            (run / "scores.parquet").write_bytes(b"PAR1 and then nothing")
        case "other rows":
            runs = [make_run(tmp_path / "o", 1, ["optimizer.dense.lr=0.5"], rows=ROWS - 1)]
        case "twice":
            runs = [run, make_run(tmp_path / "again", 1, ["optimizer.dense.lr=0.5"])]
        case "two references":
            references.append(make_run(tmp_path / "r2", 2, ["optimizer.dense.lr=0.5"]))
        case "no run":
            runs = [tmp_path]
        case "one class":
            table = pq.read_table(run / "scores.parquet")
            zeros = pa.array(np.zeros(ROWS, dtype=np.int8))
            pq.write_table(table.set_column(1, "label", zeros), run / "scores.parquet")
        case "nowhere":
            more = ["--out", str(tmp_path / "none" / "out.json")]
    with pytest.raises(UserError, match=message):
        compare(runs, references, *more)
