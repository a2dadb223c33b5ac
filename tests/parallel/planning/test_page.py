"""The page of a plan is complete, and loads nothing."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("torch")


from tests.parallel.planning.test_plan import wide


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}, "the page loads something"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_complete_and_loads_nothing() -> None:
    plan = wide()
    page = _Page()
    page.feed(plan.html())
    assert not page.open
    assert plan.verdict in page.words
    assert all(row.module in page.words for row in plan.rows())
    assert "cross_entropy_loss" in page.words
    assert "hsl(" in plan.html()
