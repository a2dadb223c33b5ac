"""Renders a plan as a self-contained HTML page, with the standard library alone."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from muster.parallel.planning.buckets import node_collectives, split_text
from muster.parallel.planning.graph import Graph
from muster.parallel.planning.layouts import REPLICATE, Mesh, Placements, layout_text
from muster.parallel.planning.problem import State
from muster.parallel.planning.rows import Row
from muster.parallel.planning.words import bucket_text, edges_text

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color:
#1a1a1a; } table { border-collapse: collapse; width: 100%; margin: 1em 0; }
th, td { text-align: left; padding: .25em .6em; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.verdict { font-size: 1.35em; margin: .5em 0; }
.chip { display: inline-block; padding: 0 .5em; border-radius: .3em; border: 1px solid #0003; }
ol { padding-left: 3em; } li { margin: .15em 0; } li.hub { opacity: .6; }
details { margin-left: 1em; } code { font-size: .92em; } .moves { color: #a33; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e8e8e8; } th, td { border-color: #444; } .chip { color: #111; }
  .moves { color: #f99; }
}
"""


def page(
    graph: Graph,
    states: Sequence[State],
    mesh: Mesh,
    *,
    verdict: str,
    facts: Iterable[str],
    rows: Iterable[Row],
    local_norm: bool,
) -> str:
    """Returns the page's HTML, which loads nothing else.

    Args:
        graph: the graph of the forward pass.
        states: the chosen state of each node.
        mesh: the mesh's sizes.
        verdict: a sentence about the plan as a whole.
        facts: further sentences.
        rows: one row per module.
        local_norm: whether BatchNorm takes its statistics from each rank's own part of the batch.
    """
    layouts = list(dict.fromkeys(layout for state in states for layout in state.outs))
    colours = {layout: _colour(number, layout) for number, layout in enumerate(layouts)}
    told = "".join(f"<li>{_text(line)}</li>" for line in facts)
    lines = bucket_text(graph, states, mesh)
    buckets = "".join(f"<li>{_text(line)}</li>" for line in lines) or "<li>none</li>"
    nodes = _graph(graph, states, mesh, colours, local_norm=local_norm)
    legend = " ".join(_chip(layout_text(layout), colour) for layout, colour in colours.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Parallel plan</title>'
        f"<style>{_STYLE}</style></head><body><h1>Parallel plan</h1>"
        f'<p class="verdict">{_text(verdict)}</p><ul>{told}</ul>'
        f"<h2>Modules</h2>{_table(rows)}"
        f"<h2>Gradients</h2><ul>{buckets}</ul>"
        "<h2>Graph</h2><p>One entry for each mesh dimension: R whole, P a sum of parts, S0 split along"
        f" dimension 0.</p><p>{legend}</p><ol>{nodes}</ol></body></html>\n"
    )


def _text(words: str) -> str:
    return html.escape(words)


def _chip(words: str, colour: str) -> str:
    return f'<span class="chip" style="background:{colour}">{_text(words)}</span>'


def _colour(number: int, layout: Placements) -> str:
    """Returns a layout's CSS colour: grey for replicated tensors, otherwise hues far apart."""
    if all(entry == REPLICATE for entry in layout):
        return "#ddd"
    return f"hsl({(number * 137) % 360} 65% 78%)"


def _table(rows: Iterable[Row]) -> str:
    heads = (
        "module",
        "strategies",
        "local shapes",
        "collectives",
        "predicted ms",
        "measured forward ms",
        "GB",
    )
    head = "".join(f'<th class="{"number" if i > 3 else ""}">{name}</th>' for i, name in enumerate(heads))
    body = []
    for row in rows:
        measured = "" if row.measured_ms is None else f"{row.measured_ms:.3f}"
        numbers: Sequence[str] = (f"{row.predicted_ms:.3f}", measured, f"{row.gigabytes:.4f}")
        words = (row.module, row.strategies, row.local, row.collectives)
        cells = "".join(f"<td>{_text(each)}</td>" for each in words)
        cells += "".join(f'<td class="number">{each}</td>' for each in numbers)
        body.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _graph(
    graph: Graph, states: Sequence[State], mesh: Mesh, colours: dict[Placements, str], *, local_norm: bool
) -> str:
    items = []
    for index, (node, state) in enumerate(zip(graph.nodes, states, strict=True)):
        chips = " ".join(_chip(layout_text(layout), colours[layout]) for layout in state.outs)
        moved = node_collectives(graph, states, mesh, index, local_norm=local_norm)
        moves = "; ".join(
            f"{each.phase}: {each.kind} over {math.prod(mesh[d] for d in each.dims)} ranks,"
            f" {each.nbytes:,} bytes"
            for each in moved
        )
        shapes = ", ".join(str(list(graph.values[v].shape)) for v in node.outputs)
        edges = "".join(f"<li>{_text(line)}</li>" for line in edges_text(graph, states, index))
        cut = split_text(graph, node, state, mesh) if node.outputs else ""
        line = f"<code>{_text(node.name)}</code> {_text(node.op)} {_text(shapes)} {chips}"
        if moves:
            line += f' <span class="moves">{_text(moves)}</span>'
        summary = _text(f"{state.key} {cut} {node.line}")
        more = f"<details><summary>{summary}</summary><ul>{edges}</ul></details>"
        items.append(f'<li class="{node.kind}">{line}{more if edges else ""}</li>')
    return "".join(items)
