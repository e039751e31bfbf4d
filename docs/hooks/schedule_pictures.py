"""Draws the pictures of ``docs/schedules.md``: a column a stream, a row a launch, arrows for what waits for what.

Reads the form of Mermaid that ``erase_rec/schedule/pictures.py`` writes, in which a box's number is its place in the
order of launches; so no layout has to be found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

_STREAM = re.compile(r'subgraph \w+ \["(.*?)"\]')
_BOX = re.compile(r'n(\d+)(\(\[|\[)"(.*?)"')
_ARROW = re.compile(r"n(\d+) (-->|-\.->) n(\d+)")
_COLUMN, _ROW, _WIDTH, _LINE, _TOP = 270, 14, 215, 15, 40


@dataclass(frozen=True)
class _Box:
    column: int
    top: int
    height: int
    lines: tuple[str, ...]
    by_worker: bool

    @property
    def left(self) -> int:
        return self.column * _COLUMN + (_COLUMN - _WIDTH) // 2

    @property
    def center(self) -> int:
        return self.left + _WIDTH // 2

    @property
    def middle(self) -> int:
        return self.top + self.height // 2


def flowchart_as_svg(mermaid: str) -> str:
    """Inline SVG in one HTML block, in the page's own colours.

    Raises:
        ValueError: the text is no flowchart of this form.
    """
    streams = _STREAM.findall(mermaid)
    boxes = _boxes(mermaid)
    if not streams or not boxes:
        raise ValueError(f"a picture that docs/hooks/schedule_pictures.py cannot draw:\n{mermaid}")
    width = len(streams) * _COLUMN
    height = max(box.top + box.height for box in boxes.values()) + _ROW
    titles = " and ".join(streams)
    return "\n".join(
        (
            f'<svg class="schedule" viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%" role="img" '
            f'aria-label="Order of work on {escape(titles)}" font-size="12" fill="currentColor">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>',
            *_columns(streams, height),
            *(
                _arrow(boxes[int(first)], boxes[int(then)], kind == "-.->")
                for first, kind, then in _ARROW.findall(mermaid)
            ),
            *map(_drawn, boxes.values()),
            "</svg>",
        )
    )


def _boxes(mermaid: str) -> dict[int, _Box]:
    """Boxes by number, each below the one that is launched before it."""
    column, found = -1, {}
    for line in mermaid.splitlines():
        column += bool(_STREAM.search(line))
        for number, shape, text in _BOX.findall(line):
            found[int(number)] = (column, tuple(text.split("<br/>")), shape != "[")
    boxes, top = {}, _TOP
    for number in sorted(found):
        column, lines, by_worker = found[number]
        height = _LINE * len(lines) + 8
        boxes[number] = _Box(column, top, height, lines, by_worker)
        top += height + _ROW
    return boxes


def _columns(streams: list[str], height: int) -> Iterator[str]:
    for at, stream in enumerate(streams):
        left = at * _COLUMN
        yield (
            f'<rect x="{left + 8}" y="4" width="{_COLUMN - 16}" height="{height - 8}" rx="6" fill="currentColor" '
            'fill-opacity="0.05"/>'
        )
        yield f'<text x="{left + _COLUMN // 2}" y="24" text-anchor="middle" font-weight="bold">{escape(stream)}</text>'


def _arrow(first: _Box, then: _Box, waits: bool) -> str:
    """Down inside a column; a curve from side to side between columns, dashed."""
    if not waits:
        path = f"M{first.center} {first.top + first.height}V{then.top}"
        return f'<path d="{path}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>'
    right = then.column > first.column
    start, end = first.left + _WIDTH * right, then.left + _WIDTH * (not right)
    bend = 40 if right else -40
    path = f"M{start} {first.middle}C{start + bend} {first.middle} {end - bend} {then.middle} {end} {then.middle}"
    return (
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.55" stroke-dasharray="4 3" '
        'marker-end="url(#tip)"/>'
    )


def _drawn(box: _Box) -> str:
    """A box is opaque, so that arrows pass behind it; those that a worker launches are round."""
    texts = "".join(
        f'<text x="{box.center}" y="{box.top + _LINE * (at + 1)}" text-anchor="middle">{escape(line)}</text>'
        for at, line in enumerate(box.lines)
    )
    return (
        f'<rect x="{box.left}" y="{box.top}" width="{_WIDTH}" height="{box.height}" '
        f'rx="{box.height // 2 if box.by_worker else 2}" stroke="currentColor" '
        f'style="fill:var(--md-default-bg-color)"/>{texts}'
    )
