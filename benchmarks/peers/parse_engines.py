"""How fast an engine parses a Criteo file to text columns, in one thread.

    ENGINES_PYTHON benchmarks/peers/parse_engines.py --input train.tsv --engine "Arrow, runs of 1 MiB"

The file is read once before, so that the disk plays no part, and the engine is imported. The last line printed is JSON:
rows and seconds.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["POLARS_MAX_THREADS"] = "1"

NAMES = [f"column_{index}" for index in range(1, 41)]


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


ENGINES: dict[str, tuple[str, Callable[[Path], int]]] = {
    "Arrow, runs of 1 MiB": ("pyarrow.csv", lambda path: arrow(path, 1 << 20)),
    "Arrow, runs of 8 MiB": ("pyarrow.csv", lambda path: arrow(path, 8 << 20)),
    "polars": ("polars", polars),
    "DuckDB": ("duckdb", duckdb),
}


def main() -> None:
    """Parses once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", type=Path, required=True, help="TAB separated, no header.")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    arguments = parser.parse_args()
    module, parse = ENGINES[arguments.engine]
    importlib.import_module(module)
    arguments.input.read_bytes()
    start_s = time.perf_counter()
    rows = parse(arguments.input)
    print(json.dumps({"rows": rows, "s": time.perf_counter() - start_s}))


if __name__ == "__main__":
    main()
