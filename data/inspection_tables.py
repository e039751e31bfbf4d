"""An inspection as tables, for the terminal and for the page."""

from __future__ import annotations

from data.inspection import FeatureFacts, Inspection
from data.prepared.words import size_in_words
from erase_rec.text_table import TextTable

UNKNOWN = "-"


def tables_of(inspection: Inspection) -> list[TextTable]:
    """Splits, features, label rates, tables' memory, and bad rows where there are any."""
    tables = [_splits(inspection), _features(inspection), _rates(inspection), _memory(inspection)]
    if inspection.manifest.bad_rows.count:
        tables.append(_bad_rows(inspection))
    return tables


def remarks_of(inspection: Inspection) -> list[str]:
    """Lines about the whole."""
    manifest = inspection.manifest
    lines = [
        f"prepared {manifest.made['at']} from {len(manifest.files)} files by: {manifest.made['command']}",
        f"data fingerprint {manifest.fingerprint}",
    ]
    if manifest.row_ids is not None:
        found = manifest.row_ids
        lines.append(f"data.row_id: {found.rows:,} ids of column {found.column!r} compared; none is on both sides")
        lines += found.remarks
    return lines


def share_in_words(share: float | None) -> str:
    """A percentage."""
    return UNKNOWN if share is None else f"{share:.2%}"


def _splits(inspection: Inspection) -> TextTable:
    rows = [
        (
            name,
            f"{split.rows:,}",
            UNKNOWN if split.label_rate is None else f"{split.label_rate:.4f}",
            f"{len(split.parts):,}",
            size_in_words(sum(part.file.num_bytes for part in split.parts)),
        )
        for name, split in inspection.manifest.splits.items()
    ]
    return TextTable("splits", ("split", "rows", "label rate", "parts", "size"), tuple(rows))


def _features(inspection: Inspection) -> TextTable:
    header = ("feature", "kind", "missing", "unseen in eval", "known categories", "table rows", "dim", "weights")
    return TextTable("features", header, tuple(_feature(facts) for facts in inspection.features))


def _feature(facts: FeatureFacts) -> tuple[str, ...]:
    record, table = facts.record, facts.table
    clipped = f", {record.clipped:,} clipped" if record.clipped else ""
    return (
        record.name,
        f"{record.kind}{clipped}",
        share_in_words(facts.missing_share),
        share_in_words(facts.unseen_share),
        UNKNOWN if record.known is None else f"{record.known:,}",
        UNKNOWN if table is None else f"{table.rows:,}",
        UNKNOWN if table is None else str(table.dim),
        UNKNOWN if table is None else size_in_words(table.weight_bytes),
    )


def _rates(inspection: Inspection) -> TextTable:
    rows = [
        (split, each.name, f"{each.rows:,}", UNKNOWN if each.rate is None else f"{each.rate:.4f}")
        for split, bins in inspection.rates.items()
        for each in bins
    ]
    return TextTable(
        f"label rate over {inspection.over}", ("split", inspection.over, "rows", "label rate"), tuple(rows)
    )


def _memory(inspection: Inspection) -> TextTable:
    rows = [(kind, size_in_words(num_bytes)) for kind, num_bytes in inspection.table_bytes().items()]
    title = f"embedding tables at dimension {inspection.dim}, weights and optimizer state"
    return TextTable(title, ("optimizer.sparse.kind", "memory"), tuple(rows))


def _bad_rows(inspection: Inspection) -> TextTable:
    bad = inspection.manifest.bad_rows
    title = f"bad rows ({bad.policy}): {bad.count:,} of {inspection.manifest.rows_read:,}"
    rows = tuple((f"{count:,}", reason) for reason, count in bad.reasons.items())
    return TextTable(title, ("rows", "reason"), rows)
