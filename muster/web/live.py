"""The changing parts of a page: rendered once for all viewers, sent as far as they have changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the grid: its element's id and class, what it is called, and its HTML."""

    id: str
    kind: str
    label: str
    html: str


@dataclass
class Live:
    """Parts and cells with the number of the refresh that changed them last."""

    number: int = 0
    _parts: dict[str, tuple[int, str]] = field(default_factory=dict)
    _cells: dict[str, tuple[int, Cell]] = field(default_factory=dict)
    _made: dict[int, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins another refresh."""
        self.number += 1
        self._made.clear()

    def put(self, part: str, html: str) -> None:
        """Sets what an element shows."""
        old = self._parts.get(part)
        if old is None or old[1] != html:
            self._parts[part] = (self.number, html)

    def put_cells(self, cells: list[Cell], *, whole: bool) -> None:
        """Sets what the grid's cells show; ``whole``: they stand in a part that is sent whole."""
        if whole:
            self._cells = {cell.id: (0, cell) for cell in cells}
            return
        for cell in cells:
            old = self._cells.get(cell.id)
            if old is None or old[1] != cell:
                self._cells[cell.id] = (self.number, cell)

    def since(self, number: int) -> str:
        """What has changed after that refresh, as JSON; empty: nothing has."""
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
        """All parts as they are."""
        return {name: html for name, (_, html) in self._parts.items()}
