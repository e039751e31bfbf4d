"""An inspection as one HTML file that needs nothing else: tables, and plots as pictures inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.errors import DataError
from data.inspection import Inspection
from data.inspection_tables import remarks_of, tables_of
from erase_rec.text_table import TextTable

COLOURS = {"train": "#0072b2", "eval": "#d55e00"}
"""Of Okabe and Ito's palette, safe for the colour-blind."""
MOST_BARS = 60
_STYLE = """body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: left; }
td + td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""


def write_page(inspection: Inspection, path: Path) -> None:
    """Writes the page.

    Raises:
        DataError: the file cannot be written.
    """
    title = f"Prepared data: {escape(str(inspection.folder))}"
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        *(f"<p>{escape(line)}</p>" for line in remarks_of(inspection)),
        *_plots(inspection),
        *(_table(table) for table in tables_of(inspection)),
        "</body></html>\n",
    ]
    try:
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise DataError(f"--html: cannot write {path}: {error.strerror or error}") from error


def _table(table: TextTable) -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2>\n<table><tr>{cells('th', table.header)}</tr>\n{body}</table>"


def _plots(inspection: Inspection) -> Iterator[str]:
    yield _picture(f"label rate over {inspection.over}", 3.2, lambda axes: _draw_rates(inspection, axes))
    missing = {facts.record.name: facts.missing_share for facts in inspection.features}
    unseen = {facts.record.name: facts.unseen_share for facts in inspection.features}
    for name, shares in (("missing cells", missing), ("unseen values in eval", unseen)):
        known = {feature: 100 * share for feature, share in shares.items() if share is not None}
        if known:
            yield _bars(name, "%", known)
    tables = {facts.record.name: facts.table for facts in inspection.features}
    sizes = {feature: table.weight_bytes / 2**20 for feature, table in tables.items() if table is not None}
    if sizes:
        yield _bars(f"weights of the embedding tables at dimension {inspection.dim}", "MiB", sizes)


def _draw_rates(inspection: Inspection, axes: Axes) -> None:
    for split, bins in inspection.rates.items():
        drawn = [(at, each) for at, each in enumerate(bins) if each.rate is not None]
        axes.plot(
            [at for at, _ in drawn],
            [each.rate or 0.0 for _, each in drawn],
            marker="o",
            label=split,
            color=COLOURS[split],
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"tenths of {inspection.over}")
    axes.set_ylabel("label rate")
    axes.legend(frameon=False)


def _bars(title: str, unit: str, values: dict[str, float]) -> str:
    largest = sorted(values.items(), key=lambda item: -item[1])[:MOST_BARS]
    shown = title if len(largest) == len(values) else f"{title} (the {MOST_BARS} largest of {len(values)})"

    def draw(axes: Axes) -> None:
        names = [name for name, _ in largest][::-1]
        axes.barh(range(len(names)), [value for _, value in largest][::-1], color=COLOURS["train"])
        # A name between dollar signs is no formula.
        axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names], fontsize=8)
        axes.set_xlabel(unit)

    return _picture(shown, 1.0 + 0.18 * len(largest), draw)


def _picture(title: str, height: float, draw: Callable[[Axes], None]) -> str:
    figure = Figure(figsize=(9, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    encoded = base64.b64encode(content.getvalue()).decode()
    return f'<h2>{escape(title)}</h2>\n<img alt="{escape(title)}" src="data:image/png;base64,{encoded}">'
