"""Timelines of runs as images of TensorBoard: drawn once somebody looks, from what the runs measured."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from erase_rec.errors import UserError
from erase_rec.run_log import EVENT_PREFIX, write_image
from erase_rec.step_timeline import TIMELINE_FILE, StepTimeline
from eval.timeline import draw_timeline

TAG = "timeline"


def draw_missing(folders: Iterable[Path]) -> None:
    """Adds the image to each run that kept a measured step and has no image of it yet, the newest run first.

    What cannot be read or written is left out: curves are shown without it, and ``erase-rec report`` names the file.
    """
    kept = [folder for folder in folders if (folder / TIMELINE_FILE).is_file()]
    for folder in sorted(kept, key=_measured_at, reverse=True):
        if any(image.stat().st_mtime >= _measured_at(folder) for image in folder.glob(f"{EVENT_PREFIX}*.{TAG}")):
            continue
        try:
            timeline = StepTimeline.read(folder)
            if timeline is not None:
                _draw(folder, timeline)
        except (UserError, OSError):
            continue


def _measured_at(folder: Path) -> float:
    return (folder / TIMELINE_FILE).stat().st_mtime


def _draw(folder: Path, timeline: StepTimeline) -> None:
    file = io.BytesIO()
    title = f"Step {timeline.step:,} of {folder.name}: {timeline.rows:,} rows"
    width, height = draw_timeline(timeline.intervals, file, title=title, critical=timeline.critical_path)
    write_image(folder, TAG, file.getvalue(), step=timeline.step, width=width, height=height)
