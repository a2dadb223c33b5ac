"""Sequence diagrams as SVG, drawn from lines of text; no script and no program is needed to show them.

In a page::

    :::{sequence} A worker joins
    worker, scheduler
    worker -> scheduler: Join
    scheduler .. waits for the others
    scheduler -x worker: stream ends
    :::

The first line names the participants. ``->`` is a message, ``-x`` one that is lost or a death, ``..`` a note.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

_COLUMN, _ROW, _MARGIN, _HEAD = 210, 38, 90, 44  # pixels
_LINE = re.compile(r"(?P<a>[^.>]+?) *(?P<kind>->|-x|\.\.) *(?:(?P<b>[^:]+): *)?(?P<text>.+)")


def draw(title: str, lines: list[str]) -> str:
    """Draws a diagram.

    Args:
        title: what a screen reader says.
        lines: the participants, then a message or note each.

    Returns:
        An ``svg`` element that takes the page's text colour.

    Raises:
        ValueError: a line is none of these, or names somebody who takes no part.
    """
    names = [name.strip() for name in lines[0].split(",")]
    x = {name: _MARGIN + _COLUMN * index for index, name in enumerate(names)}
    parts, y = [], _HEAD + _ROW
    for line in lines[1:]:
        found = _LINE.fullmatch(line.strip())
        if found is None or found["a"] not in x or (found["kind"] != ".." and found["b"] not in x):
            raise ValueError(f"not a line of a sequence diagram: {line!r}")
        parts += (
            _note(x[found["a"]], y, found["text"])
            if found["kind"] == ".."
            else _message(x[found["a"]], x[found["b"]], y, found["text"], lost=found["kind"] == "-x")
        )
        y += _ROW
    width = _MARGIN * 2 + _COLUMN * (len(names) - 1)
    heads = [
        f'<rect x="{at - 70}" y="4" width="140" height="28" rx="6" fill="none" stroke="currentColor"/>'
        f'<text x="{at}" y="23" text-anchor="middle" font-weight="600">{html.escape(name)}</text>'
        f'<path d="M{at} 32V{y - 14}" stroke="currentColor" stroke-opacity=".35"/>'
        for name, at in x.items()
    ]
    return (
        f'<svg role="img" aria-label="{html.escape(title, quote=True)}" viewBox="0 0 {width} {y}"'
        f' width="{width}"'
        ' style="max-width:100%;height:auto;color:inherit" font-family="system-ui,sans-serif" font-size="13"'
        ' fill="currentColor"><defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
        + "".join(heads + parts)
        + "</svg>"
    )


def _message(start: int, end: int, y: int, text: str, *, lost: bool) -> list[str]:
    middle, away = (start + end) // 2, 1 if end > start else -1
    line = f'<path d="M{start} {y}H{end - 2 * away}" stroke="currentColor" fill="none"'
    if lost:
        line = line.replace(f"H{end - 2 * away}", f"H{middle}") + ' stroke-dasharray="4 3"/>'
        line += f'<path d="M{middle - 5} {y - 5}l10 10m0 -10l-10 10" stroke="currentColor"/>'
    else:
        line += ' marker-end="url(#arrow)"/>'
    return [line, f'<text x="{middle}" y="{y - 7}" text-anchor="middle">{html.escape(text)}</text>']


def _note(at: int, y: int, text: str) -> list[str]:
    return [
        f'<circle cx="{at}" cy="{y - 4}" r="3.5"/>',
        f'<text x="{at + 10}" y="{y}" font-style="italic">{html.escape(text)}</text>',
    ]


class Sequence(Directive):
    """The directive ``sequence``, whose argument is the diagram's title."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Makes the figure."""
        try:
            svg = draw(self.arguments[0], [line for line in self.content if line.strip()])
        except ValueError as error:
            raise self.error(str(error)) from error
        caption = f"<figcaption>{html.escape(self.arguments[0])}</figcaption>"
        return [nodes.raw("", f"<figure>{svg}{caption}</figure>", format="html")]


def setup(app: Any) -> dict[str, Any]:
    """Registers the directive with Sphinx."""
    app.add_directive("sequence", Sequence)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
