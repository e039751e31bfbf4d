"""Files of `erase-rec bench` as one result: a list of rows, and their tables between two marks of a page.

    python benchmarks/step_report.py h200-1024.json h200-rest.json --out docs/results/h200-step

Writes ``OUT.json``: each file's rows with where they were measured. In ``OUT.md`` the text between
``<!-- tables -->`` and ``<!-- end of tables -->`` is replaced by the tables; the rest of the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from erase_rec.bench.result import Row, kernel_table, strongest_early, strongest_exact, tables

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def main() -> None:
    """Reads, writes."""
    parser = argparse.ArgumentParser(description="Files of `erase-rec bench` as one result.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="names of the results without .json and .md")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.files]
    merged = [row | _where(record) for record in records for row in record["rows"]]
    arguments.out.with_suffix(".json").write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    page = arguments.out.with_suffix(".md")
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = "\n".join(_parts(records))
    page.write_text(f"{before}{BEGIN}\n\n{parts}\n{END}{after}", encoding="utf-8")


def _where(record: Mapping[str, Any]) -> dict[str, Any]:
    versions = record["environment"]
    return {
        "date": record["date"],
        "commit": record["commit"],
        "device": record["device"],
        "driver": record["driver"],
        "torch": versions["torch"],
        "command": record["command"],
        "ceilings": record["ceilings"],
    }


def _parts(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each file its command, then its tables, and the longest kernels of the fastest exact and early arm."""
    for record in records:
        rows = [_row(plain) for plain in record["rows"]]
        ceilings = record["ceilings"]
        yield f"`{record['command']}`, commit {str(record['commit'])[:7]}, {json.dumps(ceilings)}\n"
        for table in tables(rows):
            yield table.markdown()
        largest = [row for row in rows if row.batch == rows[-1].batch]
        for row in (strongest_exact(largest), strongest_early(largest)):
            if row is not None and row.top_kernels:
                yield kernel_table(row).markdown()


def _row(plain: Mapping[str, Any]) -> Row:
    known = {field.name for field in fields(Row)}
    return Row(**{name: value for name, value in plain.items() if name in known})


if __name__ == "__main__":
    main()
