"""Text from others that stands in logs and errors here."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Escapes what is not printable, so that nobody forges a second line, or a terminal's command."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
