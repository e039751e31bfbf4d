"""Table 1 of the paper (ERASE, arXiv 2608.18469): 8 H100, six detached towers, four of them on streams of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """A row as printed.

    Attributes:
        name: ``baseline`` or ``row N``.
        configuration: what the paper calls it.
        qps_p90: rows a second.
        gain_pct: over the baseline; None for it.
        ne_gap_pct: None where the paper gives none.
    """

    name: str
    configuration: str
    qps_p90: float
    gain_pct: float | None
    ne_gap_pct: float | None = None


PAPER_ROWS = (
    PaperRow("baseline", "one aggregate backward", 184_535.51, None),
    PaperRow("row 3", "blocking, FUP=False", 185_223.71, 0.37),
    PaperRow("row 2", "blocking, FUP=True", 194_244.72, 5.26),
    PaperRow("row 1", "non-blocking, CUDA graphs, FUP=False", 198_145.28, 7.38, 1.38),
    PaperRow("row 0", "printed as blocking, FUP=True; by the rows' order non-blocking, FUP=True", 202_078.43, 9.51),
)

_ROW = re.compile(r"row_?\s?([0-3])")


def paper_row(arm: str, preset: str, *, is_baseline: bool) -> PaperRow | None:
    """The row that an arm stands for, by its name, else by its preset; None: the paper has no such arm."""
    by_name = {row.name: row for row in PAPER_ROWS}
    found = _ROW.search(arm) or _ROW.search(preset)
    if found:
        return by_name[f"row {found[1]}"]
    return by_name["baseline"] if is_baseline else None
