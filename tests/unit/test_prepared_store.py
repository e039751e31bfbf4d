"""Prepared folders: read block by block, refused where settings differ, verified; what an inspection says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prepared_cases import run
from pyarrow import parquet as pq

from data.digests import digest_of_json
from data.errors import DataError
from data.inspection import BINS, STATE_FLOATS, inspect
from data.inspection_page import write_page
from data.inspection_tables import remarks_of, tables_of
from data.prepared import store as store_module
from data.prepared.manifest import Manifest
from data.prepared.store import PreparedStore, damaged, open_prepared
from data.sources import text_file
from erase_rec.config.schema import Config, SparseOptimizerConfig
from models.embeddings.layout import STATE_NAMES

ROWS = 3000
DATA: dict[str, Any] = {
    "kind": "csv",
    "label": {"column": "label"},
    "split": {"by": "time", "column": "at", "since": "2024-01-01T06:00:00"},
    "bad_rows": "skip",
    "row_id": "id",
}
FEATURES: dict[str, Any] = {
    "dense": ["x"],
    "sparse": [
        {"name": "c", "encoding": "vocabulary"},
        {"name": "h", "column": "c", "num_embeddings": 100, "embedding_dim": 4},
        {"name": "<$id$>", "column": "n", "encoding": "id", "num_embeddings": 5},
    ],
}


def config_of(data: dict[str, Any] | None = None, features: dict[str, Any] | None = None, seed: int = 1) -> Config:
    return Config.model_validate(
        {
            "seed": seed,
            "data": DATA | (data or {}),
            "features": FEATURES | (features or {}),
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1},
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third row is a click until 06:00, every second one later; one value in c is new then; two bad rows."""
    folder = tmp_path_factory.mktemp("prepared")
    lines = ["label,x,c,n,at,id"]
    for row in range(ROWS):
        late = row >= ROWS // 2
        value = "" if row % 4 == 0 else "new" if late and row % 4 == 1 else f"c{row % 7}"
        minutes = row * 720 // ROWS
        at = f"2024-01-01 {minutes // 60:02d}:{minutes % 60:02d}:00"
        lines.append(f"{int(row % (2 if late else 3) == 0)},{row % 10},{value},{row % 5},{at},r{row}")
    lines[6] = lines[6].replace(",at", "").rsplit(",", 1)[0]  # a field too few
    lines[7] = lines[7].replace("2024", "soon")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "CHUNK_BYTES", 6 << 10)
        patch.setattr(text_file, "READ_BYTES", 2 << 10)
        run(config_of({"train": str(folder / "log.csv")}), folder / "out")
    return folder / "out"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "out"))


def test_it_opens_without_paths(prepared: Path) -> None:
    found = open_prepared(prepared, config_of())
    assert found.train.block_rows.sum() == ROWS // 2 - 2
    assert found.eval is not None
    assert found.eval.block_rows.sum() == ROWS // 2
    assert found.eval.num_positive == ROWS // 4
    assert found.bad_rows == 2
    assert (found.cells == ROWS - 2).all()
    assert found.missing.tolist()[0] == 0
    assert found.unseen.tolist()[0] == ROWS // 8
    blocks = [found.train.read(block) for block in range(len(found.train.block_rows))]
    assert len(blocks) > 5
    numbers = np.concatenate([block.rows.numbers for block in blocks])
    assert numbers.tolist() == [line for line in range(2, ROWS // 2 + 2) if line not in (7, 8)]
    assert blocks[-1].rows.place(0) == f"{found.manifest.files[0]}:{blocks[-1].rows.numbers[0]}"


def test_parts_are_closed_again(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has few file descriptors; arrays stay valid."""
    monkeypatch.setattr(store_module, "OPEN_PARTS", 1)
    store = PreparedStore(prepared, Manifest.read(prepared), "train")
    assert len(Manifest.read(prepared).splits["train"].parts) > 1
    first = store.read(0)
    kept = first.dense[0].copy()
    rows = sum(store.read(block).num_rows for _ in range(2) for block in range(len(store.block_rows)))
    assert rows == 2 * store.block_rows.sum()
    np.testing.assert_array_equal(first.dense[0], kept)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of({"kind": "avazu"}), "data.kind: 'avazu' here, but .* was prepared with 'csv'"),
        (config_of({"params": {"delimiter": ";"}}), "data.params.delimiter: ';' here"),
        (config_of({"label": {"column": "click"}}), "data.label.column: 'click' here"),
        (config_of({"split": {"by": "time", "column": "at", "since": "2025-01-01"}}), "data.split.since: '2025-01-01'"),
        (config_of({"split": {"by": "row"}}), "data.split: null here"),
        (config_of({"split": {"by": "row"}, "eval_fraction": 0.1}), r"data\.split\.by: 'row' here"),
        (config_of({"bad_rows": "error"}), "data.bad_rows: 'error' here, but .* was prepared with 'left out'"),
        (config_of({"row_id": "key"}), "data.row_id: 'key' here"),
        (config_of(features={"dense": []}), r"features\.dense: 0 entries \(\) here, .* with 1 entries \(x\)"),
        (
            config_of(features={"dense": [{"name": "x", "transform": "none"}]}),
            r"features\.dense\.0\.transform: 'none' here, but .* was prepared with 'log'",
        ),
    ],
)
def test_other_settings_are_refused_by_key(prepared: Path, config: Config, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_prepared(prepared, config)


@pytest.mark.parametrize(
    "config",
    [
        config_of({"row_id": None}),
        config_of({"bad_rows": "quarantine"}),
        config_of({"train": "gone.csv"}),
        config_of(seed=2),
    ],
)
def test_what_decides_nothing_may_differ(prepared: Path, config: Config) -> None:
    assert open_prepared(prepared, config).fingerprint == Manifest.read(prepared).fingerprint


def test_files_for_evaluation_cannot_be_added(copy: Path) -> None:
    manifest = Manifest.read(copy)
    manifest.settings["data"]["split"] = None
    manifest.write(copy)
    with pytest.raises(DataError, match=r"data\.eval: names files, but .* was prepared without"):
        open_prepared(copy, config_of({"eval": "other.csv", "split": {"by": "row"}}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train/part-00001.arrow", "features/encodings.arrow"])
@pytest.mark.parametrize(("change", "words"), [(cut, "bytes, the manifest says"), (Path.unlink, "No such file")])
def test_a_missing_or_cut_file_is_named(copy: Path, name: str, change: Callable[[Path], None], words: str) -> None:
    change(copy / name)
    with pytest.raises(DataError, match=f"{name}: .*{words}.*prepare the data again"):
        open_prepared(copy, config_of())
    assert [file.name for file in damaged(copy, Manifest.read(copy))] == [name]


def test_a_changed_byte_is_found_by_the_checksum(copy: Path) -> None:
    assert not list(damaged(copy, Manifest.read(copy)))
    flip(copy / "eval" / "part-00001.arrow")
    assert [file.name for file in damaged(copy, Manifest.read(copy))] == ["eval/part-00001.arrow"]


def test_a_part_that_cannot_be_read_is_named(copy: Path) -> None:
    path = copy / "train" / "part-00000.arrow"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"part-00000\.arrow: not readable .* inspect .* --verify"):
        open_prepared(copy, config_of()).train.read(0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not readable"),
        ("[]", "format is None"),
        ('{"format": "parquet"}', "not the manifest of a prepared folder: format is 'parquet'"),
        ('{"format": "erase-rec prepared", "version": 9}', "version 9 of the format, this program reads 2"),
        ('{"format": "erase-rec prepared", "version": 2}', "was changed after it was written"),
    ],
)
def test_another_manifest_is_refused(copy: Path, content: str, words: str) -> None:
    (copy / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=words):
        Manifest.read(copy)


def test_a_changed_manifest_is_refused(copy: Path) -> None:
    """Else rows would be lost or doubled without a word: a part's file does not tell that a block is missing."""
    path = copy / "manifest.json"
    plain = json.loads(path.read_text())
    plain["splits"]["train"]["parts"][0]["blocks"]["rows"].pop()
    path.write_text(json.dumps(plain))
    with pytest.raises(DataError, match=r"manifest\.json: was changed after it was written .*; prepare the data again"):
        open_prepared(copy, config_of())


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json, so it is not a prepared folder"):
        Manifest.read(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*erase-rec prepare --out"):
        Manifest.read(tmp_path / "gone")
    (tmp_path / "log.csv").write_text("click\n1\n")
    with pytest.raises(DataError, match=r"log\.csv is a file, not a folder .*erase-rec init"):
        Manifest.read(tmp_path / "log.csv")


def test_the_page_of_a_manifest_is_whole(prepared: Path) -> None:
    manifest = Manifest.read(prepared)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_an_inspection_says_what_there_is(prepared: Path) -> None:
    found = inspect(prepared, dim=8)
    x, c, h, ids = found.features
    assert (x.missing_share, x.unseen_share, x.table) == (0, None, None)
    assert c.missing_share == pytest.approx(0.25, abs=0.001)
    assert c.unseen_share == pytest.approx(0.25)
    assert c.record.known == 7
    assert c.table is not None
    assert (c.table.rows, c.table.dim, c.table.weight_bytes) == (9, 8, 4 * 9 * 8)
    assert h.table is not None
    assert (h.table.rows, h.table.dim) == (102, 4)
    assert h.record.known == 7
    assert ids.record.known is None
    assert h.table.state_bytes == {
        "rowwise_adagrad": 4 * 102,
        "adagrad": 4 * 102 * 4,
        "adam": 2 * 4 * 102 * 4,
        "sgd": 0,
    }
    assert found.table_bytes()["sgd"] == 4 * (9 * 8 + 102 * 4 + 7 * 8)
    assert found.over == "time"
    assert {split: len(bins) for split, bins in found.rates.items()} == {"train": BINS, "eval": BINS}
    assert found.rates["train"][0].name == "from 2024-01-01 00:00:00"
    assert [each.rows for each in found.rates["train"]][BINS // 2 :] == [0] * (BINS // 2)
    assert [each.rate for each in found.rates["eval"]][BINS // 2 :] == pytest.approx([0.5] * (BINS // 2), abs=0.01)
    assert [each.rate for each in found.rates["train"]][: BINS // 2] == pytest.approx([1 / 3] * (BINS // 2), abs=0.01)
    assert json.loads(json.dumps(found.as_json()))["features"][1]["unseen_share"] == c.unseen_share


def test_label_rates_in_file_order(prepared: Path, tmp_path: Path) -> None:
    """Bins of equally many rows, over the edges of blocks."""
    config = config_of({"train": str(prepared.parent / "log.csv"), "split": {"by": "row"}, "row_id": None})
    run(config, tmp_path / "out")
    found = inspect(tmp_path / "out", dim=8)
    bins = found.rates["train"]
    assert found.over == "rows in file order"
    assert sum(each.rows for each in bins) == ROWS - 1, "without a time that splits them, one row is bad"
    assert max(each.rows for each in bins) - min(each.rows for each in bins) <= 1
    assert bins[0].name == "1 to 299"
    store = PreparedStore(tmp_path / "out", found.manifest, "train")
    label = np.concatenate([store.read(block).label for block in range(len(store.block_rows))])
    ends = np.cumsum([each.rows for each in bins])
    assert [each.positives for each in bins] == [int(part.sum()) for part in np.split(label, ends[:-1])]


def test_label_rates_past_the_year_9999(tmp_path: Path) -> None:
    """As of a column of milliseconds that calls itself one of seconds."""
    times = pa.array([1_577_836_800, 1_700_000_000_000], pa.timestamp("s"))
    pq.write_table(pa.table({"label": [0, 1], "c": ["a", "b"], "at": times}), tmp_path / "log.parquet")
    split = {"by": "time", "column": "at", "since": "2020-06-01"}
    data = {"kind": "parquet", "train": str(tmp_path / "log.parquet"), "split": split, "row_id": None}
    features = {"dense": [], "sparse": [{"name": "c", "num_embeddings": 5}]}
    run(config_of(data, features), tmp_path / "out")
    bins = inspect(tmp_path / "out", dim=8).rates["eval"]
    assert bins[0].name == "from 2020-01-01 00:00:00"
    assert bins[-1].name.startswith("from 50458-")
    assert bins[-1].rows == 1


def test_optimizer_state_is_that_of_the_tables() -> None:
    """A name in the model's list is a tensor [rows], or [rows, dim]."""
    assert STATE_FLOATS.keys() == STATE_NAMES.keys()
    for kind, (each, of_dim) in STATE_FLOATS.items():
        SparseOptimizerConfig.model_validate({"kind": kind})
        assert each + of_dim == len(STATE_NAMES[kind])
        assert (each == 1) == (kind == "rowwise_adagrad")


def test_the_page_stands_alone(prepared: Path, tmp_path: Path) -> None:
    found = inspect(prepared, dim=8)
    write_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img alt=") == page.count("data:image/png;base64,") == 4
    assert "http" not in page.lower()
    assert "&lt;$id$&gt;" in page
    assert "<$id$>" not in page
    for table in tables_of(found):
        assert table.title in page
    assert any("none is on both sides" in line for line in remarks_of(found))
    assert "bad rows (skip): 2 of 3,000" in page
    with pytest.raises(DataError, match="--html: cannot write"):
        write_page(found, tmp_path / "no" / "page.html")


@pytest.mark.parametrize("where", [0.2, 0.4, 0.6, 0.8])
def test_a_bit_that_flips_in_a_part_is_found_when_the_block_is_read(copy: Path, where: float) -> None:
    """Arrow's files have no checksums: it would be another category, and nobody would know."""
    path = copy / "train" / "part-00000.arrow"
    content = bytearray(path.read_bytes())
    at = int(len(content) * where)
    at = next(at for at in range(at, len(content)) if content[at] not in (0, 255))  # not padding
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00000\.arrow: not readable"):
        rows_of(prepared_store(copy))


def test_every_block_has_its_checksum(copy: Path) -> None:
    plain = json.loads((copy / "manifest.json").read_text())
    blocks = plain["splits"]["train"]["parts"][0]["blocks"]
    blocks["crc32"][0] ^= 1
    sign(copy, plain)
    store = prepared_store(copy)
    with pytest.raises(DataError, match=r"block 0 is not as it was written: its checksum differs\); look for other"):
        store.read(0)
    assert store.read(1).num_rows == blocks["rows"][1]


@pytest.mark.parametrize("name", ["../elsewhere.arrow", "/etc/passwd", "train/../../x", "a\0b", "", "."])
def test_a_manifest_names_no_file_outside_its_folder(copy: Path, name: str) -> None:
    plain = json.loads((copy / "manifest.json").read_text())
    plain["splits"]["train"]["parts"][0]["file"]["name"] = name
    sign(copy, plain)
    with pytest.raises(DataError, match="is not the name of a file inside the folder"):
        Manifest.read(copy)


def test_a_manifest_that_contradicts_itself_is_refused(copy: Path) -> None:
    plain = json.loads((copy / "manifest.json").read_text())
    del plain["splits"]["eval"]["unseen"]["c"]
    sign(copy, plain)
    with pytest.raises(DataError, match=r"the manifest contradicts itself \(KeyError\('c'\)\)"):
        open_prepared(copy, config_of())
    sign(copy, plain | {"rows_read": "many"})
    with pytest.raises(DataError, match=r"manifest\.json: rows_read: "):
        open_prepared(copy, config_of())
    (copy / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match="not readable"):
        open_prepared(copy, config_of())


@pytest.mark.parametrize("file", ["features.json", "encodings.arrow"])
def test_fitted_features_are_refused_where_they_were_changed(copy: Path, file: str) -> None:
    path = copy / "features" / file
    content = path.read_bytes()
    path.write_bytes(content.replace(b"c1", b"c9") if b"c1" in content else content.replace(b'"x"', b'"y"'))
    assert path.read_bytes() != content
    with pytest.raises(DataError, match=f"{file}: was changed after it was written"):
        open_prepared(copy, config_of())


def prepared_store(folder: Path) -> PreparedStore:
    return PreparedStore(folder, Manifest.read(folder), "train")


def rows_of(store: PreparedStore) -> list[list[Any]]:
    blocks = [store.read(number) for number in range(len(store.block_rows))]
    return [
        [array.tolist() for array in (*block.dense, *block.ids, block.label, block.rows.numbers)] for block in blocks
    ]


def sign(folder: Path, plain: dict[str, Any]) -> None:
    """Writes a changed manifest as its writer would have."""
    plain.pop("sha256", None)
    (folder / "manifest.json").write_text(json.dumps(plain | {"sha256": digest_of_json(plain)}))
