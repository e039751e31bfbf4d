"""DataFrames as sources: every dtype keeps its values, and training from a frame is training from its file."""

from __future__ import annotations

import datetime
import decimal
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from source_cases import blocks_of, rows_of

from data.bad_rows import BadRows
from data.dataset import build_datasets
from data.errors import DataError
from data.frames import FrameSource, from_pandas
from data.loader import Loader
from data.registry import open_source
from data.sources.source import MAX_CHUNK_ROWS
from erase_rec.config.schema import Config

DAY = datetime.date(2024, 2, 29)
SERIES: dict[str, tuple[pd.Series, pa.DataType, list[Any]]] = {
    "ints": (pd.Series([1, 2]), pa.int64(), [1, 2]),
    "big": (pd.Series([2**64 - 1, 0], dtype="uint64"), pa.uint64(), [2**64 - 1, 0]),
    "floats": (pd.Series([1.5, np.nan]), pa.float64(), [1.5, None]),
    "nullable": (pd.Series([1, None], dtype="Int64"), pa.int64(), [1, None]),
    "nullable flags": (pd.Series([True, None], dtype="boolean"), pa.bool_(), [True, None]),
    "texts": (pd.Series(["a", None]), pa.large_string(), ["a", None]),
    "texts as objects": (pd.Series(["a", np.nan], dtype=object), pa.string(), ["a", None]),
    "arrow": (pd.Series(["a", None], dtype=pd.ArrowDtype(pa.string())), pa.string(), ["a", None]),
    "categories": (
        pd.Series(["a", None], dtype=pd.CategoricalDtype(["b", "a"])),
        pa.dictionary(pa.int8(), pa.large_string()),
        ["a", None],
    ),
    "lists": (pd.Series([["a", "b"], None]), pa.list_(pa.string()), [["a", "b"], None]),
    "arrays": (pd.Series([np.array([1, 2]), []]), pa.list_(pa.int64()), [[1, 2], []]),
    "ints as objects": (pd.Series([7, None], dtype=object), pa.int64(), [7, None]),
    "decimals": (pd.Series([decimal.Decimal("1.50"), None]), pa.decimal128(3, 2), [decimal.Decimal("1.50"), None]),
    "days": (pd.Series([DAY, None]), pa.date32(), [DAY, None]),
    "all missing": (pd.Series([None, None], dtype=object), pa.null(), [None, None]),
}


@pytest.mark.parametrize("name", SERIES)
def test_values_and_types_survive(name: str) -> None:
    series, kind, values = SERIES[name]
    frame = pd.DataFrame({"other": [0, 0], name: series})
    (block,) = blocks_of(FrameSource(frame), [name])
    assert block.columns[name].to_pylist() == values
    assert block.columns[name].type == kind
    assert block.columns.column_names == [name]


@pytest.mark.parametrize("values", [[1, "a"], ["a", 1], [True, 1], [[1], 2], [["a"], [1]], [object(), object()]])
def test_a_column_of_several_types_is_refused_by_name_where_it_is_wanted(values: list[Any]) -> None:
    source = FrameSource(pd.DataFrame({"good": [1, 2], "odd": pd.Series(values, dtype=object)}))
    with pytest.raises(DataError, match=r"DataFrame: column 'odd' holds .*convert it to one type") as error:
        list(blocks_of(source, ["odd"]))
    assert "\n" not in str(error.value)
    assert rows_of(source, ["good"]) == [{"good": 1}, {"good": 2}]
    assert len(source.fingerprint()) == 64


def test_the_index_is_ignored_and_names_are_text() -> None:
    frame = pd.DataFrame({101: [1, 2], "x": [3, 4]}, index=["b", "a"])
    source = FrameSource(frame)
    assert source.columns() == ["101", "x"]
    (block,) = blocks_of(source, ["x", "101"])
    assert block.columns.to_pylist() == [{"x": 3, "101": 1}, {"x": 4, "101": 2}]
    assert block.place(1) == "DataFrame row 2"
    assert source.fingerprint() == FrameSource(frame.reset_index(drop=True)).fingerprint()


def test_missing_and_repeated_columns_are_named() -> None:
    source = FrameSource(pd.DataFrame([[1, 2, 3]], columns=["click", "a", "a"]))
    with pytest.raises(DataError, match=r"column 'clik' not found; did you mean 'click'.*found 3: 'click', 'a', 'a'$"):
        list(blocks_of(source, ["clik"]))
    with pytest.raises(DataError, match=r"\(12 columns are missing: 'm0', .*'m9', \.\.\.\)"):
        list(blocks_of(source, [f"m{number}" for number in range(12)]))
    with pytest.raises(DataError, match="2 columns are called 'a'"):
        list(blocks_of(source, ["a"]))


def test_chunks_are_bounded_numbered_and_read_by_any_thread() -> None:
    frame = pd.DataFrame({"n": range(1, 2 * MAX_CHUNK_ROWS + 4), "t": "x"})
    source = FrameSource(frame)
    chunks = list(source.chunks())
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda chunk: list(chunk.blocks(["n", "t"], BadRows())), chunks))
    blocks = [block for part in parts for block in part]
    assert [block.num_rows for block in blocks] == [MAX_CHUNK_ROWS, MAX_CHUNK_ROWS, 3]
    for block in blocks:
        assert block.columns["n"].to_numpy().tolist() == block.numbers.tolist()
    assert sum(chunk.num_bytes for chunk in chunks) == source.num_bytes()


def test_frames_without_rows_are_for_evaluation_only() -> None:
    empty = pd.DataFrame({"a": pd.Series([], dtype="int64")})
    assert list(FrameSource(empty, split="eval").chunks()) == []
    with pytest.raises(DataError, match="no rows to train on"):
        list(FrameSource(empty).chunks())


def test_the_fingerprint_is_names_types_and_values() -> None:
    def make(**changes: Any) -> FrameSource:
        columns = {name: series for name, (series, _, _) in SERIES.items()}
        return FrameSource(pd.DataFrame({**columns, **changes}))

    masked = pd.Series(pd.arrays.IntegerArray(np.array([1, 99]), np.array([False, True])))
    assert make().fingerprint() == make().fingerprint() == make(nullable=masked).fingerprint()
    others = [
        make(ints=pd.Series([1, 3])),
        make(ints=pd.Series([1, 2], dtype="int32")),
        make(floats=pd.Series([np.nan, 1.5])),
        make(lists=pd.Series([["a"], ["b"]])),
        make(texts=pd.Series(["a", ""])),
        make(more=pd.Series([1, 2])),
    ]
    assert len({source.fingerprint() for source in [make(), *others]}) == len(others) + 1


def test_chunks_can_be_pickled() -> None:
    (chunk,) = FrameSource(pd.DataFrame({"n": [1, 2]})).chunks()
    (block,) = pickle.loads(pickle.dumps(chunk)).blocks(["n"], BadRows())
    assert block.columns["n"].to_pylist() == [1, 2]


def make_config(**data: Any) -> Config:
    sparse = [
        {"name": "user", "encoding": "vocabulary"},
        {"name": "tags", "encoding": "hash", "num_embeddings": 50, "multi_valued": "true"},
    ]
    return Config.model_validate(
        {
            "data": {"kind": "pandas", "label": {"column": "click"}, **data},
            "features": {"dense": [{"name": "age", "transform": "standardize"}], "sparse": sparse},
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": 32},
        }
    )


def make_frame(rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "click": rng.integers(2, size=rows),
            "user": pd.Categorical.from_codes(rng.integers(-1, 5, size=rows), list("abcde")),
            "tags": [list(rng.choice(list("xyz"), size=rng.integers(4))) for _ in range(rows)],
            "age": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
        }
    )


def batches_of(loader: Loader | None) -> list[list[list[float]]]:
    assert loader is not None
    found = []
    for batch in loader.batches(0):
        parts = (batch.dense, batch.sparse.values, batch.sparse.lengths, batch.label, batch.row_ids)
        found.append([part.flatten().tolist() for part in parts])
    return found


@pytest.mark.parametrize("reading", ["memory", "stream"])
def test_a_frame_trains_as_its_parquet_file(reading: str, tmp_path: Path) -> None:
    train, held_out = make_frame(300, 1), make_frame(70, 2)
    for name, frame in (("train", train), ("eval", held_out)):
        frame.to_parquet(tmp_path / name)
    files = {"kind": "parquet", "train": str(tmp_path / "train"), "eval": str(tmp_path / "eval")}
    from_files = build_datasets(make_config(reading=reading, **files))
    from_frames = from_pandas(make_config(reading=reading), train, held_out)
    assert batches_of(from_frames.train) == batches_of(from_files.train)
    assert batches_of(from_frames.eval) == batches_of(from_files.eval)
    assert from_frames.table_rows == from_files.table_rows
    again = from_pandas(make_config(reading=reading), train.copy(), held_out.copy())
    assert again.fingerprint == from_frames.fingerprint


def test_rows_are_held_out_of_a_frame(tmp_path: Path) -> None:
    datasets = from_pandas(make_config(eval_fraction=0.2), make_frame(300, 1))
    assert datasets.eval is not None
    assert 30 < datasets.eval.num_rows < 90
    assert datasets.train.num_rows + datasets.eval.num_rows == 300
    ranks = [from_pandas(make_config(), make_frame(300, 1), rank=rank, world_size=2).train for rank in (0, 1)]
    rows = [row for loader in ranks for batch in loader.batches(0) for row in batch.row_ids.tolist()]
    assert len(set(rows)) == len(rows) == 300


def test_a_configuration_that_names_other_rows_is_refused() -> None:
    frame = make_frame(10, 1)
    with pytest.raises(DataError, match=r"data\.kind: found csv, expected pandas"):
        from_pandas(make_config(kind="csv"), frame)
    for key in ("train", "eval", "prepared"):
        with pytest.raises(DataError, match=rf"data\.{key}: names 'there'"):
            from_pandas(make_config(**{key: "there"}), frame)
    with pytest.raises(DataError, match="give one of them"):
        from_pandas(make_config(eval_fraction=0.5), frame, frame)
    with pytest.raises(DataError, match=r"data\.kind: pandas takes its rows from DataFrames.*Trainer"):
        open_source("pandas", [])
    with pytest.raises(DataError, match="eval DataFrame: found dict, expected a pandas DataFrame"):
        FrameSource({"clicked": [1]}, split="eval")  # type: ignore[arg-type]
