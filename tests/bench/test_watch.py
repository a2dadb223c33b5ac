"""``muster bench watch`` with a few workers."""

from __future__ import annotations

import json
from pathlib import Path

from muster.bench.__main__ import main


def test_it_measures_scheduler_and_page(tmp_path: Path) -> None:
    path = tmp_path / "watch.json"
    options = ["--workers", "12", "--watchers", "2", "--turn-s", "1", "--turns", "1", "--json", str(path)]
    assert main(["watch", *options]) == 0
    measured = json.loads(path.read_text())
    assert measured["workers"] == 12
    assert measured["page_first_s"] > 0 and measured["page_bytes"] > 1000
    assert measured["death_to_seen_s"] > 0
