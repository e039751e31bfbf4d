"""The timelines of the report: one step of each arm, drawn from what a run of it measured, or as a user drew it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from erase_rec.errors import UserError
from eval.report.analysis import Report
from eval.report.figures import Picture
from eval.timeline import draw_timeline


def timelines(report: Report, drawn: Mapping[str, Path]) -> Iterator[Picture]:
    """One an arm: the chart of ``drawn``, else that of the first of its runs which kept a measured step.

    Raises:
        UserError: a file of ``drawn`` cannot be read, or is no PNG.
    """
    for arm in report.arms:
        kept = [(run, run.timeline) for run in report.by_arm[arm.name].values() if run.timeline is not None]
        if arm.name in drawn or not kept:
            continue
        run, step = kept[0]
        file = io.BytesIO()
        title = f"Step {step.step:,} of {arm.name}, seed {run.seed}: {step.rows:,} rows"
        draw_timeline(step.intervals, file, title=title, critical=step.critical_path)
        yield _picture(
            f"Timeline of one step of {arm.name} (measured on the first rank; on a CPU by the host's clock): streams "
            f"above, host threads below. Audit: {arm.audit}.",
            file.getvalue(),
        )
    for name, path in drawn.items():
        yield _picture(f"Timeline of one step of {name}.", _read(name, path))


def _read(arm: str, path: Path) -> bytes:
    """A chart that ``erase-rec timeline`` drew."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--timeline: cannot read {path}: {error.strerror}") from error
    if not content.startswith(b"\x89PNG"):
        raise UserError(f"--timeline: {path} is no PNG file; draw it with erase-rec timeline --out {arm}.png")
    return content


def _picture(caption: str, png: bytes) -> Picture:
    return Picture(caption, f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">')
