"""Fuzz targets: files of rows, and rows as features."""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fuzz_mutations import any_bytes
from fuzz_reference import OPEN_QUESTION, lines_of, row_of
from fuzz_target import Opened, Target

from data.bad_rows import BadRows
from data.dataset import build_datasets
from data.registry import open_source
from data.sources.source import Source
from erase_rec.config.schema import Config

CSV = 'label,x,"c ""d"""\n1,0.5,a\n0,,"b,c"\r\n1,-3e5,性别\n\n'.encode()
CRITEO = b"".join(
    b"\t".join([b"%d" % (row % 2), *(b"%d" % row for _ in range(13)), *(b"891589e%d" % row for _ in range(26))]) + b"\n"
    for row in range(4)
)
TOKENS = (
    b",",
    b"\t",
    b";",
    b'""',
    b'"a,b"',
    b"label",
    b"\r\n\r\n",
    b"1,2,3\n",
    b"a" * 50,
    b"\x1f\x8b",
    b"PAR1",
    b"PK\x03\x04",
)
LOG = b"label,x,s,v,h,i,m\n" + b"".join(
    b"%d,%d,%d.5,v%d,h%d,%d,a;b%d;\n" % (row % 2, row * row - 9, row, row % 3, row, row % 4, row % 2)
    for row in range(12)
)
FEATURES = {
    "dense": [{"name": "x", "transform": "log"}, {"name": "s", "transform": "standardize"}],
    "sparse": [
        {"name": "v", "encoding": "vocabulary", "min_count": 1},
        {"name": "h", "encoding": "hash", "num_embeddings": 7},
        {"name": "i", "encoding": "id", "num_embeddings": 4},
        {
            "name": "m",
            "encoding": "vocabulary",
            "min_count": 1,
            "multi_valued": True,
            "separator": ";",
            "max_length": 3,
        },
    ],
}
_PLAIN_NUMBER = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,6})?")


def _rows(source: Source, bad: BadRows) -> dict[int, list[Any]]:
    """Cells of each row by its line or row number."""
    columns = list(dict.fromkeys(source.columns()))
    found: dict[int, list[Any]] = {}
    for chunk in source.chunks():
        for block in chunk.blocks(columns, bad):
            cells = zip(*(column.to_pylist() for column in block.columns.columns), strict=True)
            for number, row in zip(block.numbers.tolist(), cells, strict=True):
                assert number not in found, f"row {number} comes twice"
                found[number] = list(row)
    return found


def _compare(content: bytes, kind: str, path: Path, params: dict[str, str]) -> None:
    source = open_source(kind, [str(path)], params=params, seed=1, split="eval")
    bad = BadRows("skip")
    found = _rows(source, bad)
    columns, unique = source.columns(), list(dict.fromkeys(source.columns()))
    wanted = [columns.index(name) for name in unique]
    delimiter, quote = (b"\t", None) if kind == "criteo" else (b",", b'"')
    first = 1 if kind == "criteo" else 2
    lines = lines_of(content)[first - 1 :]
    expected = [row_of(line, delimiter, quote, len(columns), wanted) for line in lines]
    refused = {row.number for row in bad.rows}
    for number, row in enumerate(expected, first):
        if row == OPEN_QUESTION:
            continue
        assert (number in refused) == (row == ""), f"line {number}: {lines[number - first]!r} is {row!r}"
        assert row == "" or found[number] == row, f"line {number}: found {found[number]}, expected {row}"
    assert not found or max(found) < first + len(lines), "more rows than lines"
    assert not refused & found.keys(), "a line that is a row and is none"


def _csv(folder: Path) -> Opened:
    path = folder / "log.csv"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _compare(content, "csv", path, {})

    hostile = (
        *(b"", b"\n", b"\xef\xbb\xbf", b"a,b\r1,2\r", b"a,a\n1,2\n", b"a\n1\n\n2\n"),
        *(b'a,b\n"x', b'a,b\n"x\n1,2\n', b'"a\n', b'""\n1\n', b'"a"b,c\n1,2\n'),
        *(b"a" * 100_000 + b"\n1", b"a,b\n" + b"1" * 200_000 + b",2\n", b"," * 5000 + b"\n" + b"," * 5000),
    )
    return Opened(any_bytes([CSV, LOG], TOKENS), read, (CSV, LOG, *hostile))


def _criteo(folder: Path) -> Opened:
    path = folder / "log.tsv"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _compare(content, "criteo", path, {})

    return Opened(any_bytes([CRITEO], TOKENS), read, (CRITEO, b"", b"\n", b"\n" + CRITEO, b"\t" * 39, CRITEO[:-30]))


def _gzip(folder: Path) -> Opened:
    path = folder / "log.csv.gz"
    valid = gzip.compress(CSV, mtime=0)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        try:
            text = gzip.decompress(content)
        except (OSError, EOFError, ValueError, zlib.error):
            text = None
        source = open_source("csv", [str(path)], params={}, seed=1, split="eval")
        bad = BadRows("skip")
        found = _rows(source, bad)
        assert text is not None, "damaged gzip data gave rows"
        assert len(found) + len(bad.rows) == max(0, len(lines_of(text)) - 1), "rows were lost"

    hostile = (b"", valid[:-1], valid + b"x", valid + valid, CSV, valid[:-8] + b"\0" * 8, gzip.compress(b"", mtime=0))
    return Opened(any_bytes([valid], TOKENS), read, (valid, *hostile))


def _parquet(folder: Path) -> Opened:
    path = folder / "log.parquet"
    table = pa.table(
        {
            "label": pa.array([0, 1, None, 1], pa.int8()),
            "text": pa.array(["a", None, "性别", ""]),
            "codes": pa.array(["u", "v", "u", None]).dictionary_encode(),
            "list": pa.array([[1, None], [], None, [2, 3]], pa.list_(pa.int64())),
        }
    )

    def packed(compression: str) -> bytes:
        sink = io.BytesIO()
        pq.write_table(table, sink, compression=compression, write_page_checksum=True)
        return sink.getvalue()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _rows(open_source("parquet", [str(path)], params={}, seed=1, split="eval"), BadRows("skip"))

    valid = [packed(compression) for compression in ("none", "zstd", "gzip")]
    return Opened(
        any_bytes(valid, (b"PAR1", b"\x15\x02", b"\xff" * 8)), read, (*valid, b"", b"PAR1PAR1", valid[0][:-4])
    )


def _dataset(folder: Path) -> Opened:
    path = folder / "log.csv"
    config = Config.model_validate(
        {
            "seed": 1,
            "data": {
                **{"kind": "csv", "train": [str(path)], "label": {"column": "label"}},
                **{"bad_rows": "skip", "shuffle": "false"},
            },
            "features": FEATURES,
            "towers": [{"name": "only", "kind": "mlp"}],
            "train": {"epochs": 1, "local_batch_size": 5},
        }
    )

    def read(content: bytes) -> None:
        path.write_bytes(content)
        datasets = build_datasets(config)
        lines = dict(enumerate(lines_of(content), 1))
        names = next(iter(lines_of(content))).removesuffix(b"\r").split(b",")
        sizes = torch.tensor(list(datasets.table_rows.values()))
        rows = 0
        for batch in datasets.train.batches(0):
            rows += batch.size
            assert batch.dense.isfinite().all(), "a dense value that is not finite"
            assert batch.label.eq(0).logical_or(batch.label.eq(1)).all(), "a label that is neither 0 nor 1"
            largest = sizes.repeat_interleave(batch.size).repeat_interleave(batch.sparse.lengths.flatten())
            assert (batch.sparse.values >= 0).all(), "an id below its table"
            assert (batch.sparse.values < largest).all(), "an id above its table"
            for row, place in enumerate(datasets.train.locate(batch.row_ids)):
                line = lines[int(place.rpartition(":")[2])].removesuffix(b"\r")
                if b'"' in line or b'"' in lines[1] or b"x" not in names:
                    continue
                cell = line.split(b",")[names.index(b"x")].decode()
                if _PLAIN_NUMBER.fullmatch(cell):
                    value = float(cell)
                    expected = np.float32(math.copysign(math.log1p(abs(value)), value))
                    assert batch.dense[row, 0].item() == expected, f"{place}: {cell} became {batch.dense[row, 0]}"
        assert rows + datasets.bad_rows.count == len(lines) - 1, "rows were lost"

    cells = (
        b"1e999",
        b"-inf",
        b"nan",
        b"0x10",
        b"1_000",
        b" 1 ",
        b"1.7976931348623157e308",
        b"99999999999999999999",
        b"\xd9\xa3",
    )
    hostile = tuple(LOG.replace(b",-9,", b"," + cell + b",").replace(b",0,a", b"," + cell + b",a", 1) for cell in cells)
    return Opened(any_bytes([LOG], (*TOKENS, *cells)), read, (LOG, *hostile))


TARGETS = (
    Target("csv", "CSV files, against a slow reader", _csv),
    Target("criteo", "Criteo's TSV files, against a slow reader", _criteo),
    Target("gzip", "CSV files in gzip; no row is lost", _gzip),
    Target("parquet", "Parquet files", _parquet),
    Target("dataset", "a CSV file to batches: ids inside tables, finite numbers, logarithms as Python's", _dataset),
)
