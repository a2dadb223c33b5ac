"""Writes docs/troubleshooting.md from the errors' own texts: ``python docs/troubleshooting_page.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"
"""Stands for what differs from case to case: a host, a rank, a file."""

ROOMS = {
    "launch": "Launching",
    "worker": "Joining a job and staying in it",
    "scheduler": "The scheduler",
    "certs": "Certificates and passwords",
    "wire": "Settings, addresses and rank tables",
    "communicators": "Collectives",
    "training": "Training and checkpoints",
    "torch": "Training with torch",
    "parallel": "Parallel modes",
    "programs": "Torch and JAX programs",
    "web": "The page and reports",
    "": "Commands",
}
"""The folders of the package, in the order of the page, and their headings."""

LEFT_OUT = ("bench", "example")

MARK = "<!-- What follows is made by troubleshooting_page.py. -->\n"


def text_of(node: ast.expr) -> str:
    """The text of a literal, of an f-string, or of several added ones; :data:`GAP` for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return text_of(node.body)
    return GAP


def rows_of(source: str) -> Iterator[tuple[str, str]]:
    """What each error of a module says, and its remedy; of a text with two forms the first one.

    Where the sentence is computed, it is :data:`GAP` alone.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        remedies = [text_of(each.value) for each in node.keywords if each.arg == "remedy"]
        if remedies and node.args:
            message, remedy = text_of(node.args[0]), remedies[0]
            if remedy.strip(GAP + " "):
                yield message, remedy


def rows() -> dict[str, list[tuple[str, str]]]:
    """All rows by folder, each once, in alphabetical order."""
    found: dict[str, set[tuple[str, str]]] = {room: set() for room in ROOMS}
    for path in sorted((ROOT / "muster").rglob("*.py")):
        way = path.relative_to(ROOT / "muster").parts
        if way[0] in LEFT_OUT:
            continue
        room = way[0] if len(way) > 1 else ""
        found[room] |= set(rows_of(path.read_text()))
    return {room: sorted(each, key=lambda row: (row[0].lower(), row[1])) for room, each in found.items()}


def cell(text: str) -> str:
    """A text as a table's cell shows it literally."""
    flat = " ".join(text.split())
    for mark in "\\`*_<>|[]{}$":
        flat = flat.replace(mark, "\\" + mark)
    return flat


def page() -> str:
    """The whole page: what is written by hand, to the mark, and the tables."""
    parts = [PAGE.read_text().partition(MARK)[0], MARK]
    for room, each in rows().items():
        if each:
            table = "".join(f"| {cell(message)} | {cell(remedy)} |\n" for message, remedy in each)
            parts.append(f"\n## {ROOMS[room]}\n\n| what it says | what helps |\n|---|---|\n{table}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
