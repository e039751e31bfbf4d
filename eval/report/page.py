"""Writes the report: one HTML page that needs nothing beside it, the same in Markdown, and its numbers in JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from erase_rec.text_table import TextTable
from eval.report.analysis import Report
from eval.report.figures import Picture
from eval.report.paper import PAPER_ROWS
from eval.report.sentences import sentences
from eval.report.tables import tables

FORMAT = 1
STYLE = """
body { font: 15px/1.45 sans-serif; color: #111; max-width: 1150px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 .4em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #bbb; padding: .25em .6em; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #333; } td { font-variant-numeric: tabular-nums; } td span { white-space: nowrap; }
figure { margin: 1.2em 0; break-inside: avoid; } figure svg, figure img { width: 100%; height: auto; }
figcaption { font-size: 13px; color: #333; }
pre { background: #f4f4f4; padding: .6em; font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt; }
  table { font-size: 8pt; } tr { break-inside: avoid; }
}
"""


def write(report: Report, figures: Sequence[Picture], out: Path, *, title: str, command: str) -> list[Path]:
    """Writes ``out`` and, beside it, the same name with ``.md`` and ``.json``.

    Args:
        report: what it says.
        figures: what it shows.
        out: the HTML page.
        title: above it.
        command: that makes the report again.
    """
    texts = {
        ".html": html(report, figures, title, command),
        ".md": markdown(report, title, command),
        ".json": json.dumps(plain(report, title, command), indent=2, allow_nan=False, ensure_ascii=False) + "\n",
    }
    paths = [out.with_suffix(ending) for ending in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def html(report: Report, figures: Sequence[Picture], title: str, command: str) -> str:
    """The page."""
    first, *others = tables(report)
    said = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(report))
    drawn = "\n".join(
        f'<figure role="img" aria-label="{escape(each.caption)}">{each.markup}'
        f"<figcaption>{escape(each.caption)}</figcaption></figure>"
        for each in figures
    )
    commands = "\n".join(escape(line) for line in (*report.commands, command))
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
{_table(first)}
<h2>In plain words</h2>
<ul>
{said}
</ul>
{drawn}
{"".join(_table(table) for table in others)}
<h2>Commands</h2>
<pre>{commands}</pre>
</body>
</html>
"""


def markdown(report: Report, title: str, command: str) -> str:
    """The same without the figures."""
    first, *others = (table.markdown() for table in tables(report))
    said = "\n".join(f"- {sentence}" for sentence in sentences(report))
    commands = "\n".join((*report.commands, command))
    parts = [f"# {title}", first, f"## In plain words\n\n{said}", *others, f"## Commands\n\n```\n{commands}\n```"]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def plain(report: Report, title: str, command: str) -> dict[str, Any]:
    """The report's numbers; what is undefined or not known is None."""
    return {
        "format": FORMAT,
        "title": title,
        "baseline": report.baseline.name,
        "arms": [_clean(asdict(arm)) for arm in report.arms],
        "turns": None if report.turns is None else {"file": str(report.turns.path), "qps_p90": report.speeds},
        "paper": [asdict(row) for row in PAPER_ROWS],
        "sentences": sentences(report),
        "runs": [
            {
                "arm": name,
                "seed": seed,
                "folder": str(run.path),
                "qps_p90": None if report.turns is not None else _clean(run.summary.throughput.qps_p90),
                "ne": _clean(run.summary.eval.ne),
                "audit": run.audit,
            }
            for name, arm in report.by_arm.items()
            for (seed, _), run in arm.items()
        ],
        "missing": [
            {"arm": entry.arm, "seed": entry.seed, "folder": str(entry.path), "reason": entry.reason}
            for entry in report.missing
        ],
        "environment": {key: list(values) for key, values in report.environment.items()},
        "commands": [*report.commands, command],
    }


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>\n'


def _cell(text: str) -> str:
    """An interval stays on one line, below its estimate."""
    return re.sub(r" (\[[^ ]+, [^ ]+\])$", r"<br><span>\1</span>", escape(text))


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
