"""What is shown of a certificate."""

from __future__ import annotations

from muster.certs.pki.certificates import printable


def test_text_of_a_certificate_is_cut() -> None:
    assert printable("\n" * 200) == ("\\n" * 100) + "..."
    assert printable("n" * 200) == "n" * 200
    assert printable("n" * 201) == "n" * 200 + "..."
