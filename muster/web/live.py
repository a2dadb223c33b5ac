"""The changing parts of a page. They are rendered once for all viewers; each viewer gets only the changes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the grid: its element's id, class and label, and its HTML."""

    id: str
    kind: str
    label: str
    html: str


@dataclass
class Live:
    """A page's parts and cells, each with the number of the refresh that last changed it."""

    number: int = 0
    _parts: dict[str, tuple[int, str]] = field(default_factory=dict)
    _cells: dict[str, tuple[int, Cell]] = field(default_factory=dict)
    _made: dict[int, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins the next refresh."""
        self.number += 1
        self._made.clear()

    def put(self, part: str, html: str) -> None:
        """Sets the HTML of an element."""
        old = self._parts.get(part)
        if old is None or old[1] != html:
            self._parts[part] = (self.number, html)

    def put_cells(self, cells: list[Cell], *, whole: bool) -> None:
        """Sets the grid's cells; with ``whole`` they are sent with the grid instead of one by one."""
        if whole:
            self._cells = {cell.id: (0, cell) for cell in cells}
            return
        for cell in cells:
            old = self._cells.get(cell.id)
            if old is None or old[1] != cell:
                self._cells[cell.id] = (self.number, cell)

    def since(self, number: int) -> str:
        """Returns the changes since the refresh ``number``, as JSON; empty if there are none."""
        if number not in self._made:
            parts = {name: html for name, (changed, html) in self._parts.items() if changed > number}
            cells = [
                [cell.id, cell.kind, cell.label, cell.html]
                for changed, cell in self._cells.values()
                if changed > number
            ]
            empty = not parts and not cells
            made = {"parts": parts, "cells": cells}
            self._made[number] = "" if empty else json.dumps(made, separators=(",", ":"))
        return self._made[number]

    def parts(self) -> dict[str, str]:
        """Returns the HTML of all parts, by element."""
        return {name: html for name, (_, html) in self._parts.items()}
