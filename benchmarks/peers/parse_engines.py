"""How fast engines parse a Criteo file to text columns, one thread each; those that are installed take part.

    ENGINES_PYTHON benchmarks/peers/parse_engines.py --input train.tsv

The file is read once before, so that the disk plays no part. The last line printed is JSON: rows a second by engine.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["POLARS_MAX_THREADS"] = "1"

NAMES = [f"column_{index}" for index in range(1, 41)]
ARROW_RUN_BYTES = (1 << 20, 8 << 20)


def arrow(path: Path, run_bytes: int) -> int:
    """Runs of whole lines, one after the other: what is parsed stays in the cache."""
    import pyarrow as pa
    from pyarrow import csv

    rows, data = 0, path.read_bytes()
    start = 0
    while start < len(data):
        end = min(start + run_bytes, len(data))
        end = data.rfind(b"\n", start, end) + 1 if end < len(data) else end
        table = csv.read_csv(
            pa.BufferReader(memoryview(data)[start:end]),
            read_options=csv.ReadOptions(column_names=NAMES, use_threads=False, block_size=end - start + 1),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(NAMES, pa.string())),
        )
        rows, start = rows + table.num_rows, end
    return rows


def polars(path: Path) -> int:
    """The whole file."""
    import polars

    schema = dict.fromkeys(NAMES, polars.String)
    return polars.read_csv(path, separator="\t", has_header=False, schema=schema, quote_char=None).height


def duckdb(path: Path) -> int:
    """The whole file, into a table in memory."""
    import duckdb

    connection = duckdb.connect()
    connection.execute("set threads = 1")
    connection.execute(
        "create table rows as select * from read_csv(?, delim='\t', header=false, quote='', all_varchar=true)",
        [str(path)],
    )
    found = connection.execute("select count(*) from rows").fetchone()
    return int(found[0])


def main() -> None:
    """Parses once with each engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True, help="TAB separated, no header.")
    path = parser.parse_args().input
    path.read_bytes()
    engines: dict[str, tuple[str, Callable[[], int]]] = {
        **{
            f"Arrow, runs of {size >> 20} MiB": ("pyarrow", lambda size=size: arrow(path, size))
            for size in ARROW_RUN_BYTES
        },
        "polars": ("polars", lambda: polars(path)),
        "DuckDB": ("duckdb", lambda: duckdb(path)),
    }
    found = {}
    for name, (module, parse) in engines.items():
        if importlib.util.find_spec(module) is not None:
            start_s = time.perf_counter()
            rows = parse()
            found[name] = rows / (time.perf_counter() - start_s)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
