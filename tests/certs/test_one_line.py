"""Text from others never makes a line of its own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.certs.pki.certificates import printable
from muster.wire.log_lines import one_line


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_free_text_always_fits_one_log_line(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_what_is_escaped_can_be_told_from_what_was_sent() -> None:
    assert one_line("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"


def test_text_of_a_certificate_is_cut() -> None:
    assert printable("\n" * 200) == ("\\n" * 100) + "..."
    assert printable("n" * 200) == "n" * 200
    assert printable("n" * 201) == "n" * 200 + "..."
