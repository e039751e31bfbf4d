"""What a user sees of a preparation: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from erase_rec.cli import prepare
from erase_rec.cli.prepare import PrepareProgress


def test_lines_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(prepare.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with PrepareProgress(Console(file=out)) as progress:
        progress.say("about [b]3[/b] rows, " + "long " * 60)
        progress.start("read", 1000)
        for seconds, amount in [(1, 100), (5, 300), (2, 100), (8, 500)]:
            now[0] += seconds
            progress.advance(amount, 10 * amount)
    first, *lines = out.getvalue().splitlines()
    assert first == "about [b]3[/b] rows, " + "long " * 60
    assert lines == [
        "read 40 %  4,000 rows, 667 rows/s  9 s left",
        "read 100 %  10,000 rows, 625 rows/s  0 s left",
    ]


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with PrepareProgress(Console(file=out, force_terminal=True, width=120)) as progress:
        progress.start("read", 1000)
        progress.advance(500, 20)
        progress.say("a line above")
        progress.start("encode", 10)
        progress.advance(10, 30)
    shown = out.getvalue()
    for words in ("read", "50%", "20 rows", "a line above", "encode", "100%", "30 rows"):
        assert words in shown
