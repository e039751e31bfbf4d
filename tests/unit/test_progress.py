"""What is shown while training: plain lines into a file, a bar on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from erase_rec.progress import BarProgress, LineProgress, show_progress

VALUES = {"throughput/qps_mean": 12345.6, "train/ne": 0.87654321}


def test_a_file_gets_one_plain_line_a_report() -> None:
    file = io.StringIO()
    with show_progress(100, console=Console(file=file, width=20)) as progress:
        assert isinstance(progress, LineProgress)
        for step in range(1, 51):
            progress.advance(step)
        progress.report(50, VALUES)
        progress.message("a [bold]warning[/bold]")
        progress.report(100, {})
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 50/100  12,346 rows/s  NE 0.87654  ETA 0:00:0")
    assert lines[1:] == ["a [bold]warning[/bold]", "step 100/100"]


def test_time_left_counts_the_steps_of_this_process_only() -> None:
    file = io.StringIO()
    progress = LineProgress(Console(file=file), total_steps=1_000_000, start_step=999_998)
    progress.report(999_999, {})
    assert "ETA 0:00:00" in file.getvalue()


def test_a_terminal_gets_a_bar_with_speed_and_ne() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with show_progress(100, console=console) as progress:
        assert isinstance(progress, BarProgress)
        progress.advance(50)
        progress.report(50, VALUES)
        progress.message("[a warning]")
    assert "50/100" in file.getvalue()
    assert "12,346 rows/s  NE 0.87654" in file.getvalue()
    assert "[a warning]" in file.getvalue()
    progress.close()
